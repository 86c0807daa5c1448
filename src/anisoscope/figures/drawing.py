"""What all figures share: the theme, titles, panels with bands and nulls, axes of steps, and files."""

import functools
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from anisoscope.atomic import write_file
from anisoscope.errors import AnisoscopeError, SpecError
from anisoscope.figures.rows import Row, listed

# Axes, scales and legends are plain dicts: Altair copies a chart whenever it becomes part of another, and its own
# objects for them carry every option that was not set along. `to_dict` checks them all the same.

# An Altair chart of any kind: single, layered, faceted or concatenated. Altair is loaded when something is drawn.
Chart = Any

# Okabe and Ito (2008), told apart by every kind of colour vision; yellow, faint on white, comes last.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
GREY = "#8a8a8a"
SUSPECT = "#D55E00"
SEQUENTIAL = "cividis"
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
# One panel, and each of two beside one another: with its axis a figure fills a paper's column at its own letter size.
WIDE, NARROW, HIGH, LOW = 320, 190, 190, 90
FORMATS = ("html", "png", "svg", "pdf", "json")
_LINE = 56
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>anisoscope</title><script>{library}</script></head>
<body><div id="figure"></div>
<script>vegaEmbed("#figure", {spec}, {{renderer: "svg"}}).catch(console.error)</script>
</body></html>
"""
_DIGITS = 4
_NUMERIC = {"first_value", "other_value"} | {
    "value",
    "spread",
    "null",
    "low",
    "high",
    "loss",
    "loss_spread",
    "share",
    "share_of_energy",
    "cosine",
    "p",
}
_FORMATS = {"step": ",d", "tokens": ",d", "points": ",d", "batches": ",d", "block": "d", "depth": ".3~f"}


def theme(*, dark: bool = False) -> dict[str, Any]:
    """The Vega-Lite config that every figure carries; the dark one may be put in its place at any time."""
    ink, faint, ground = ("#e8e8e8", "#3a3f47", "#15181d") if dark else ("#1a1a1a", "#e4e4e4", "#ffffff")
    palette = [colour if colour != "#000000" or not dark else "#f5f5f5" for colour in PALETTE]
    return {
        "background": ground,
        "font": FONT,
        "padding": 8,
        "axis": {
            "labelColor": ink,
            "titleColor": ink,
            "tickColor": GREY,
            "domainColor": GREY,
            "gridColor": faint,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "labelLimit": 220,
            "titleLimit": 260,
            "labelOverlap": True,
        },
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "labelLimit": 260},
        "legend": {
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
            "orient": "bottom",
            "direction": "horizontal",
            "labelLimit": 340,
            "symbolLimit": 60,
            "symbolStrokeWidth": 2,
            "symbolOpacity": 1,
            "symbolBaseFillColor": ink,
            "symbolBaseStrokeColor": ink,
            "symbolSize": 70,
            "titleLimit": 300,
        },
        "title": {
            "color": ink,
            "subtitleColor": ink,
            "anchor": "start",
            "frame": "group",
            "fontSize": 13,
            "subtitleFontSize": 11,
            "fontWeight": "bold",
            "offset": 10,
            "subtitlePadding": 4,
        },
        "text": {"color": ink, "fontSize": 11},
        "view": {"continuousWidth": WIDE, "continuousHeight": HIGH, "stroke": None},
        "range": {"category": palette, "heatmap": {"scheme": SEQUENTIAL}, "ramp": {"scheme": SEQUENTIAL}},
    }


def themed(chart: Chart, *, dark: bool = False) -> Chart:
    """The chart with the light or the dark theme in place of the one it has."""
    return chart.properties(config=theme(dark=dark))


def save(chart: Chart, path: str | Path, *, scale: float | int = 2) -> Path:
    """Write a chart by its suffix: html (all scripts inside), png, svg, pdf or json; without browser or network."""
    path = Path(path)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise SpecError(f"figures are saved as {', '.join(FORMATS)}; came {path.name}")
    return write_file(path, rendered(chart, suffix, scale=scale))


def rendered(chart: Chart, suffix: str, *, scale: float | int = 2) -> bytes:
    """The bytes of the file that `save` writes."""
    spec = chart.to_dict()
    if suffix == "json":
        return json.dumps(spec, ensure_ascii=False).encode()
    vl_convert = _vl_convert()
    if suffix == "png":
        return vl_convert.vegalite_to_png(spec, scale=scale, ppi=72)
    if suffix == "svg":
        return vl_convert.vegalite_to_svg(spec).encode()
    if suffix == "pdf":
        return vl_convert.vegalite_to_pdf(spec)
    # In a script nothing but `</script` and `<!--` has a meaning for HTML: no text of the data may hold a `<`.
    harmless = json.dumps(spec, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return _PAGE.format(library=vl_convert.javascript_bundle(), spec=harmless).encode()


def _vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise AnisoscopeError("figures as files need vl-convert: pip install vl-convert-python") from error
    return vl_convert


def import_altair() -> Any:
    """Altair, or the sentence that says how to get it."""
    try:
        import altair
    except ImportError as error:
        raise AnisoscopeError("figures need Altair: pip install altair vl-convert-python") from error
    return altair


def chart_rows(data: Any, columns: Sequence[str], *, need: str = "value") -> list[Row]:
    """Rows, or those of a table, for a chart: only what it shows, numbers with four digits, none without `need`."""
    rows: Iterable[Row] = data.to_pylist() if isinstance(data, pa.Table) else data
    return [{name: _short(row[name]) for name in columns} for row in rows if is_number(row[need])]


def with_suspects(rows: Iterable[Row]) -> tuple[str, ...]:
    """The column that says what is wrong with a checkpoint, where something is wrong with one."""
    return ("suspect",) if any(row["suspect"] for row in rows) else ()


def is_number(value: Any) -> bool:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def inline(rows: Sequence[Row]) -> Any:
    """Rows as data that stand in the chart. Nobody may change them: all copies of the chart share them."""
    from altair.utils.schemapi import debug_mode

    # Altair checks every row against its schema when data are made; `to_dict` checks the whole again.
    with debug_mode(False):
        return _shared_data()(values=list(rows))


@functools.cache
def _shared_data() -> Any:
    """Inline data that are not copied with the chart: Altair copies a chart whenever it is put into another."""

    class SharedData(import_altair().InlineData):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    return SharedData


def tooltip(*names: str) -> list[Any]:
    """What is shown when the pointer rests on a mark; numbers as the chart holds them."""
    alt = import_altair()
    numbers = _NUMERIC
    found = []
    for name in names:
        kind = "Q" if name in numbers or name in _FORMATS else "N"
        shown = _FORMATS.get(name, ".4~g") if kind == "Q" else alt.Undefined
        found.append(alt.Tooltip(f"{name}:{kind}", title=name.replace("_", " "), format=shown))
    return found


def titled(chart: Chart, title: str, *lines: str | None, width: int = _LINE) -> Chart:
    """The chart under its title and the lines below it, broken where they would be cut off, with the theme."""
    alt = import_altair()
    below = [part for line in lines if line for part in textwrap.wrap(line, int(width * 1.2))]
    head = alt.TitleParams(text=textwrap.wrap(title, width), subtitle=below or alt.Undefined)
    # In place: `properties` would copy the whole chart, and nobody else has it yet.
    chart.title, chart.config = head, theme()
    return chart


def subtitle(data: pa.Table, *, need: str = "value") -> str:
    """Of what: models, corpora, points, and how many rows have no number."""
    rows = data.to_pylist()
    models, corpora = ({row[name] for row in rows if row.get(name)} for name in ("model", "corpus"))
    parts = [next(iter(models)) if len(models) == 1 else f"{len(models)} models", listed(corpora)]
    if points := {row["points"] for row in rows if row.get("points")}:
        low, high = min(points), max(points)
        parts.append(f"{low:,} points" if low == high else f"{low:,} to {high:,} points")
    suspect = {(row["model"], row["checkpoint"]) for row in rows if row.get("suspect")}
    crossed = [f"crossed out: {len(suspect)} suspect checkpoint{'s' if len(suspect) > 1 else ''}"] if suspect else []
    return " · ".join([*parts, *crossed, *missing(rows, need)])


def missing(rows: Sequence[Row], need: str = "value") -> list[str]:
    """A word on rows that cannot be drawn."""
    absent = sum(not is_number(row[need]) for row in rows)
    return [f"{absent} of {len(rows)} without a number left out"] if absent else []


def name_series(rows: Iterable[Row], *names: str, also: Sequence[str] = ()) -> list[Row]:
    """Rows with the name of their line: `names` (the model), and what else tells lines apart, if they differ in it."""
    rows, names = list(rows), names or ("model",)
    names += tuple(
        name for name in ("stack", "corpus", *also) if name not in names and len({row[name] for row in rows}) > 1
    )
    lines: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), set()).add(row["checkpoint"])
    if "position" not in rows[0] and any(len(found) > 1 for found in lines.values()):
        names += ("step",)
    return [{**row, "series": " ".join(str(row[name]) for name in names if row[name] is not None)} for row in rows]


def legend(names: Iterable[str], title: str | None = None) -> dict[str, Any]:
    """A legend below, in as many columns as its names leave room for."""
    longest = max((len(name) for name in names), default=1)
    return {"title": title, "symbolStrokeWidth": 0, "columns": max(1, min(4, 64 // (longest + 5)))}


def value_scale(rows: Iterable[Row]) -> dict[str, Any]:
    """A straight scale, or a logarithmic one where large numbers would press all others flat."""
    if _goes_by_powers(_values_and_nulls(rows)):
        return {"type": "log", "nice": False, "padding": 6}
    return {"zero": False, "nice": True}


def value_axis(rows: Iterable[Row]) -> dict[str, Any]:
    """Ticks for `value_scale`: about five, or at 1, 2 and 5 (or 1 and 3, or 1) of every decade."""
    numbers = _values_and_nulls(rows)
    if not _goes_by_powers(numbers):
        return {"tickCount": 5}
    low, high = min(numbers), max(numbers)
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    return {"values": [tick for tick in ticks if low / 1.3 <= tick <= high * 1.3], "format": "~g"}


def _values_and_nulls(rows: Iterable[Row]) -> list[float]:
    return [row[name] for row in rows for name in ("value", "null") if is_number(row.get(name))]


def _goes_by_powers(numbers: Sequence[float]) -> bool:
    return bool(numbers) and min(numbers) > 0 and max(numbers) >= 1.5 and max(numbers) / min(numbers) >= 12


def band_and_line(
    rows: Sequence[Row],
    x: Any,
    y_title: str,
    *,
    colour: Any,
    shown: Sequence[str],
    shape: Any = None,
    names: Sequence[str] = (),
    alike: Sequence[Row] = (),
    zero: bool = False,
) -> Any:
    """A line for each series, its spread as a band, its null as a grey dashed line. Needs column `series`.

    `alike` are the rows of all panels, which then go by powers together or not at all. With `names`, lines grow thinner
    in that order: those that coincide are still seen, each inside the one before. `zero` keeps a line there in sight.
    """
    alt = import_altair()
    base = alt.Chart(inline(rows))
    scale = {"zero": True, "nice": True} if zero else value_scale(alike or rows)
    axis = {"tickCount": 5} if zero else value_axis(alike or rows)
    y = alt.Y("value:Q", title=y_title, scale=scale, axis=axis)
    layers = []
    if any(is_number(row["low"]) for row in rows):
        band = base.transform_filter("isValid(datum.low)").mark_area(opacity=0.16, clip=True)
        layers.append(
            band.encode(
                x=x, y=alt.Y("low:Q", scale=scale), y2=alt.Y2("high:Q"), color=colour, detail=alt.Detail("series:N")
            )
        )
    if any(is_number(row["null"]) for row in rows):
        null = base.transform_filter("isValid(datum.null)").mark_line(color=GREY, strokeDash=[5, 3], strokeWidth=1.2)
        grey = {"y": alt.Y("null:Q", scale=scale), "tooltip": tooltip("series", "null")}
        layers.append(null.encode(x=x, detail=alt.Detail("series:N"), **grey))
    if zero:
        layers.append(base.mark_rule(color=GREY).encode(y=alt.YDatum(0, title=y_title, scale=scale, axis=axis)))
    line = {"x": x, "y": y, "color": colour, "detail": alt.Detail("series:N"), "order": x_order(x)}
    marks = {"x": x, "y": y, "color": colour, "tooltip": tooltip(*shown)}
    if shape is not None:
        marks["shape"] = shape
    if names:
        widths, sizes = ([top * 0.5**k + bottom for k in range(len(names))] for top, bottom in ((4.5, 1), (110, 18)))
        line["strokeWidth"] = alt.StrokeWidth("series:N", scale={"domain": names, "range": widths}, legend=None)
        marks["size"] = alt.Size("series:N", scale={"domain": names, "range": sizes}, legend=None)
    layers.append(base.mark_line(strokeWidth=1.8).encode(**line))
    layers.append(base.mark_point(filled=True, size=34, opacity=1).encode(**marks))
    if any(row.get("suspect") for row in rows):
        wrong = base.transform_filter("isValid(datum.suspect)")
        cross = wrong.mark_point(shape="cross", angle=45, size=130, filled=False, color=SUSPECT, strokeWidth=1.6)
        layers.append(cross.encode(x=x, y=y, tooltip=tooltip("series", "value", "suspect")))
    return alt.layer(*layers)


def by_population(layers: Any, names: Sequence[str]) -> Any:
    """One wide panel, or one for each population beside one another."""
    alt = import_altair()
    if len(names) < 2:
        return layers.properties(width=WIDE, height=HIGH)
    header = alt.Header(title=None, labelExpr="'population ' + datum.value")
    panel = alt.Facet("population:N", sort=list(names), header=header)
    width = NARROW if len(names) == 2 else (2 * NARROW) // 3
    return layers.properties(width=width, height=HIGH).facet(facet=panel, columns=3)


def named(word: str, names: Sequence[Any]) -> str:
    """`population all`, `populations all and typical`, `populations all, types and matched`."""
    if len(names) == 1:
        return f"{word} {names[0]}"
    return f"{word}s {', '.join(map(str, names[:-1]))} and {names[-1]}"


def x_order(x: Any) -> Any:
    """Lines go from left to right, in whatever order rows come."""
    return import_altair().Order(x.to_dict()["field"], type="quantitative")


def error_bars(rows: Sequence[Row], x: Any, colour: Any, scale: Any) -> Any:
    """Intervals as thin vertical lines."""
    alt = import_altair()
    bars = alt.Chart(inline([row for row in rows if is_number(row["low"])])).mark_rule(strokeWidth=1.4, opacity=0.7)
    return bars.encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q", color=colour)


def depth_axis(field: str = "depth") -> Any:
    """Depth from 0 to 1."""
    alt = import_altair()
    axis = {"values": [0, 0.25, 0.5, 0.75, 1], "format": ".2~f", "title": "relative depth"}
    return alt.X(f"{field}:Q", axis=axis, scale={"domain": [0, 1.02], "nice": False})


def step_axis(rows: Sequence[Row], name: str, *, labels: bool = True, fine: bool = True) -> Any:
    """The axis of `position`: decades, finer where they are few unless the panel is narrow, and a place for zero."""
    alt = import_altair()
    places = [row["position"] for row in rows]
    low, high = min(places), max(places)
    pad = max(0.04 * (high - low), 0.05)
    scale = {"domain": [low - pad, high + pad], "nice": False, "zero": False}
    if name == "checkpoint":
        axis = {"title": "checkpoint, in the order of training", "format": "d", "tickMinStep": 1, "labels": labels}
        return alt.X("position:Q", scale=scale, axis=axis)
    zero = next((row["position"] for row in rows if row[name] == 0), None)
    first = low if zero is None else min((place for place in places if place > zero), default=low)
    ticks = _decades(first, high, enough=3 if fine else 2) + ([] if zero is None else [zero])
    power = "replace(format(pow(10, datum.value), '.3~s'), 'G', 'B')"
    shown = power if zero is None else f"datum.value < {zero + 1e-6:.7f} ? '0' : {power}"
    title = {"step": "training step (log)", "tokens": "training tokens (log)"}[name] if labels else None
    axis = {"title": title, "values": sorted(ticks), "labelExpr": shown, "labels": labels, "grid": True}
    return alt.X("position:Q", scale=scale, axis=axis)


def _decades(low: float, high: float, *, enough: int) -> list[float]:
    whole = [float(k) for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    if len(whole) > 7:
        return whole[:: math.ceil(len(whole) / 7)]
    if len(whole) >= enough:
        return whole
    finer = [math.floor(low) + k + math.log10(m) for k in range(math.ceil(high - low) + 2) for m in (1, 2, 5)]
    return [place for place in finer if low - 1e-9 <= place <= high + 1e-9] or [low]
