"""The command line: parse, call, print. Results go to stdout, progress and notes to stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope import __version__
from anisoscope.errors import AnisoscopeError, SpecError
from anisoscope.flags import pick, read_config, run_flags, spec_flags, takes, words
from anisoscope.records import Checkpoint, Spec

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


@app.command()
@takes(spec_flags, run_flags)
def measure(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...", help="Hub name, local folder or .gguf file; may be left out with --protocol."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model; subfolder of a local one.")
    ] = None,
    protocol: Protocol = None,
    config: Config = None,
    owners: Annotated[bool, typer.Option("--owners", help="List who owns the leading axis of each site.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print every record as a row.")] = False,
    counterfactuals: Annotated[
        bool, typer.Option("--counterfactuals", help="Isotropy and loss with another gain and bias in the final norm.")
    ] = False,
    swap_norm: Annotated[
        list[str] | None,
        typer.Option(help="With --counterfactuals: also the final norm of MODEL@REVISION; repeatable."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Run models over text and measure the geometry of their states at every site.

    Example: anisoscope measure EleutherAI/pythia-160m --corpus enwik8 --owners -o runs/pythia
    """
    with _reporting(debug):
        given = pick(flags, spec_flags) | ({} if revision is None else {"revision": revision})
        names, settings = _merge(models or [], given, protocol)
        run = pick(flags, run_flags) | {"progress": not as_json}
        specs = [Spec(model=name, **settings) for name in names]
        if counterfactuals:
            _change_norms(specs, run, swap_norm or [], output, as_json)
            return
        units, failed = _measure_all(specs, run, output)
        _print_units(units, as_json=as_json, owners=owners, full=full)
        if units and output is None and not as_json:
            _say("not stored; -o RUN keeps the units")
        if failed:
            raise typer.Exit(PARTLY if units else failed)


def _merge(
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


def _change_norms(specs: list[Spec], run: dict[str, Any], swaps: list[str], output: Path | None, as_json: bool) -> None:
    """Each model with its own final norm and with others."""
    from anisoscope.counterfactuals import measure_counterfactuals, norm_of
    from anisoscope.models import load_model
    from anisoscope.printing import print_counterfactuals
    from anisoscope.store import Store

    loading = {name: value for name, value in run.items() if name not in ("batch_size", "progress")}
    others = {}
    for name in swaps:
        model, _, revision = name.partition("@")
        others[name] = norm_of(load_model(model, revision=revision or None, dtype=specs[0].dtype, **loading))
    units = [measure_counterfactuals(spec, swaps=others, **run) for spec in specs]
    for unit in units:
        if output is not None:
            Store(output).put(unit)
        if not as_json:
            print_counterfactuals(unit)
    if as_json:
        print(json.dumps([record.as_json() for unit in units for record in unit.records], ensure_ascii=False))


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
    log_spaced: Annotated[int | None, typer.Option(help="Take so many, evenly spaced in log step.")] = None,
    every: Annotated[int | None, typer.Option(help="Take every Nth; the last is always among them.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Training tokens in a step, where you know it.")] = None,
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
    with _reporting(debug):
        from anisoscope.checkpoints import choose, find_checkpoints, inspect_all, read_list
        from anisoscope.printing import print_plan

        names = list(models or [])
        if checkpoints is not None:
            names.append(str(Path(checkpoints).parent))
            revisions = Path(checkpoints).name
        names, settings = _merge(names, pick(flags, spec_flags), protocol, required=listed is None, dynamics=True)
        texts = words(corpora) or (settings.pop("corpus", Spec.corpus),)
        if listed is not None:
            chosen = series = read_list(listed, names[0] if names else None, tokens_per_step=tokens_per_step)
        else:
            runs = [find_checkpoints(name, revisions=revisions, tokens_per_step=tokens_per_step) for name in names]
            followed = [_followed(run, protocol if revisions is None else None) for run in runs]
            chosen = [item for run in followed for item in choose(run, log_spaced=log_spaced, every=every)]
            series = [item for run in runs for item in run]
        if dry_run:
            verified = inspect_all(chosen, series=series, progress=not as_json)
            print_plan(verified, corpora=texts, as_json=as_json)
            return
        if output is None:
            raise SpecError("a sweep needs a folder to store units in: -o RUN")
        from anisoscope.sweep import plan_specs, run_sweep

        swept = run_sweep(
            plan_specs(chosen, texts, settings),
            output,
            engine,
            checkpoints=chosen,
            series=series,
            workers=workers,
            gpus_per_job=gpus_per_job,
            cpus_per_job=cpus_per_job,
            max_retries=max_retries,
            verify=not no_verify,
            keep_cache=keep_cache,
            downloads=downloads,
            engine_options=_pairs(slurm or []),
            progress=not as_json,
            **pick(flags, run_flags),
        )
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


def _pairs(items: list[str]) -> dict[str, Any]:
    for item in items:
        if "=" not in item:
            raise SpecError(f"--slurm takes NAME=VALUE; came {item!r}")
    pairs = (item.split("=", 1) for item in items)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def _tell_swept(swept: Any, output: Path, as_json: bool) -> None:
    for finding in swept.findings:
        _say(f"suspicious, measured and marked: {finding}")
    if as_json:
        print(json.dumps(asdict(swept)))
        return
    counts = f"{len(swept.measured)} measured, {len(swept.stored_before)} stored before, {len(swept.failed)} failed"
    print(f"{counts}; units are in {output}")
    if swept.failed:
        print(f"`anisoscope status {output}` says why; the same command tries them again")


@app.command("ls")
def list_things(
    what: Annotated[str, typer.Argument(metavar="metrics|models|corpora|protocols|checkpoints")],
    model: Annotated[str | None, typer.Argument(help="Whose checkpoints: repository, folder or family.")] = None,
    revisions: Annotated[str | None, typer.Option(help="Glob on the names of checkpoints.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what there is: metrics, models, corpora, protocols, or the checkpoints of a MODEL."""
    with _reporting(debug):
        from anisoscope import printing

        if (what == "checkpoints") != (model is not None):
            raise SpecError("MODEL goes with `ls checkpoints`, and only with it")
        rows = printing.listing(what, model, revisions)
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
    """Say which units of a run are done, running, failed and waiting, and how long the rest will take."""
    with _reporting(debug):
        from anisoscope.printing import print_status
        from anisoscope.status import survey

        store = _open(run)
        if as_json:
            seen = survey(store)
            print(json.dumps({"units": seen.rows, "seconds_left": seen.seconds_left}, ensure_ascii=False))
        else:
            print_status(survey(store))


def _open(run: Path) -> Any:
    from anisoscope.errors import StoreError
    from anisoscope.store import Store

    if not run.is_dir():
        raise StoreError(f"there is no run folder {run}")
    return Store(run)


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
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Test the papers' findings on what was measured: effect, interval, p, and whether a claim holds.

    Example: anisoscope claims runs/pythia --fail-if 'leading_variance[block.*,typical] > 0.9'
    """
    with _reporting(debug):
        import pyarrow as pa

        from anisoscope.claims import judge
        from anisoscope.claims.correlations import correlate_table, read_column
        from anisoscope.conditions import parse
        from anisoscope.printing import print_correlations, print_verdicts

        gates = [parse(text) for text in fail_if or []]
        table = pa.concat_tables([_open(run).table() for run in runs])
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
            _say(f"{gate}: {row['model']} has {row['value']:.4g} at {row['site']}, step {row['step']}")
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
            blocks=words(blocks) or (),
            final_norm=words(final_norm) or (),
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
