"""The command line: parse, call, print. Results go to stdout, progress and notes to stderr."""

import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope import __version__
from anisoscope.errors import AnisoscopeError, SpecError
from anisoscope.records import Spec

app = typer.Typer(
    help="The shape of transformer representations: anisotropy, isotropy and intrinsic dimension, site by site.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

OK, FAILED, USAGE, PARTLY = 0, 1, 2, 3

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON array on stdout and nothing else.")]


def main() -> None:
    """Entry point of the `anisoscope` command."""
    app()


@contextmanager
def _reporting(debug: bool) -> Iterator[None]:
    """Errors as one sentence on stderr and an exit code; a traceback only where it was asked for."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _say("interrupted; what was finished is kept")
        raise typer.Exit(FAILED) from None
    except Exception as error:
        if debug:
            raise
        _say(_sentence(error))
        raise typer.Exit(USAGE if isinstance(error, SpecError) else FAILED) from None


def _sentence(error: BaseException) -> str:
    if isinstance(error, AnisoscopeError):
        return f"error: {error}"
    return f"unexpected error: {type(error).__name__}: {error} (--debug shows where)"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


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


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(word) for word in _words(text) or ())
    except ValueError as error:
        raise SpecError(f"--gride-scales takes whole numbers with commas between them; came {text!r}") from error


@app.command()
def measure(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...", help="Hub name, local folder or .gguf file; may be left out with --protocol."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    corpus: Annotated[
        str | None, typer.Option(help="pydoc, enwik8, a file or folder, hf:DATASET, or - for stdin.  [pydoc]")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Estimators or families, with commas between them.")] = None,
    sites: Annotated[str | None, typer.Option(help="Such as embed,block.*,final_norm (patterns allowed).")] = None,
    populations: Annotated[
        str | None, typer.Option(help="Out of all, content, typical, types, matched.  [each metric's own]")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to run through the model.  [65536]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a window.  [512]")] = None,
    batch_points: Annotated[int | None, typer.Option(help="Points a batch has at least.  [4096]")] = None,
    special_tokens: Annotated[
        bool | None, typer.Option("--special-tokens/--no-special-tokens", help="The tokenizer's own.  [on]")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model's weights and states.  [float32]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random choice.  [0]")] = None,
    typical_k: Annotated[float | None, typer.Option(help="Norm limit of `typical`, in MADs.  [6]")] = None,
    discard_fraction: Annotated[float | None, typer.Option(help="Largest ratios TwoNN leaves out.  [0.1]")] = None,
    neighbors: Annotated[int | None, typer.Option(help="Neighbours of levina_bickel.  [20]")] = None,
    gride_scales: Annotated[str | None, typer.Option(help="Scales of gride.  [2,4,8,16,32,64]")] = None,
    isoscore_zeta: Annotated[float | None, typer.Option(help="Shrinkage of isoscore_star.  [0.25]")] = None,
    blocks: Annotated[str | None, typer.Option(help="Path of the block list, where it is not found.")] = None,
    final_norm: Annotated[str | None, typer.Option(help="Path of the final norm, where it is not found.")] = None,
    protocol: Annotated[str | None, typer.Option(help="A paper's settings: `anisoscope ls protocols`.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these flags as keys.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread a model over devices and memory (accelerate).")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Windows in a forward pass; halved when memory runs out.")] = "auto",
    owners: Annotated[bool, typer.Option("--owners", help="List who owns the leading axis of each site.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print every record as a row.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that comes from the hub.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights where there are no safetensors.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="RUN", help="Folder to store units in.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run models over text and measure the geometry of their states at every site.

    Example: anisoscope measure EleutherAI/pythia-160m --corpus enwik8 --owners -o runs/pythia
    """
    with _reporting(debug):
        flags = {
            "revision": revision,
            "corpus": corpus,
            "metrics": _words(metrics),
            "sites": _words(sites),
            "populations": _words(populations),
            "tokens": tokens,
            "seq_len": seq_len,
            "batch_points": batch_points,
            "special_tokens": special_tokens,
            "dtype": dtype,
            "seed": seed,
            "typical_k": typical_k,
            "discard_fraction": discard_fraction,
            "neighbors": neighbors,
            "gride_scales": _numbers(gride_scales),
            "isoscore_zeta": isoscore_zeta,
            "blocks": _words(blocks),
            "final_norm": _words(final_norm),
        }
        names, settings = _merge(models or [], flags, protocol, config)
        run = {
            "device": device,
            "device_map": device_map,
            "batch_size": _batch_size(batch_size),
            "trust_remote_code": trust_remote_code,
            "allow_pickle": allow_pickle,
            "progress": not as_json,
        }
        specs = [Spec(model=name, **settings) for name in names]
        units, failed = _measure_all(specs, run, output)
        _print_units(units, as_json=as_json, owners=owners, full=full)
        if units and output is None and not as_json:
            _say("not stored; -o RUN keeps the units")
        if failed:
            raise typer.Exit(PARTLY if units else failed)


def _merge(
    models: list[str], flags: dict[str, Any], protocol: str | None, config: Path | None
) -> tuple[list[str], dict[str, Any]]:
    """Flags over --config over --protocol over the defaults of Spec."""
    settings: dict[str, Any] = {}
    if protocol is not None:
        from anisoscope.protocols import load_protocol

        paper = load_protocol(protocol)
        settings |= paper.spec
        models = models or list(paper.models)
    if config is not None:
        try:
            given = tomllib.loads(config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SpecError(f"--config {config}: {error}") from error
        named = given.pop("model", given.pop("models", []))
        models = models or ([named] if isinstance(named, str) else list(named))
        settings |= {name.replace("-", "_"): value for name, value in given.items()}
    settings |= {name: value for name, value in flags.items() if value is not None}
    unknown = set(settings) - {item.name for item in fields(Spec)}
    if unknown:
        raise SpecError(f"--config has keys that are no flags of measure: {', '.join(sorted(unknown))}")
    if not models:
        raise SpecError("name at least one MODEL (or a --protocol that lists some)")
    return models, {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise SpecError(f"--batch-size is auto or a positive number; came {text!r}")
    return int(text)


def _measure_all(specs: list[Spec], run: dict[str, Any], output: Path | None) -> tuple[list[Any], int]:
    """Measure one model after another; the units, and the exit code of the first that failed (0: none)."""
    from anisoscope.corpora import load_corpus
    from anisoscope.store import Store
    from anisoscope.walk import measure, resolve

    store = None if output is None else Store(output)
    if store is not None:
        store.check_writable()
    units: list[Any] = []
    failed, corpus = OK, load_corpus(specs[0].corpus)
    for given in specs:
        spec = given
        try:
            spec = resolve(given, corpus=corpus)
            if store is not None and spec.key in store:
                _say(f"{spec.model}: already in {store.folder} as {spec.key}")
                units.append(store.get(spec.key))
                continue
            unit = measure(spec, corpus=corpus, **run)
            if store is not None:
                store.put(unit)
            units.append(unit)
        except Exception as error:
            if store is not None:
                store.put_failure(spec, error)
            if len(specs) == 1:
                raise
            _say(f"{spec.model}: {_sentence(error)}")
            failed = failed or (USAGE if isinstance(error, SpecError) else FAILED)
    return units, failed


def _print_units(units: list[Any], *, as_json: bool, owners: bool, full: bool) -> None:
    from anisoscope import printing

    if as_json:
        rows = [record.as_json() | _cost_of(unit) for unit in units for record in unit.records]
        print(json.dumps(rows, ensure_ascii=False))
        return
    for unit in units:
        printing.print_unit(unit, full=full)
        if owners:
            printing.print_owners(unit)


def _cost_of(unit: Any) -> dict[str, float]:
    """Where the time of the unit went, in flat columns."""
    return {f"seconds_{part}": seconds for part, seconds in unit.provenance.get("cost", {}).items()}


@app.command("ls")
def list_things(
    what: Annotated[str, typer.Argument(metavar="metrics|models|corpora|protocols")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what there is: metrics, models, corpora or protocols."""
    with _reporting(debug):
        from anisoscope import printing

        rows = printing.listing(what)
        if as_json:
            print(json.dumps(rows, ensure_ascii=False))
        else:
            printing.print_listing(what, rows)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which units of a run are done and which failed."""
    with _reporting(debug):
        from anisoscope import printing
        from anisoscope.errors import StoreError
        from anisoscope.store import Store

        if not run.is_dir():
            raise StoreError(f"there is no run folder {run}")
        store = Store(run)
        if as_json:
            print(json.dumps({"done": sorted(store.keys()), "failed": store.failures()}, ensure_ascii=False))
        else:
            printing.print_status(store)


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
    """Show what is installed here; with MODEL, where its sites are, and prove it."""
    with _reporting(debug):
        from anisoscope import printing

        if model is None:
            printing.print_environment()
            return
        from anisoscope.models import load_model

        loaded = load_model(
            model,
            revision=revision,
            dtype=dtype,
            device=device,
            blocks=_words(blocks) or (),
            final_norm=_words(final_norm) or (),
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        printing.print_layout(loaded)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="Folder to store units in.")] = Path(
        "runs/demo"
    ),
    tokens: Annotated[int, typer.Option(help="Tokens to run through each model.")] = 32768,
    debug: Debug = False,
) -> None:
    """Measure two small untrained models on Python's own documentation, offline."""
    with _reporting(debug):
        from anisoscope import printing
        from anisoscope.corpora import load_corpus
        from anisoscope.lab import build_untrained
        from anisoscope.store import Store
        from anisoscope.walk import measure

        store = Store(output)
        store.check_writable()
        _say("These two models are UNTRAINED: random weights. The numbers show the instrument, not language models.")
        corpus = load_corpus("pydoc")
        for kind in ("decoder", "encoder"):
            model = build_untrained(kind, corpus)
            spec = Spec(
                model=model.name, tokens=tokens, metrics=("leading_variance", "mean_cosine", "isoscore", "twonn")
            )
            unit = measure(spec, model=model.module, tokenizer=model.tokenizer, corpus=corpus)
            store.put(unit)
            printing.print_unit(unit)
        print(f"Two untrained models, stored in {output}. Now try a trained one: anisoscope measure MODEL --owners")
