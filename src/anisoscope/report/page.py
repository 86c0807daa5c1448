"""Report -> one HTML file that opens offline: nothing is fetched, and nothing in it but our own scripts can run."""

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from anisoscope.claims import Verdict
from anisoscope.claims.findings import counted
from anisoscope.claims.verdicts import OUTCOMES
from anisoscope.errors import AnisoscopeError
from anisoscope.printing import format_value
from anisoscope.report.gathering import Report
from anisoscope.report.packing import Shelf, pack_json, pack_table
from anisoscope.store import name_trainings

# Rows of a figure that a page can still show; beyond, drawing takes longer than anyone waits.
MOST_ROWS = 20_000
# Rows of a table that a page can still carry; beyond, the page says how to write them to a file.
MOST_TABLE_ROWS = 200_000


def render(report: Report) -> str:
    """The page. Texts from models, corpora and notes are escaped by the template, or packed where no markup is read."""
    shelf, charts = Shelf(), []
    sections = _sections(report, shelf, charts)
    blobs = {"charts": pack_json({"charts": charts, "datasets": shelf.datasets, "themes": _themes()})}
    if report.table.num_rows <= MOST_TABLE_ROWS:
        blobs["table"] = pack_table(report.table)
    for number, one in enumerate(report.comparisons):
        blobs[f"difference-{number}"] = pack_table(one.rows)
    library, script = _library(), _asset("page.js")
    return _template().render(
        report=report,
        several=len(report.runs) > 1,
        policy=content_policy((library, script), live=bool(report.state)),
        style=_trusted(_asset("page.css")),
        library=_trusted(library),
        script=_trusted(script),
        lead=_lead(report),
        tally=_tally(report),
        told=[one for one in report.verdicts if one.holds is not None],
        untold=_grouped((one.claim, one) for one in report.verdicts if one.holds is None),
        contents=_contents(report),
        sections=sections,
        omitted=_omitted(report),
        differences=[_differences(one.summary(), one.first, one.other) for one in report.comparisons],
        cautions=[
            {"title": one.title, "text": one.text, "places": one.places, "run": shown.run.name}
            for shown in report.runs
            for one in shown.cautions
        ],
        methods=_grouped((one.family, one) for one in report.methods),
        blobs=blobs,
        empty_columns=_empty_columns,
    )


def content_policy(scripts: Iterable[str], *, live: bool) -> str:
    """Only these scripts run; nothing is fetched, but for the state of the folder where a server shows it."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )


def _sections(report: Report, shelf: Shelf, charts: list[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Figures by section; those of several runs that show the same stand beside one another."""
    sections: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number, one in enumerate(report.comparisons):
        for figure in one.figures:
            entry = {**_entry(figure, f"difference-{number + 1}-{plain_name(figure.name)}", shelf, charts), "run": ""}
            # Over depth and over training beside one another.
            metric = figure.name.rsplit("-over-", 1)[0]
            sections.setdefault(figure.section, {}).setdefault(f"{number} {metric}", []).append(entry)
    for number, shown in enumerate(report.runs):
        # The page has the verdicts as sentences; their figure is for papers.
        for figure in (one for one in shown.figures if one.section != "verdicts"):
            name = f"figure-{number + 1}-{plain_name(figure.name)}"
            entry = {**_entry(figure, name, shelf, charts), "run": shown.run.name}
            sections.setdefault(figure.section, {}).setdefault(figure.name, []).append(entry)
    return {section: list(groups.values()) for section, groups in sections.items()}


def _omitted(report: Report) -> dict[str, list[str]]:
    """The titles of figures that were not made, by section."""
    found: dict[str, list[str]] = {}
    for shown in report.runs:
        for section, titles in shown.omitted.items():
            run = f"{shown.run.name}: " if len(report.runs) > 1 else ""
            found.setdefault(section, []).extend(run + title for title in titles if section != "verdicts")
    return {section: titles for section, titles in found.items() if titles}


def _entry(figure: Any, name: str, shelf: Shelf, charts: list[dict[str, Any]]) -> dict[str, Any]:
    """One figure for the template; its chart and its data go to the packed parts."""
    entry = {
        "id": name,
        "file": plain_name(figure.name),
        "title": figure.title,
        "caption": figure.caption,
        "rows": figure.data.num_rows,
        "error": getattr(figure, "error", None),
    }
    if entry["error"]:
        return entry
    if figure.data.num_rows > MOST_ROWS:
        return entry | {"error": f"This figure has {figure.data.num_rows:,} rows, too many for a page."}
    try:
        # Checking a chart against the schema of Vega-Lite is for tests; it takes longer than drawing.
        spec = figure.draw().to_dict(validate=False)
    except Exception as error:  # one broken figure must not take the others down
        return entry | {"error": f"This figure could not be drawn: {type(error).__name__}: {error}."}
    charts.append(shelf.take_data(spec))
    return entry | {
        "chart": len(charts) - 1,
        "table": shelf.put_table(figure.data),
        "height": _height(spec),
    }


def _height(spec: Mapping[str, Any]) -> int:
    """About how high a chart will be, so that the page does not jump when it is drawn."""
    height = spec.get("height") or (spec.get("spec") or {}).get("height") or 220
    return int(height if isinstance(height, int | float) else 220) + 120


def plain_name(name: str) -> str:
    """A name that can stand in an id and in a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "figure"


def _themes() -> dict[str, Any]:
    from anisoscope.figures import theme

    return {"light": theme(dark=False), "dark": theme(dark=True)}


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed, as they are shipped with vl-convert."""
    try:
        import vl_convert
    except ImportError as error:
        raise AnisoscopeError("a report needs altair and vl-convert: pip install altair vl-convert-python") from error
    # In a function of its own, so that none of its thousand names is seen from outside.
    return "(()=>{" + vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;") + "})();"


def _asset(name: str) -> str:
    return files("anisoscope.report").joinpath(f"assets/{name}").read_text("utf-8")


def _trusted(text: str) -> Any:
    """Our own text, which the template does not escape."""
    from markupsafe import Markup

    return Markup(text)


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "capitalized": lambda text: text[:1].upper() + text[1:],
        "ticked": _ticked,
        "paragraphs": _paragraphs,
        "told": _told,
    }
    return environment.from_string(_asset("page.html"))


def _told(verdict: Verdict) -> str:
    """A verdict's sentence without claim and outcome, which the page prints first."""
    outcome = "is inconclusive" if verdict.holds is None else OUTCOMES[verdict.holds]
    return verdict.text.replace(f": “{verdict.claim}” {outcome}", "", 1)


def _ticked(text: str) -> Any:
    """Words between backticks as code; everything escaped."""
    from markupsafe import Markup, escape

    parts = str(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if odd % 2 else part for odd, part in enumerate(parts)
    )


def _paragraphs(text: str) -> Any:
    """Blocks between empty lines: indented ones as they are, others as prose."""
    from markupsafe import Markup

    made = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("    "):
            made.append(Markup('<pre class="equation">{}</pre>').format(re.sub(r"(?m)^ {4}", "", block)))
        else:
            made.append(Markup("<p>{}</p>").format(_ticked(" ".join(block.split()))))
    return Markup("\n").join(made)


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for name, one in pairs:
        groups.setdefault(name, []).append(one)
    return groups


def _lead(report: Report) -> str:
    """What was measured, in a sentence or two."""
    table = report.table
    if not table.num_rows:
        return "Nothing has been measured here yet."
    models, corpora, metrics = (
        name_trainings(table)[name].unique().to_pylist() for name in ("model", "corpus", "metric")
    )
    placed = [name for name in ("model", "run", "stage", "revision", "step") if name in table.column_names]
    units = table.group_by(placed).aggregate([]).num_rows
    what = f"{counted(units, 'checkpoint')} of " if units > len(models) else ""
    text = (
        f"{what}{_listed(sorted(models), 'model')} on {_listed(sorted(corpora), 'corpus')}: "
        f"{counted(len(metrics), 'metric')}, {table.num_rows:,} numbers."
    )
    warnings = sum(len(shown.cautions) for shown in report.runs)
    return f"{text} {counted(warnings, 'warning')} below." if warnings else text


def _listed(names: list[str], noun: str) -> str:
    if len(names) <= 4:
        return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{len(names)} {'corpora' if noun == 'corpus' else noun + 's'}"


def _tally(report: Report) -> str:
    counts = {outcome: sum(one.holds is outcome for one in report.verdicts) for outcome in (True, False, None)}
    verb = "holds" if counts[True] == 1 else "hold"
    other = "does not" if counts[False] == 1 else "do not"
    return (
        f"Of {counted(len(report.verdicts), 'claim')} that can be tested on these numbers, {counts[True]} {verb}, "
        f"{counts[False]} {other}, and {counts[None]} {'is' if counts[None] == 1 else 'are'} inconclusive."
    )


def _contents(report: Report) -> list[tuple[str, str]]:
    entries = [("verdicts", "Verdicts"), ("measured", "What was measured")]
    if report.comparisons:
        entries.append(("difference", "Difference"))
    warnings = sum(len(shown.cautions) for shown in report.runs)
    return [
        *entries,
        ("figures", "Figures"),
        ("warnings", f"Warnings ({warnings})"),
        ("method", "Method"),
        ("provenance", "Provenance"),
        ("data", "Data"),
    ]


def _differences(rows: list[dict[str, Any]], first: str, other: str) -> list[dict[str, str]]:
    return [
        {
            "metric": row["metric"],
            "population": row["population"],
            "places": f"{row['places']:,}",
            first: format_value(row["first"]),
            other: format_value(row["other"]),
            "difference": f"{'+' if row['difference'] > 0 else ''}{format_value(row['difference'])}",
            "largest": f"{'+' if row['largest'] > 0 else ''}{format_value(row['largest'])}"
            + ("" if row["spread"] != row["spread"] else f" ± {format_value(row['spread'])}"),
            "at": row["at"] + ("" if row["step"] is None else f", step {row['step']:,}"),
        }
        for row in rows
    ]


def _empty_columns(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    return tuple(name for name in rows[0] if not any(row[name] for row in rows))
