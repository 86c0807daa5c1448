"""`anisoscope reproduce`: a paper's claims, from its models or from small ones that stand in for them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands.shared import FAILED, PARTLY, Debug, Json, Output, app, reporting, say
from anisoscope.errors import SpecError
from anisoscope.flags import pick, run_flags, takes
from anisoscope.validation import check_settings


@app.command()
@takes(run_flags)
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="razzhigaev2024|machina2024|bernas2026")],
    size: Annotated[
        str,
        typer.Option(
            help="pocket: the package's own models, offline, minutes; small: trains some first; paper: its models."
        ),
    ] = "pocket",
    variant: Annotated[
        str | None, typer.Option(help="Where text and released code differ: print or code.  [print where there is one]")
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="Another text.  [pydoc; at --size paper the paper's]")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to run through each checkpoint.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens in a window.")] = None,
    batch_points: Annotated[int | None, typer.Option(min=2, help="Points a batch has at least.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Small: trainings of each kind.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Small: updates of each training.  [1000]")] = None,
    drift: Annotated[
        bool | None,
        typer.Option(
            "--drift/--no-drift",
            help="machina2024: follow the output embedding; each checkpoint stays in the hub's cache.  [not at paper]",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, processes, ray or slurm.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Checkpoints measured side by side.")] = None,
    gpus_per_job: Annotated[float, typer.Option(help="GPUs a checkpoint needs.")] = 0.0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Measure suspicious checkpoints too, marked.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List every model, revision and size, and measure nothing.")
    ] = False,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Measure what a paper measured and say of each of its claims: reproduced, not reproduced, inconclusive.

    What is in RUN already is not measured again: the same command goes on where it ended.

    Example: anisoscope reproduce razzhigaev2024 --size pocket -o runs/shape
    """
    with reporting(debug):
        from anisoscope.reproductions import find_paper, judge_paper
        from anisoscope.reproductions.plans import check_request, list_plan, plan_corpora
        from anisoscope.reproductions.showing import print_listed, print_outcomes

        check_settings({"engine": engine, "workers": workers, "gpus_per_job": gpus_per_job})
        wanted = find_paper(paper)
        check_request(wanted, size, variant)
        training = {"seeds": seeds, "steps": steps, "corpus": corpus}
        if dry_run:
            rows = list(list_plan(wanted, size, output=output or Path("RUN"), **training))
            if as_json:
                print(json.dumps(rows, ensure_ascii=False))
            else:
                print_listed(wanted, size, rows, plan_corpora(wanted, size, corpus))
            return
        if output is None:
            raise SpecError("a reproduction needs a folder to store units in: -o RUN")
        given = {"tokens": tokens, "seq_len": seq_len, "batch_points": batch_points}
        from anisoscope.reproductions.working import note_reproduction
        from anisoscope.reproductions.working import reproduce as make
        from anisoscope.store import Store

        work = make(
            wanted,
            size,
            output,
            variant=variant,
            given={name: value for name, value in given.items() if value is not None},
            **training,
            drift=drift,
            engine=engine,
            workers=workers,
            gpus_per_job=gpus_per_job,
            verify=not no_verify,
            progress=not as_json,
            **pick(flags, run_flags),
        )
        note_reproduction(wanted, size, variant, output)
        outcomes = judge_paper(wanted, Store(output).table(), keys=work.keys)
        if as_json:
            print(json.dumps([one.as_json() for one in outcomes], ensure_ascii=False))
        else:
            print_outcomes(wanted, size, outcomes)
        counts = f"{len(work.measured)} units measured, {len(work.stored_before)} stored before"
        say(f"\n{counts}; they are in {output}: anisoscope claims {output}, anisoscope cite {output}")
        for model, why in work.refused.items():
            say(f"not measured: {model}: {why}")
        if work.failed:
            say(f"{len(work.failed)} units failed: `anisoscope status {output}` says why; the same command tries again")
        if work.partly:
            raise typer.Exit(PARTLY if work.keys else FAILED)
