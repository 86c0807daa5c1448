"""What one place holds: the stages of a final norm, owners of a leading axis, rows of an embedding matrix."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from anisoscope.errors import SpecError
from anisoscope.figures.drawing import (
    GREY,
    HIGH,
    LOW,
    NARROW,
    SEQUENTIAL,
    Chart,
    chart_rows,
    import_altair,
    inline,
    is_number,
    legend,
    name_series,
    named,
    subtitle,
    titled,
    tooltip,
    value_axis,
    value_scale,
)
from anisoscope.figures.rows import NUMBERS, WHO, Row, at_last_checkpoint, listed, select_rows, table_of, way_of
from anisoscope.records import FINAL_NORM_SITES, Unit
from anisoscope.stages import STAGES

STAGE_METRICS = ("leading_variance", "mean_cosine", "isoscore")
# Letters of a title over two panels, and the natural logarithm of ten.
_TWO_PANELS, _LN_10 = 66, math.log(10)
# Spaces and ends of lines as byte-level and other tokenizers write them, and as they are.
_SEEN_SPACES = str.maketrans({" ": "␣", "Ġ": "␣", "▁": "␣", "\n": "⏎", "Ċ": "⏎"})
_THROUGH = {"pre": "last block", "normed": "normed", "gained": "gained", "final": "final norm"}
_STAGE = (*WHO, "through", "place", "site", *NUMBERS, "points")
_OWNERS = pa.schema(
    [
        ("model", pa.string()),
        ("site", pa.string()),
        ("stack", pa.string()),
        ("place", pa.int64()),
        ("owner", pa.string()),
        ("rank", pa.int64()),
        ("label", pa.string()),
        ("share", pa.float64()),
        ("position", pa.int64()),
        ("document", pa.string()),
    ]
)
_EMBEDDINGS = pa.schema(
    [
        ("model", pa.string()),
        ("site", pa.string()),
        ("variant", pa.string()),
        ("row", pa.int64()),
        ("x", pa.float64()),
        ("y", pa.float64()),
        ("log_frequency", pa.float64()),
    ]
)


def stages_data(
    table: pa.Table,
    *,
    metrics: Sequence[str] = STAGE_METRICS,
    populations: Sequence[str] = ("all",),
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Metrics through the final norm at each model's last checkpoint: last block, normed, gained, final norm.

    Metrics that were not measured inside the norm are left out; refused where none was.
    """
    there = set(table["metric"].unique().to_pylist())
    rows: list[Row] = []
    for metric in metrics:
        if metric not in there:
            continue
        found = select_rows(table, metric=metric, populations=populations, corpus=corpus, keys=keys)
        staged = [{**row, **stage} for row in at_last_checkpoint(found) if (stage := _stage_of(row))]
        rows += staged if any(row["through"] == "normed" for row in staged) else []
    if not rows:
        raise SpecError(f"wanted {listed(metrics)} at {FINAL_NORM_SITES[0]}; measure with the family final_norm")
    return table_of(sorted(rows, key=lambda row: row["place"]), _STAGE)


def _stage_of(row: Row) -> Row | None:
    if row["depth"] == 1:
        place = 0
    elif row["site"] in FINAL_NORM_SITES:
        place = 1 + FINAL_NORM_SITES.index(row["site"])
    else:
        return None
    return {"place": place, "through": _THROUGH[STAGES[place]]}


def owners_data(unit: Unit) -> pa.Table:
    """Who owns the leading axis at each site of a unit that was measured with owners.

    share  of λ₁: for a token that of its batch (so the ten of a site need not sum to less than 1), for a coordinate
           that of all batches, for `first positions` what the first tokens of all windows own together
    """
    entries = sorted(unit.owners(), key=lambda entry: way_of(entry["stack"], entry["site"]))
    if not entries:
        raise SpecError("wanted owners of the leading axis; measure with --owners")
    rows: list[Row] = []
    for place, entry in enumerate(entries):
        where = {"model": name_of(unit), "site": entry["site"], "stack": entry["stack"], "place": place}
        first = {"owner": "first positions", "rank": 0, "label": "first positions of windows"}
        rows.append({**where, **first, "share": entry["first_position_share"]})
        for rank, token in enumerate(entry["tokens"]):
            label = token["text"].translate(_SEEN_SPACES) or "(empty)"
            beside = {"share": token["share"], "position": token["position"], "document": token["document"]}
            rows.append({**where, "owner": "token", "rank": rank, "label": label, **beside})
        for rank, one in enumerate(entry["coordinates"]):
            label = f"coordinate {one['coordinate']}"
            rows.append({**where, "owner": "coordinate", "rank": rank, "label": label, "share": one["share"]})
    return pa.Table.from_pylist(rows, schema=_OWNERS)


def embeddings_data(unit: Unit, *, site: str = "embed.weight", most: int = 1000, seed: int = 0) -> pa.Table:
    """Rows of an embedding matrix along its two leading singular vectors, raw and centred; at most `most` of them.

    log_frequency  natural logarithm of the share that the row's token has of the text (of a token that is not in it:
                   of half an occurrence), where the unit has it attached; NaN of a row that no token has
    """
    prefix = f"weights/{site}"
    if f"{prefix}.rows" not in unit.attachments:
        raise SpecError(f"wanted rows of {site}; measure with --sites embed.weight,unembed.weight")
    numbers = unit.attachments[f"{prefix}.rows"]
    known = unit.attachments.get(f"{prefix}.log_frequency")
    chosen = np.sort(np.random.default_rng(seed).permutation(len(numbers))[:most])
    rows: list[Row] = []
    for variant in ("centred=no", "centred=yes"):
        places = unit.attachments[f"{prefix}.{variant}.coordinates"]
        for index in chosen.tolist():
            along = [*places[index].tolist(), 0.0][:2]
            frequency = math.nan if known is None else float(known[index])
            place = {"row": int(numbers[index]), "x": along[0], "y": along[1], "log_frequency": frequency}
            rows.append({"model": name_of(unit), "site": site, "variant": variant, **place})
    return pa.Table.from_pylist(rows, schema=_EMBEDDINGS)


def name_of(unit: Unit) -> str:
    """The model or the training of a unit, and which checkpoint of it."""
    spec = unit.spec
    name = spec.run or spec.model
    if spec.run and spec.step is not None:
        return f"{name} step {spec.step}"
    return name if spec.revision is None else f"{name}@{spec.revision}"


def stages(table: pa.Table, **choice: Any) -> Chart:
    """Draw `stages_data`: a panel for each metric, a line for each model."""
    return draw_stages(stages_data(table, **choice))


def owners(unit: Unit) -> Chart:
    """Draw `owners_data`: tokens and coordinates, the largest by name."""
    return draw_owners(owners_data(unit))


def embeddings(unit: Unit, *, site: str = "embed.weight", **choice: Any) -> Chart:
    """Draw `embeddings_data`: raw and centred beside one another."""
    return draw_embeddings(embeddings_data(unit, site=site, **choice))


def draw_stages(data: pa.Table) -> Chart:
    """Panels of metrics, each with its own scale."""
    alt = import_altair()
    rows = name_series(data.to_pylist(), also=("population",))
    names = list(dict.fromkeys(row["series"] for row in rows))
    colour = alt.Color("series:N", scale={"domain": names}, legend=legend(names))
    shown = ("series", "population", "through", "site", "value", "spread", "null", "points")
    order = list(_THROUGH.values())
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    across = {"title": None, "labelAngle": -40, "labelOverlap": False}
    panels = []
    for metric in metrics:
        drawn = chart_rows([row for row in rows if row["metric"] == metric], (*shown, "low", "high"))
        base = alt.Chart(inline(drawn))
        x = alt.X("through:O", sort=order, scale={"domain": order}, axis=across)
        scale = value_scale(drawn)
        y = alt.Y("value:Q", title=metric, scale=scale, axis=value_axis(drawn))
        bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
        null = base.transform_filter("isValid(datum.null)").mark_tick(color=GREY, thickness=1.5, size=18)
        layers = [
            null.encode(x=x, y=alt.Y("null:Q", scale=scale), tooltip=tooltip("series", "through", "null")),
            bars.encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q", color=colour),
            base.mark_line(strokeWidth=1.8).encode(x=x, y=y, color=colour, detail="series:N"),
            base.mark_point(filled=True, size=40, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip(*shown)),
        ]
        panels.append(alt.layer(*layers).properties(width=NARROW - 80, height=HIGH - 30))
    chart = alt.concat(*panels, columns=3, spacing=16).resolve_scale(color="shared")
    which = list(dict.fromkeys(row["population"] for row in rows))
    title = f"{', '.join(metrics)} through the final norm, {named('population', which)}"
    return titled(chart, title, subtitle(data), "grey ticks: null · bars: spread over batches")


def draw_owners(data: pa.Table) -> Chart:
    """Shares of tokens and of coordinates, site by site."""
    alt = import_altair()
    rows = data.to_pylist()
    names = {row["place"]: f"{row['stack']} {row['site']}" if row["stack"] else row["site"] for row in rows}
    order = [names[place] for place in sorted(names, reverse=True)]
    columns = ("owner", "rank", "label", "share", "position", "document")
    panels = []
    for number, owner in enumerate(("token", "coordinate")):
        mine = [row for row in rows if row["owner"] == owner]
        drawn = [
            {**short, "place": names[row["place"]]}
            for row, short in zip(mine, chart_rows(mine, columns, need="share"), strict=True)
        ]
        axis = {"title": None} if number == 0 else {"title": None, "labels": False, "ticks": False}
        y = alt.Y("place:N", sort=order, axis=axis)
        title = "share of the axis in its batch" if owner == "token" else "share of the axis"
        top = max((row["share"] for row in drawn), default=1.0)
        x = alt.X("share:Q", title=title, scale={"domain": [0, min(1.6, 1.6 * top)], "nice": False})
        base = alt.Chart(inline(drawn))
        dots = base.mark_point(filled=True, size=40, opacity=0.55, color="#0072B2" if number == 0 else "#D55E00")
        dots = dots.encode(x=x, y=y, tooltip=tooltip(*columns))
        label = base.transform_filter("datum.rank == 0").transform_calculate(short="truncate(datum.label, 16)")
        text = label.mark_text(align="left", dx=7, fontSize=10).encode(x=x, y=y, text="short:N")
        layers = [dots, text]
        if owner == "token":
            firsts = [row for row in rows if row["owner"] == "first positions" and is_number(row["share"])]
            marks = [
                {"share": round(row["share"], 4), "place": names[row["place"]], "label": row["label"]} for row in firsts
            ]
            tick = alt.Chart(inline(marks)).mark_tick(color=GREY, thickness=2.5, size=14)
            layers.insert(0, tick.encode(x=x, y=y, tooltip=tooltip("share")))
        heading = "tokens" if owner == "token" else "coordinates"
        panel = alt.layer(*layers).properties(width=NARROW, height=max(LOW, 22 * len(order)))
        panels.append(panel.properties(title=alt.TitleParams(text=heading, fontSize=11, fontWeight="normal", offset=4)))
    chart = alt.hconcat(*panels, spacing=12)
    said = "ten largest a site, the first by name · grey bar: first positions of all windows together"
    title = "Owners of the leading axis at each site, population all"
    return titled(chart, title, rows[0]["model"], said, width=_TWO_PANELS)


def draw_embeddings(data: pa.Table) -> Chart:
    """Two scatter plots, with colour for frequency where it is known; frequent tokens lie above rare ones."""
    alt = import_altair()
    rows = data.to_pylist()
    known = [row["log_frequency"] for row in rows if is_number(row["log_frequency"])]
    rows.sort(key=lambda row: row["log_frequency"] if is_number(row["log_frequency"]) else -math.inf)
    panels = []
    for variant, title in (("centred=no", "raw"), ("centred=yes", "centred")):
        mine = [row for row in rows if row["variant"] == variant]
        drawn = chart_rows(mine, ("row", "x", "y", *(("log_frequency",) if known else ())), need="x")
        axes = {
            name: kind(
                f"{name}:Q",
                title=f"singular vector {number}",
                scale=_around_zero([row[name] for row in drawn]),
                axis={"tickCount": 5},
            )
            for number, (name, kind) in enumerate((("x", alt.X), ("y", alt.Y)), 1)
        }
        points = alt.Chart(inline(drawn)).mark_point(filled=True, size=11, opacity=0.75, color="#0072B2")
        shown = [alt.Tooltip("row:Q", title="token id"), alt.Tooltip("x:Q"), alt.Tooltip("y:Q")]
        if known:
            others = alt.Chart(inline([row for row in drawn if row["log_frequency"] is None]))
            hollow = others.mark_point(filled=False, size=11, strokeWidth=1, color=GREY).encode(**axes, tooltip=shown)
            points = points.transform_filter("isValid(datum.log_frequency)").encode(color=_by_frequency(known))
            tips = [*shown, alt.Tooltip("log_frequency:Q", title="log frequency")]
            points = alt.layer(hollow, points.encode(**axes, tooltip=tips))
        else:
            points = points.encode(**axes, tooltip=shown)
        origin = alt.Chart(inline([{"x": 0, "y": 0}])).mark_point(shape="cross", size=90, color="#D55E00", filled=True)
        heading = alt.TitleParams(text=title, fontSize=11, fontWeight="normal", offset=4)
        layers = alt.layer(points, origin.encode(**axes))
        panels.append(layers.properties(width=NARROW, height=NARROW, title=heading))
    chart = alt.hconcat(*panels, spacing=16).resolve_scale(color="shared")
    count, without = len({row["row"] for row in rows}), len(rows) - len(known)
    said = f"{rows[0]['model']} · {count:,} rows drawn at random · cross: origin"
    hollow = f"hollow: {without // 2} rows that no token has" if known and without else None
    return titled(chart, f"{rows[0]['site']} along its two leading singular vectors", said, hollow, width=_TWO_PANELS)


def _around_zero(numbers: Sequence[float]) -> dict[str, Any]:
    """A scale that holds these numbers and zero with a little room, so that no tick stands at its very end."""
    low, high = min([0.0, *numbers]), max([0.0, *numbers])
    room = 0.06 * (high - low or 1.0)
    return {"domain": [low - room, high + room], "nice": False}


def _by_frequency(known: Sequence[float]) -> Any:
    """Colour for a log frequency, the legend in shares of the text."""
    alt = import_altair()
    low, high = min(known), max(known)
    powers = range(math.ceil(low / _LN_10), math.floor(high / _LN_10) + 1)
    bar = {
        "title": "token's share of the text, log scale (darkest: the rarest)",
        "values": [power * _LN_10 for power in powers],
        "labelExpr": f"'1e' + round(datum.value / {_LN_10:.6f})",
        "gradientLength": 2 * NARROW,
        "titleLimit": 2 * NARROW,
    }
    # Not up to the lightest yellow, which a white page swallows.
    colours = {"scheme": alt.SchemeParams(SEQUENTIAL, extent=[0.0, 0.93]), "domain": [low, high], "nice": False}
    return alt.Color("log_frequency:Q", scale=colours, legend=bar)
