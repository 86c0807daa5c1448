"""`anisoscope measure`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anisoscope.commands.shared import (
    FAILED,
    OK,
    PARTLY,
    USAGE,
    Config,
    Debug,
    Json,
    Output,
    Protocol,
    app,
    merge,
    reporting,
    say,
    sentence,
)
from anisoscope.errors import SpecError
from anisoscope.flags import pick, run_flags, spec_flags, takes
from anisoscope.records import Spec


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
    with reporting(debug):
        given = pick(flags, spec_flags) | ({} if revision is None else {"revision": revision})
        names, settings = merge(models or [], given, protocol)
        run = pick(flags, run_flags) | {"progress": not as_json}
        specs = [Spec(model=name, **settings) for name in names]
        if counterfactuals:
            _change_norms(specs, run, swap_norm or [], output, as_json)
            return
        units, failed = _measure_all(specs, run, output)
        _print_units(units, as_json=as_json, owners=owners, full=full)
        if units and output is None and not as_json:
            say("not stored; -o RUN keeps the units")
        if failed:
            raise typer.Exit(PARTLY if units else failed)


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
                say(f"{spec.model}: already in {store.folder} as {spec.key}")
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
            say(f"{spec.model}: {sentence(error)}")
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
        from anisoscope.columns import settings_row

        beside = {unit.key: settings_row(unit.spec.as_dict()) | _cost_of(unit) for unit in units}
        rows = [record.as_json() | beside[unit.key] for unit in units for record in unit.records]
        print(json.dumps(rows, ensure_ascii=False))
        return
    for unit in units:
        printing.print_unit(unit, full=full)
        if owners:
            printing.print_owners(unit)


def _cost_of(unit: Any) -> dict[str, float]:
    """Where the time of the unit went, in flat columns."""
    return {f"seconds_{part}": seconds for part, seconds in unit.provenance.get("cost", {}).items()}
