"""What every command shares: the app, common flags, errors as one sentence, exit codes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.errors import AnisoscopeError, SpecError
from anisoscope.flags import read_config

app = typer.Typer(
    help="The shape of transformer representations: anisotropy, isotropy and intrinsic dimension, site by site.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

OK, FAILED, USAGE, PARTLY = 0, 1, 2, 3

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Protocol = Annotated[str | None, typer.Option(help="A paper's settings: `anisoscope ls protocols`.")]
Config = Annotated[
    Path | None,
    typer.Option(callback=read_config, is_eager=True, help="TOML file with any of these flags as keys; flags win."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="RUN", help="Folder to store units in.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON array on stdout and nothing else.")]


@contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Errors as one sentence on stderr and an exit code; a traceback only where it was asked for."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        say("interrupted; what was finished is kept")
        raise typer.Exit(FAILED) from None
    except Exception as error:
        if debug:
            raise
        say(sentence(error))
        raise typer.Exit(USAGE if isinstance(error, SpecError) else FAILED) from None


def sentence(error: BaseException) -> str:
    """An error for people."""
    if isinstance(error, AnisoscopeError):
        return f"error: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        return f"error: this needs {error.name}, which is not installed here: pip install {error.name}"
    if isinstance(error, OSError) and error.errno is not None:
        # What the operating system refuses is no fault of the program: a full disk, a loop of links, a name too long.
        where = "" if error.filename is None else f": {error.filename}"
        advice = "; set TMPDIR to a folder that can be written" if "temporary directory" in str(error) else ""
        return f"error: {error.strerror}{where}{advice} (--debug shows where)"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return f"error: a name that is not UTF-8 cannot be used here: {error.object!a}; rename the file or folder"
    if isinstance(error, MemoryError):
        return "error: not enough memory; ask for fewer --tokens, a smaller --batch-size or fewer sites"
    return f"unexpected error: {type(error).__name__}: {error} (--debug shows where)"


def say(text: str) -> None:
    """To stderr: progress and notes."""
    print(text, file=sys.stderr)


def merge(
    models: list[str], flags: dict[str, Any], protocol: str | None, *, required: bool = True, dynamics: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Flags over --protocol over the defaults of Spec; the paper's models, or those it follows over training."""
    settings: dict[str, Any] = {}
    if protocol is not None:
        from anisoscope.protocols import load_protocol

        paper = load_protocol(protocol)
        settings |= paper.spec
        models = models or list(paper.dynamics if dynamics else paper.models)
    if not models and required:
        raise SpecError("name at least one MODEL (or a --protocol that lists some)")
    return models, settings | flags


def open_run(run: Path) -> Any:
    """The store of a run that must be there."""
    from anisoscope.errors import StoreError
    from anisoscope.store import Store

    if not run.is_dir():
        raise StoreError(f"there is no run folder {run}")
    return Store(run)
