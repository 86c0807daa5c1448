"""`anisoscope export`, `anisoscope cite`: a run elsewhere, and what to cite for it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.shared import Debug, Json, app, open_run, reporting, say


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[str, typer.Option(help="wandb, tensorboard, jsonl (curves); csv, parquet (rows).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="File of rows, folder of curves.  [RUN/exported/...]"),
    ] = None,
    all_sites: Annotated[
        bool, typer.Option("--all-sites", help="A curve for every block, not only mean, maximum and heat map.")
    ] = False,
    project: Annotated[str, typer.Option(help="Of W&B; WANDB_MODE=offline writes files only.")] = "anisoscope",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a finished run to W&B, TensorBoard, JSONL, CSV or Parquet: every step, by the keys of the live sinks.

    In Python: anisoscope.Store(RUN).table().to_pandas()

    Example: anisoscope export runs/pythia --to tensorboard -o boards/pythia
    """
    with reporting(debug):
        from anisoscope.exporting import export_run

        written = export_run(open_run(run), to, output, all_sites=all_sites, project=project)
        if as_json:
            print(json.dumps(asdict(written)))
            return
        for place in written.places:
            print(place)
        if written.stepless:
            say(f"no step is known of {', '.join(written.stepless)}: shown at step 0")


@app.command()
def cite(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    style: Annotated[str, typer.Option("--format", help="bibtex, or text to read.")] = "bibtex",
    debug: Debug = False,
) -> None:
    """Print the references of what was computed: estimators, protocol, models, corpus, and anisoscope.

    Example: anisoscope cite runs/pythia > geometry.bib
    """
    with reporting(debug):
        from anisoscope.citing import as_bibtex, as_text, check_format, cite_run

        check_format(style)
        found = cite_run(open_run(run))
        print(as_bibtex(found) if style == "bibtex" else as_text(found))
