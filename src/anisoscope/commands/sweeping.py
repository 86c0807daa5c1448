"""`anisoscope sweep`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands.shared import FAILED, PARTLY, Config, Debug, Json, Output, Protocol, app, merge, reporting, say
from anisoscope.errors import SpecError
from anisoscope.flags import pick, run_flags, spec_flags, takes, words
from anisoscope.records import Checkpoint, Spec
from anisoscope.validation import check_settings


@app.command()
@takes(spec_flags, run_flags)
def sweep(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Hub repository, folder of checkpoints, or family with a * in its name; left out with --checkpoints.",
        ),
    ] = None,
    revisions: Annotated[str | None, typer.Option(help="Glob on branches and tags.  [those that state a step]")] = None,
    checkpoints: Annotated[str | None, typer.Option(help="Glob on local folders, such as 'out/checkpoint-*'.")] = None,
    listed: Annotated[
        Path | None, typer.Option("--list", help="File with a MODEL@REVISION, folder or revision on each line.")
    ] = None,
    log_spaced: Annotated[int | None, typer.Option(min=2, help="Take so many, evenly spaced in log step.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Take every Nth; the last is always among them.")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Training tokens in a step, where you know it.")
    ] = None,
    corpora: Annotated[str | None, typer.Option(help="Several corpora, with commas between them.")] = None,
    engine: Annotated[str, typer.Option(help="local, processes, ray (joins RAY_ADDRESS) or slurm.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Checkpoints measured side by side.  [as there is room]")] = None,
    gpus_per_job: Annotated[float, typer.Option(help="GPUs a checkpoint needs.")] = 0.0,
    cpus_per_job: Annotated[int, typer.Option(help="Cores a checkpoint gets from Ray and Slurm.")] = 1,
    slurm: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for submitit, such as slurm_partition=gpu; repeatable.")
    ] = None,
    max_retries: Annotated[
        int, typer.Option(help="Times a unit is tried again when a worker or the network dies.")
    ] = 2,
    downloads: Annotated[int, typer.Option(help="Checkpoints a host downloads at the same time.")] = 2,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Measure suspicious checkpoints too, marked.")] = False,
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Keep downloaded files in the hub's cache.")] = False,
    drift: Annotated[
        bool, typer.Option("--drift", help="Also how the output embedding moved from each checkpoint to the next.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Also gradients against tangent proxies of earlier checkpoints.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan with sizes, and measure nothing.")] = False,
    protocol: Protocol = None,
    config: Config = None,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Measure the checkpoints of training runs; running the same command again does what is left.

    Example: anisoscope sweep EleutherAI/pythia-160m --log-spaced 12 --corpus enwik8 -o runs/pythia
    """
    with reporting(debug):
        from anisoscope.checkpoints import choose, find_checkpoints, inspect_all, read_list
        from anisoscope.listings import print_plan

        how = {"engine": engine, "workers": workers, "gpus_per_job": gpus_per_job, "cpus_per_job": cpus_per_job}
        how |= {"max_retries": max_retries, "downloads": downloads}
        check_settings(how)
        if output is None and not dry_run:
            raise SpecError("a sweep needs a folder to store units in: -o RUN")
        names = list(models or [])
        if checkpoints is not None:
            names.append(str(Path(checkpoints).parent))
            revisions = Path(checkpoints).name
        names, settings = merge(names, pick(flags, spec_flags), protocol, required=listed is None, dynamics=True)
        texts = words(corpora, "--corpora") or (settings.pop("corpus", Spec.corpus),)
        if listed is not None:
            chosen = series = read_list(listed, names[0] if names else None, tokens_per_step=tokens_per_step)
        else:
            runs = [find_checkpoints(name, revisions=revisions, tokens_per_step=tokens_per_step) for name in names]
            followed = [_followed(run, protocol if revisions is None else None) for run in runs]
            chosen = [item for run in followed for item in choose(run, log_spaced=log_spaced, every=every)]
            series = [item for run in runs for item in run]
        if dry_run or output is None:
            verified = inspect_all(chosen, series=series, progress=not as_json)
            print_plan(verified, corpora=texts, as_json=as_json)
            return
        from anisoscope.sweep import plan_specs, run_sweep

        swept = run_sweep(
            plan_specs(chosen, texts, settings),
            output,
            checkpoints=chosen,
            series=series,
            **how,
            verify=not no_verify,
            keep_cache=keep_cache,
            engine_options=_pairs(slurm or []),
            progress=not as_json,
            follow=follow,
            **pick(flags, run_flags),
        )
        if drift:
            _follow_drift(chosen, texts, settings, output, pick(flags, run_flags) | {"progress": not as_json})
        _tell_swept(swept, output, as_json)
        if swept.failed:
            raise typer.Exit(PARTLY if swept.measured or swept.stored_before else FAILED)


def _followed(run: list[Checkpoint], protocol: str | None) -> list[Checkpoint]:
    """The checkpoints of a run that a paper follows, where its protocol names them."""
    from anisoscope.protocols import load_protocol

    wanted = () if protocol is None else load_protocol(protocol).revisions
    found = [item for item in run if item.revision in wanted]
    if wanted and not found:
        raise SpecError(f"{run[0].model} has none of the checkpoints of {protocol}; name others with --revisions")
    return found or run


def _follow_drift(
    chosen: list[Checkpoint], texts: Sequence[str], settings: dict[str, Any], output: Path, run: dict[str, Any]
) -> None:
    """The intervals of each training, one after the other, in this process."""
    from anisoscope.drift import follow_drift
    from anisoscope.revisions import training_order
    from anisoscope.store import Store

    loading = {name: value for name, value in run.items() if name != "batch_size"}
    for model, corpus in product(dict.fromkeys(item.model for item in chosen), texts):
        series = [item for item in chosen if item.model == model]
        series.sort(key=lambda item: training_order(item.stage, item.step, item.revision))
        follow_drift(series, Spec(model=model, corpus=corpus, **settings), store=Store(output), **loading)


def _pairs(items: list[str]) -> dict[str, Any]:
    for item in items:
        if "=" not in item:
            raise SpecError(f"--slurm takes NAME=VALUE; came {item!r}")
    pairs = (item.split("=", 1) for item in items)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def _tell_swept(swept: Any, output: Path, as_json: bool) -> None:
    for finding in swept.findings:
        say(f"suspicious, measured and marked: {finding}")
    if as_json:
        print(json.dumps(asdict(swept)))
        return
    counts = f"{len(swept.measured)} measured, {len(swept.stored_before)} stored before, {len(swept.failed)} failed"
    print(f"{counts}; units are in {output}")
    if swept.failed:
        print(f"`anisoscope status {output}` says why; the same command tries them again")
