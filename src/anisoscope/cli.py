"""The command line: parse, call, print. Results go to stdout, progress and notes to stderr."""

from typing import Annotated

import typer

from anisoscope import __version__
from anisoscope.commands import concepts, exporting, lab, measuring, reading, reproducing, showing, sweeping
from anisoscope.commands.shared import app

__all__ = ["app", "concepts", "exporting", "lab", "main", "measuring", "reading", "reproducing", "showing", "sweeping"]


def main() -> None:
    """Entry point of the `anisoscope` command."""
    app()


def _version(wanted: bool) -> bool:
    if wanted:
        print(f"anisoscope {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
