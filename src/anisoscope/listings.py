"""What is there and what came of it, for people: lists, status, plans, verdicts, the environment."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table
from rich.text import Text

from anisoscope.claims import Correlation, Verdict, headlines
from anisoscope.claims.verdicts import OUTCOMES
from anisoscope.errors import SpecError
from anisoscope.figures import count_label, dynamics_data
from anisoscope.integrity import Verified
from anisoscope.lab import Trained
from anisoscope.printing import format_value, open_console
from anisoscope.status import Overview, as_table

# Rows of a status: more than anybody reads, and few enough to be printed at once.
MOST_ROWS = 400


def listing(what: str, model: str | None = None, revisions: str | None = None) -> list[dict[str, Any]]:
    """The rows of `ls`."""
    if what == "checkpoints" and model is not None:
        from anisoscope.checkpoints import find_checkpoints

        return [
            {name: getattr(item, name) for name in ("model", "revision", "stage", "step", "tokens", "commit")}
            for item in find_checkpoints(model, revisions=revisions)
        ]
    if what == "metrics":
        from anisoscope.metrics import all_metrics

        return [
            {
                "family": item.family,
                "metric": item.name,
                "version": item.version,
                "null": item.null,
                "populations": ",".join(item.populations),
                "cite": item.cite,
                "what": item.summary,
            }
            for item in all_metrics().values()
        ]
    if what == "models":
        from anisoscope.layout import FAMILIES

        return [{"kind": kind, "families": ", ".join(names)} for kind, names in FAMILIES.items()]
    if what == "corpora":
        from anisoscope.corpora import CORPORA

        return [{"corpus": name, "what": text} for name, text in CORPORA.items()]
    if what == "protocols":
        from anisoscope.protocols import load_protocol, protocol_names

        papers = [load_protocol(name) for name in protocol_names()]
        return [{"protocol": p.name, "what": p.title, "models": len(p.models), "cite": p.cite} for p in papers]
    raise SpecError(f"ls lists metrics, models, corpora, protocols or checkpoints; came {what!r}")


def print_listing(what: str, rows: Sequence[dict[str, Any]]) -> None:
    """A listing as a table, and a sentence on what it does not say."""
    console = open_console()
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    console.print(table)
    if what == "models":
        console.print(
            "\nThese families are tested. Any other transformers model works where its blocks and final norm are found "
            "and proven\nat load: `anisoscope doctor MODEL` tells. A hub name, a local folder or a .gguf file."
        )


def print_status(seen: Overview) -> None:
    """The results of a run and their states; of a large run those that are not done, and as many others as fit."""
    console = open_console()
    rows = seen.rows
    if len(rows) > MOST_ROWS:
        rows = sorted(rows, key=lambda row: row["state"] == "done")[:MOST_ROWS]
    console.print(as_table(rows))
    if len(rows) < len(seen.rows):
        console.print(f"{len(seen.rows) - len(rows):,} more results are not listed; `--json` lists them all")
    console.print(seen.sentence())


def print_plan(verified: Verified, *, corpora: Sequence[str], as_json: bool) -> None:
    """What a sweep would measure, and how much it would read or download."""
    rows = [
        {
            "model": item.model,
            "revision": item.revision,
            "stage": item.stage,
            "step": item.step,
            "tokens": item.tokens,
            "commit": item.commit,
            "bytes": item.size,
            "suspect": item.suspect,
        }
        for item in verified.checkpoints
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    console = open_console()
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right" if name in ("step", "tokens", "bytes") else "left", overflow="fold")
    for row in rows:
        told = {**row, "bytes": format_bytes(row["bytes"]), "commit": (row["commit"] or "")[:12]}
        table.add_row(*(Text("" if value is None else str(value)) for value in told.values()))
    console.print(table)
    total = format_bytes(sum(row["bytes"] for row in rows))
    console.print(
        f"{len(rows)} checkpoints x {len(corpora)} corpora ({', '.join(corpora)}) = {len(rows) * len(corpora)} units, "
        f"{total} in all, {format_bytes(max(row['bytes'] for row in rows))} the largest"
    )
    if verified.findings:
        console.print(f"{len(verified.findings)} are suspicious: the sweep stops at them unless --no-verify is given")


def format_bytes(count: int) -> str:
    """A size as people say it."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def print_verdicts(verdicts: Sequence[Verdict], *, only_decided: bool = False) -> None:
    """A table of verdicts; then each verdict as a sentence.

    Proxies and variants that agree share one line. `only_decided` names inconclusive claims in one line at the end.
    """
    console = open_console()
    if not verdicts:
        console.print("no claim can be tested on these results: claims need leading_variance or twonn at blocks")
        return
    open_claims = list(dict.fromkeys(one.claim for one in verdicts if one.holds is None))
    verdicts = headlines(verdicts)
    if only_decided:
        verdicts = [one for one in verdicts if one.holds is not None]
    table = Table(box=None, pad_edge=False)
    for name in ("claim", "verdict", "about", "estimator", "population", "effect", "interval", "corrected p"):
        table.add_column(name, justify="right" if name in ("effect", "interval", "corrected p") else "left")
    for one in verdicts:
        low, high = one.interval
        table.add_row(
            one.claim,
            "present before training" if one.holds and one.before_training else OUTCOMES[one.holds],
            Text(", ".join(part for part in (one.subject, one.variant) if part)),
            one.metric,
            one.population,
            format_value(one.effect),
            "–" if math.isnan(low) else f"{format_value(low)} … {format_value(high)}",
            format_value(one.p_adjusted),
        )
    console.print(table)
    console.print()
    for one in verdicts:
        console.print(Text(f"· {one.text}"))
    if only_decided and open_claims:
        console.print(Text(f"· Inconclusive with so few models and seeds: {', '.join(open_claims)}."))


def print_correlations(found: Sequence[Correlation]) -> None:
    """Correlations over checkpoints, of levels and of first differences."""
    if not found:
        return
    console = open_console()
    console.print(Text(f"\n{found[0].measure} against {found[0].against}, over checkpoints", style="bold"))
    table = Table(box=None, pad_edge=False)
    for name in ("model", "corpus", "of", "kind", "value", "interval", "p", "checkpoints"):
        table.add_column(name, justify="right" if name in ("value", "interval", "p", "checkpoints") else "left")
    for one in found:
        low, high = one.interval
        interval = "–" if math.isnan(low) else f"{format_value(low)} … {format_value(high)}"
        numbers = (format_value(one.value), interval, format_value(one.p), str(one.checkpoints))
        table.add_row(Text(one.model), Text(one.corpus), one.of, one.kind, *numbers)
    console.print(table)
    console.print("Series that drift correlate by their levels whatever they are about: the differences have the p.")
    for note in dict.fromkeys(one.note for one in found if one.note):
        console.print(Text(f"· {note}"))


def print_enrichment(table: pa.Table, model: str) -> None:
    """How much of a model's gradients lies in the tangent proxy, over training: means over the blocks measured."""
    kept = (pc.field("model") == model) & pc.field("depth").is_valid() & pc.field("bin").is_null()
    rows = table.filter(kept & (pc.field("proxy") == "pca") & (pc.field("variant") == "mean=in")).to_pylist()
    if not rows:
        return
    steps = sorted({row["step"] for row in rows})
    title = (
        "Gradients in the tangent proxy (PCA, means over blocks): energy, chance by our control, times random normals"
    )
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("gradient", "population", *(f"step {step:,}" for step in steps)):
        shown.add_column(name, justify="left" if name in ("gradient", "population") else "right")
    for gradient, population in dict.fromkeys((row["gradient"], row["population"]) for row in rows):
        cells = []
        for step in steps:
            here = [r for r in rows if (r["gradient"], r["population"], r["step"]) == (gradient, population, step)]
            energy, excess, ratio = (
                [row["value"] for row in here if row["metric"] == name]
                for name in ("tangent_energy", "tangent_excess", "normal_ratio")
            )
            chance = [a - b for a, b in zip(energy, excess, strict=False)]
            means = [sum(values) / len(values) if values else math.nan for values in (energy, chance, ratio)]
            cells.append(f"{format_value(means[0])} ({format_value(means[1])}, ×{means[2]:.3g})")
        shown.add_row(gradient, population, *cells)
    open_console().print(shown)


def print_dynamics(table: pa.Table, model: str) -> None:
    """How the geometry of one model went with its training: means over blocks, and the loss."""
    console = open_console()
    mine = table.filter(pc.field("model") == model)
    columns = {
        f"{metric}[{population}]": {
            row["step"]: row for row in dynamics_data(mine, metric=metric, populations=(population,)).to_pylist()
        }
        for metric, population in _DYNAMICS
    }
    losses = mine.filter(pc.field("metric") == "loss").to_pylist()
    columns["loss"] = {row["step"]: row for row in losses}
    shown = Table(
        box=None, pad_edge=False, title=f"{model}: means over blocks as training goes on", title_justify="left"
    )
    for name in ("step", *columns):
        # Text, because square brackets would be taken for markup.
        shown.add_column(Text(name), justify="right")
    for step in sorted({step for rows in columns.values() for step in rows}):
        cells = [rows.get(step) for rows in columns.values()]
        shown.add_row(
            count_label(step),
            *("–" if row is None else f"{format_value(row['value'])} ± {format_value(row['spread'])}" for row in cells),
        )
    console.print(shown)


_DYNAMICS = (("leading_variance", "all"), ("leading_variance", "typical"), ("twonn", "all"), ("twonn", "types"))


def print_trained(trained: Trained, watched: Mapping[str, Any] | None = None) -> None:
    """What came of a training."""
    console = open_console()
    held_out = [row for row in trained.losses if row.held_out is not None]
    recipe = trained.recipe
    console.print(
        Text(
            f"{recipe.kind} ({recipe.family}, {recipe.layers} x {recipe.width}), step {trained.step:,} of "
            f"{recipe.steps:,}, {count_label(trained.tokens)} tokens, {trained.seconds:.0f} s"
        )
    )
    if held_out:
        console.print(
            f"held-out loss {format_value(held_out[-1].held_out or math.nan)} nats per token; a unigram model has "
            f"{format_value(trained.unigram)}, a bigram model {format_value(trained.bigram)}"
        )
    console.print(
        f"sampling exponent: {recipe.sampling_exponent:g} asked, {format_value(trained.sampling_exponent)} achieved"
    )
    if trained.void:
        console.print(Text(f"VOID: {trained.void}"))
    if watched:
        console.print(
            f"{watched['measured']} steps measured live, {watched['skipped']} skipped for the budget, "
            f"{100 * watched['share']:.1f} % of the training time"
        )
    if not trained.finished:
        console.print("not finished: the same command goes on from here")
    console.print(Text(f"checkpoints and units are in {trained.output}"))


def print_environment() -> None:
    """What is installed, and what each missing part would be good for."""
    import torch

    console = open_console()
    table = Table(box=None, pad_edge=False)
    for name in ("what", "found", "for"):
        table.add_column(name)
    table.add_row("python", platform.python_version(), "")
    for package, purpose in (
        ("anisoscope", ""),
        ("torch", ""),
        ("transformers", ""),
        ("pyarrow", ""),
        ("accelerate", "--device-map and .gguf files: pip install 'anisoscope[gguf]'"),
        ("gguf", ".gguf files: pip install 'anisoscope[gguf]'"),
        ("datasets", "hf:DATASET corpora: pip install 'anisoscope[data]'"),
        ("ray", "sweep --engine ray: pip install 'anisoscope[ray]'"),
        ("submitit", "sweep --engine slurm: pip install 'anisoscope[slurm]'"),
    ):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        table.add_row(package, found, Text(purpose))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu only"]
    table.add_row("device", ", ".join(devices), f"{torch.get_num_threads()} threads")
    console.print(table)


def print_layout(model: Any) -> None:
    """The sites of a loaded model and what was proven about them."""
    console = open_console()
    console.print(Text(f"{model.name}: {model.kind}, loss head: {model.head or 'none'}, weights {model.weights[:16]}"))
    for stack in model.layout.stacks:
        title = f"{stack.name} stack" if stack.name else None
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("site")
        table.add_column("is")
        table.add_row("embed", Text(f"input of {stack.blocks[0]}"))
        for number, path in enumerate(stack.blocks):
            call = stack.blocks[:number].count(path)
            table.add_row(f"block.{number}", Text(f"output of {path}" + (f", call {call + 1}" if call else "")))
        table.add_row(
            "final_norm",
            Text(f"output of {stack.final_norm}" if stack.final_norm else "none: the stack ends with its last block"),
        )
        console.print(table)
    for check in model.checks:
        console.print(Text(f"proven: {check}"))
    for note in model.notes:
        console.print(Text(f"note: {note}"))
