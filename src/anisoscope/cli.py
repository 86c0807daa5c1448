"""The command line: parse, call, print. Results go to stdout, progress and notes to stderr."""

import sys
from typing import Annotated

import typer

from anisoscope import __version__
from anisoscope.commands import concepts, exporting, lab, measuring, reading, reproducing, showing, sweeping
from anisoscope.commands.shared import FAILED, app, say, sentence
from anisoscope.errors import StoreError
from anisoscope.terminal import finish_output, prepare_streams

__all__ = ["app", "concepts", "exporting", "lab", "main", "measuring", "reading", "reproducing", "showing", "sweeping"]


def main() -> None:
    """Entry point of the `anisoscope` command."""
    prepare_streams()
    try:
        try:
            app()
        finally:
            # Here, where a failure is still a sentence; Python would flush after that with a traceback.
            finish_output()
    except StoreError as error:
        say(sentence(error))
        sys.exit(FAILED)


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
