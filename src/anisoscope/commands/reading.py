"""What reads: `ls`, `status`, `claims`, `doctor`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.shared import FAILED, Debug, Json, app, open_run, reporting, say
from anisoscope.errors import SpecError
from anisoscope.flags import words
from anisoscope.validation import MAX_SEED


@app.command("ls")
def list_things(
    what: Annotated[str, typer.Argument(metavar="metrics|models|corpora|protocols|checkpoints")],
    model: Annotated[str | None, typer.Argument(help="Whose checkpoints: repository, folder or family.")] = None,
    revisions: Annotated[str | None, typer.Option(help="Glob on the names of checkpoints.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what there is: metrics, models, corpora, protocols, or the checkpoints of a MODEL.

    Example: anisoscope ls checkpoints pocket-decoder
    """
    with reporting(debug):
        from anisoscope import listings

        if (what == "checkpoints") != (model is not None):
            raise SpecError("MODEL goes with `ls checkpoints`, and only with it")
        rows = listings.listing(what, model, revisions)
        if as_json:
            print(json.dumps(rows, ensure_ascii=False))
        else:
            listings.print_listing(what, rows)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which units of a run are done, running, failed and waiting, and how long the rest will take.

    Example: anisoscope status runs/sweep
    """
    with reporting(debug):
        from anisoscope.listings import print_status
        from anisoscope.status import survey

        store = open_run(run)
        if as_json:
            seen = survey(store)
            print(json.dumps({"units": seen.rows, "seconds_left": seen.seconds_left}, ensure_ascii=False))
        else:
            print_status(survey(store))


@app.command()
def claims(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, judged together.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 where 'leading_variance[final_norm] > 0.5' holds at the end; repeatable."),
    ] = None,
    correlate: Annotated[
        str | None, typer.Option(help="Also correlate, over checkpoints, such as 'isoscore[final_norm,typical]' ...")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="... with FILE.csv[:COLUMN] (columns model, step and more).  [the loss]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the bootstrap.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Test the papers' findings on what was measured: effect, interval, p, and whether a claim holds.

    Example: anisoscope claims runs/pythia --fail-if 'leading_variance[block.*,typical] > 0.9'
    """
    with reporting(debug):
        import pyarrow as pa

        from anisoscope.claims import judge
        from anisoscope.claims.correlations import correlate_table, read_column
        from anisoscope.conditions import parse, place_of
        from anisoscope.listings import print_correlations, print_verdicts

        if against is not None and not correlate:
            raise SpecError("--against goes with --correlate METRIC[SITE], which names what is compared with the file")
        gates = [parse(text) for text in fail_if or []]
        table = pa.concat_tables([open_run(run).table() for run in runs])
        verdicts = judge(table, seed=seed)
        file, _, column = (against or "").partition(":")
        given = {"against": read_column(file, column or None), "named": column or file} if against else {}
        found = correlate_table(table, correlate, seed=seed, **given) if correlate else []
        if as_json:
            print(json.dumps([one.as_json() for one in (*verdicts, *found)], ensure_ascii=False))
        else:
            print_verdicts(verdicts)
            print_correlations(found)
        closed = [(gate, row) for gate in gates for row in gate.matches(table)]
        for gate, row in closed:
            say(f"{gate}: {row['model']} has {row['value']:.4g} at {place_of(row)}, step {row['step']}")
        if closed:
            raise typer.Exit(FAILED)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="Load this model, show the sites found and prove them.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model's weights.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    blocks: Annotated[str | None, typer.Option(help="Path of the block list, to try one by hand.")] = None,
    final_norm: Annotated[str | None, typer.Option(help="Path of the final norm, to try one by hand.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the hub.")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights.")] = False,
    debug: Debug = False,
) -> None:
    """Show what is installed here; with MODEL, where its sites are, and prove it.

    Example: anisoscope doctor pocket-decoder
    """
    with reporting(debug):
        from anisoscope import listings

        if model is None:
            listings.print_environment()
            return
        from anisoscope.models import load_model

        loaded = load_model(
            model,
            revision=revision,
            dtype=dtype,
            device=device,
            blocks=words(blocks, "--blocks") or (),
            final_norm=words(final_norm, "--final-norm") or (),
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        listings.print_layout(loaded)
