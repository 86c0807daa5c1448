"""Models of our own: `train`, `demo`."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands.shared import PARTLY, Config, Debug, Json, app, reporting, say
from anisoscope.conditions import parse
from anisoscope.errors import SpecError
from anisoscope.flags import above_zero, above_zero_or_inf, finite, words
from anisoscope.lab import Recipe
from anisoscope.presets import check_preset
from anisoscope.records import Spec
from anisoscope.validation import MAX_SEED


@app.command()
def train(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="Folder of the training.")],
    kind: Annotated[str, typer.Option(help="decoder (next token) or encoder (masked tokens).")] = Recipe.kind,
    layout: Annotated[
        str | None, typer.Option(help="gpt_neox; bert (post-norm) or eurobert (pre-norm).  [gpt_neox, bert]")
    ] = None,
    corpus: Annotated[str, typer.Option(help="Text to learn from and to measure on.")] = Recipe.corpus,
    layers: Annotated[int, typer.Option(min=1, help="Blocks.")] = Recipe.layers,
    width: Annotated[int, typer.Option(min=8, help="Of the residual stream.")] = Recipe.width,
    heads: Annotated[int, typer.Option(min=1, help="Of attention.")] = Recipe.heads,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Head and embedding.  [bert tied, others not]")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Entries of the tokenizer, learned on the spot.")
    ] = Recipe.vocabulary,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a window.")] = Recipe.seq_len,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a step.")] = Recipe.batch_size,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = Recipe.steps,
    learning_rate: Annotated[float, typer.Option(callback=above_zero, help="After warm-up.")] = Recipe.learning_rate,
    warmup: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises.")] = Recipe.warmup,
    dropout: Annotated[
        float, typer.Option(min=0, max=0.99, callback=finite, help="Of states and attention.")
    ] = Recipe.dropout,
    sampling_exponent: Annotated[
        float, typer.Option(callback=finite, help="Learn from a type of frequency f as if it were f to this power.")
    ] = Recipe.sampling_exponent,
    regularize: Annotated[
        list[str] | None,
        typer.Option(help="METRIC=WEIGHT to add to the loss, such as leading_variance=0.1; repeatable."),
    ] = None,
    checkpoints: Annotated[int, typer.Option(min=2, help="Kept, evenly spaced in log step.")] = Recipe.checkpoints,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 (autocast).  auto: bfloat16 on a GPU")] = Recipe.dtype,
    compiled: Annotated[bool, typer.Option("--compile", help="Train with torch.compile.")] = Recipe.compiled,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of weights, text and masks.")] = Recipe.seed,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    watch: Annotated[
        str, typer.Option(help="Geometry measured live: economy, standard, gradients, full, or none.")
    ] = "standard",
    metrics: Annotated[
        str | None, typer.Option(help="Estimators or families measured live, with commas.  [as --watch has it]")
    ] = None,
    watch_steps: Annotated[int, typer.Option(min=1, help="Steps measured live, evenly spaced in log step.")] = 32,
    budget: Annotated[
        float,
        typer.Option(callback=above_zero_or_inf, help="Share of training time that measuring may take; inf: no limit."),
    ] = 0.02,
    stop_if: Annotated[
        list[str] | None, typer.Option(help="Stop where 'leading_variance[final_norm] > 0.9 for 3' holds; repeatable.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(callback=above_zero, help="End this part in time; the same command goes on.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small model from scratch and measure its geometry meanwhile; the same command resumes it.

    Example: anisoscope train --kind decoder --corpus enwik8 --steps 4000 -o runs/decoder
    """
    with reporting(debug):
        recipe = Recipe(
            kind=kind,
            layout=layout,
            corpus=corpus,
            layers=layers,
            width=width,
            heads=heads,
            tied=tied,
            vocabulary=vocabulary,
            seq_len=seq_len,
            batch_size=batch_size,
            steps=steps,
            learning_rate=learning_rate,
            warmup=warmup,
            dropout=dropout,
            sampling_exponent=sampling_exponent,
            regularize=_weights(regularize or []),
            checkpoints=checkpoints,
            dtype=dtype,
            compiled=compiled,
            seed=seed,
        )
        # What is asked of the measuring is checked before torch is loaded, which takes seconds.
        asked = words(metrics, "--metrics") or Spec.metrics
        preset = None if watch == "none" else check_preset(watch)
        for text in stop_if or []:
            parse(text)
        from anisoscope.training import train as train_recipe

        callbacks = [] if preset is None else [_watcher(recipe, output, preset, asked, watch_steps, budget, stop_if)]
        trained = train_recipe(
            recipe, output, callbacks=callbacks, device=device, max_seconds=max_seconds, progress=not as_json
        )
        if as_json:
            from anisoscope.records import without_nan

            print(json.dumps(without_nan(asdict(trained)), default=str))
        else:
            from anisoscope.listings import print_trained

            print_trained(trained, watched=callbacks[0].scope.summary if callbacks and callbacks[0].scope else None)
        if trained.void or not trained.finished:
            raise typer.Exit(PARTLY)


def _watcher(
    recipe: Recipe,
    output: Path,
    preset: str,
    metrics: tuple[str | tuple[str, int], ...],
    steps: int,
    budget: float,
    stop_if: list[str] | None,
) -> Any:
    from anisoscope.schedules import log_spaced
    from anisoscope.shells import TrainerCallback

    if steps < 1:
        raise SpecError(f"--watch-steps is a number of steps of at least 1; came {steps} (or --watch none)")
    # The folder's name is the model's: `runs/small-seed0` and `runs/small-seed1` are seeds of one training.
    name = os.path.basename(os.path.abspath(output))
    spec = Spec(model=name, corpus=f"heldout:{recipe.corpus}", seq_len=recipe.seq_len, metrics=metrics)
    count = min(steps, recipe.steps)
    return TrainerCallback(
        spec,
        run=name,
        store=output,
        preset=preset,
        when=log_spaced(max(3, count), until=max(3, recipe.steps)),
        budget=budget,
        stop_if=stop_if,
    )


def _weights(items: list[str]) -> dict[str, float]:
    found = {}
    for item in items:
        name, _, weight = item.partition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise SpecError(f"--regularize takes METRIC=WEIGHT, such as leading_variance=0.1; got {item!r}")
    return found


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="Folder to store units in.")] = Path(
        "runs/demo"
    ),
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to run through each checkpoint.")] = 6144,
    debug: Debug = False,
) -> None:
    """Everything on the two small models of the package and their checkpoints, offline, in about a minute.

    Example: anisoscope demo -o runs/demo
    """
    with reporting(debug):
        from anisoscope.checkpoints import find_checkpoints
        from anisoscope.claims import judge
        from anisoscope.listings import print_dynamics, print_enrichment, print_verdicts
        from anisoscope.printing import print_unit
        from anisoscope.report.exporting import write_report
        from anisoscope.sources import POCKET_SUITE
        from anisoscope.store import Store
        from anisoscope.sweep import plan_specs, run_sweep

        say("Two small models that were trained for this package, each at six moments of its training, on pydoc;")
        say("their gradients at three of them, in three blocks.")
        chosen = [item for name in POCKET_SUITE for item in find_checkpoints(name)]
        few = [item for item in chosen if item.step in DEMO_GRADIENTS["steps"]]
        settings = {"tokens": tokens, "seq_len": 256, "batch_points": 768, "metrics": DEMO_METRICS}
        specs = plan_specs(chosen, ["pydoc"], settings) + plan_specs(few, ["pydoc"], DEMO_GRADIENTS["settings"])
        store = Store(output)
        run_sweep(specs, store, checkpoints=chosen, device="cpu")
        table = store.table()
        for name in POCKET_SUITE:
            last = max((row for row in table.to_pylist() if row["model"] == name), key=lambda row: row["step"])
            print_unit(store.get(last["key"]))
            print_dynamics(table, name)
            print_enrichment(table, name)
            print()
        print_verdicts(judge(table), only_decided=True)
        say("Writing the report.")
        written = write_report([output], output / "report.html")
        print(f"\nStored in {output}: `anisoscope claims {output}` judges again.")
        print(f"The report, with every figure: {written.path}")
        print("Now a model of yours:  anisoscope measure MODEL --owners")


DEMO_METRICS = ("leading_variance", "mean_cosine", "isoscore", "twonn", "loss", "final_norm")
DEMO_GRADIENTS: dict[str, Any] = {
    "steps": (0, 64, 4096),
    "settings": {
        "tokens": 4096,
        "seq_len": 64,
        "sites": ("block.1", "block.3", "block.5"),
        "populations": ("typical",),
        "metrics": ("tangent_energy", "tangent_excess", "normal_ratio"),
    },
}
