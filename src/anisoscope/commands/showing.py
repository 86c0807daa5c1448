"""What shows: `report`, `serve`."""

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.shared import PARTLY, Debug, app, open_run, reporting, say
from anisoscope.validation import MAX_SEED

# How long a browser waits for the report before it gets a page that says that it is being made.
PATIENCE_SECONDS = 2.0


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are shown side by side.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File, or folder for pictures.  [report.html]")
    ] = None,
    how: Annotated[
        str, typer.Option("--format", metavar="html|png|svg|pdf|csv|parquet", help="Page, pictures, or the table.")
    ] = "html",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the bootstrap behind the verdicts.")] = 0,
    debug: Debug = False,
) -> None:
    """Write one HTML file that opens offline: verdicts, figures, method, provenance, warnings, data.

    Example: anisoscope report runs/pythia -o pythia.html
    """
    with reporting(debug):
        from anisoscope.report.exporting import write_report

        for run in runs:
            open_run(run)
        written = write_report(runs, output, how=how, seed=seed)
        for fault in written.failed:
            say(f"not drawn: {fault}")
        print(written.path)
        if written.failed:
            raise typer.Exit(PARTLY)


@app.command()
def serve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; they may still be growing.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 0,
    allow_other_hosts: Annotated[
        bool, typer.Option("--allow-other-hosts", help="Listen where other machines can reach it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show the report in a browser, made again as units arrive; Ctrl-C ends it.

    Example: anisoscope serve runs/live
    """
    with reporting(debug):
        from anisoscope.serve import open_server

        options = {"host": host, "port": port, "allow_other_hosts": allow_other_hosts, "patience": PATIENCE_SECONDS}
        with open_server(runs, **options) as server:
            print(server.address, flush=True)
            say(f"making the report of {', '.join(map(str, runs))}; the address can be opened now. Ctrl-C ends it")
            server.pages.begin()
            try:
                server.serve_forever(poll_interval=0.2)
            except KeyboardInterrupt:
                say("ended")
