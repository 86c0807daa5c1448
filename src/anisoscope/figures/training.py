"""A metric as training goes on: averaged over the blocks with the loss beside it, and site by site."""

import json
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.figures.drawing import (
    GREY,
    HIGH,
    LOW,
    WIDE,
    Chart,
    band_and_line,
    chart_rows,
    import_altair,
    inline,
    is_number,
    legend,
    name_series,
    named,
    step_axis,
    subtitle,
    titled,
    tooltip,
    with_suspects,
)
from anisoscope.figures.rows import (
    AXES,
    NUMBERS,
    WHO,
    Row,
    blocks_of,
    mean_over_blocks,
    place_along,
    select_rows,
    series_of,
    several_settings,
    spaced_checkpoints,
    table_of,
    way_of,
    with_labels,
)

DYNAMICS = (*WHO, "position", "label", "blocks", *NUMBERS, "loss", "loss_spread")
HEATMAP = (*WHO, "label", "site", "place", "depth", *NUMBERS, "points")


def dynamics_data(
    table: pa.Table,
    *,
    metric: str = "twonn",
    populations: Sequence[str] = ("all", "types"),
    axis: str = "step",
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """A metric averaged over the blocks, stack by stack, as training goes on: a row per checkpoint.

    value     mean over the blocks that have a number; `blocks` says how many
    spread    standard deviation over batches of the batch's mean over those blocks; the same batch is the same tokens
              at every block, so what blocks share stays in. Batches where one of them has no number are left out
    null      mean of the blocks' nulls
    loss      of the same unit, so on the same text; none where it was not measured
    position  log10 of the step or of the tokens; zero stands one decade left of the smallest positive one, the same
              place for all models. With axis="checkpoint" the index in the training, for series without steps
    label     for the tick: 0, 512, 143k, 2.1B; with axis="checkpoint" the revision
    """
    if axis not in AXES:
        raise SpecError(f"axis is one of {', '.join(AXES)}; came {axis!r}")
    losses = {
        row["key"]: {"loss": row["value"], "loss_spread": row["spread"]}
        for row in table.filter((pc.field("site") == "output") & (pc.field("metric") == "loss")).to_pylist()
    }
    found = select_rows(table, metric=metric, populations=populations, corpus=corpus, keys=keys, batches=True)
    rows = blocks_of(found)
    means = []
    for _, group in groupby(rows, key=lambda row: (*series_of(row), row["stack"])):
        blocks = list(group)
        if len({row["key"] for row in blocks}) > 1:
            raise SpecError(several_settings(blocks[0], next(r for r in blocks if r["key"] != blocks[0]["key"])))
        means.append({**blocks[0], **mean_over_blocks(blocks), **losses.get(blocks[0]["key"], {})})
    return table_of(place_along(means, axis), DYNAMICS)


def heatmap_data(
    table: pa.Table,
    *,
    model: str,
    metric: str,
    population: str,
    most: int | None = None,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Every site at every checkpoint of one model: `place` follows a token's way, `checkpoint` the training.

    With `most`, at most so many checkpoints, evenly spaced in the logarithm; the first and the last are among them.
    """
    rows = select_rows(table, model=model, metric=metric, populations=[population], corpus=corpus, keys=keys)
    sites = sorted({(row["stack"], row["site"]) for row in rows}, key=lambda site: way_of(*site))
    places = {site: place for place, site in enumerate(sites)}
    placed = [{**row, "place": places[row["stack"], row["site"]]} for row in rows]
    if most is not None:
        chosen = spaced_checkpoints(placed, most)
        placed = [row for row in placed if row["checkpoint"] in chosen]
    return table_of(with_labels(placed), HEATMAP)


def dynamics(table: pa.Table, *, axis: str = "step", **choice: Any) -> Chart:
    """Draw `dynamics_data`, which takes the same choices: a panel for each population, and the loss below them."""
    return draw_dynamics(dynamics_data(table, axis=axis, **choice), axis=axis)


def heatmap(table: pa.Table, *, model: str, metric: str, population: str = "all", **choice: Any) -> Chart:
    """Draw `heatmap_data`: sites upwards, checkpoints to the right."""
    return draw_heatmap(heatmap_data(table, model=model, metric=metric, population=population, **choice))


def draw_dynamics(data: pa.Table, *, axis: str = "step") -> Chart:
    """Lines with bands over training, panel under panel, with one axis of steps."""
    alt = import_altair()
    rows = name_series(data.to_pylist())
    names = list(dict.fromkeys(row["series"] for row in rows))
    metric, which = rows[0]["metric"], list(dict.fromkeys(row["population"] for row in rows))
    colour = alt.Color("series:N", scale={"domain": names}, legend=legend(names))
    shown = ("series", "population", "label", "blocks", "value", "spread", "null")
    losses = _losses(rows, axis)
    panels = []
    for population in which:
        mine = [row for row in rows if row["population"] == population]
        drawn = chart_rows(mine, (*shown, "position", "low", "high", *with_suspects(rows)))
        x = step_axis(rows, axis, labels=not losses and population == which[-1])
        panel = band_and_line(drawn, x, metric, colour=colour, shown=shown, alike=rows)
        panel = panel.properties(width=WIDE, height=HIGH - 40)
        panels.append(_break(panel, rows, x, axis).properties(title=_panel_title(f"population {population}")))
    if losses:
        panels.append(_loss_panel(losses, rows, step_axis(rows, axis), colour, axis))
    chart = alt.vconcat(*panels, spacing=14).resolve_scale(color="shared")
    null = "grey dashed: null" if any(is_number(row["null"]) for row in rows) else None
    title = f"{metric} over training, mean of the blocks, {named('population', which)}"
    return titled(chart, title, subtitle(data), null)


def _losses(rows: Sequence[Row], axis: str) -> list[Row]:
    """The loss of every checkpoint once, whatever populations it was measured on."""
    known = {(row["series"], row["checkpoint"]): row for row in rows if is_number(row["loss"])}
    return chart_rows(known.values(), ("series", "label", "position", "loss", "loss_spread"), need="loss")


def _loss_panel(losses: Sequence[Row], rows: Sequence[Row], x: Any, colour: Any, axis: str) -> Any:
    alt = import_altair()
    y = alt.Y("loss:Q", title="loss (nats)", scale={"zero": False}, axis={"tickCount": 4})
    lines = alt.Chart(inline(losses)).mark_line(strokeWidth=1.5, point=alt.OverlayMarkDef(size=16, opacity=1))
    lines = lines.encode(x=x, y=y, color=colour, tooltip=tooltip("series", "label", "loss", "loss_spread"))
    return _break(lines, rows, x, axis).properties(width=WIDE, height=LOW, title=_panel_title("loss on the same text"))


def _panel_title(text: str) -> Any:
    return import_altair().TitleParams(text=text, fontSize=11, fontWeight="normal", offset=4)


def _break(panel: Any, rows: Sequence[Row], x: Any, axis: str) -> Any:
    """A dotted line between step 0 and the logarithmic axis, where both are there."""
    alt = import_altair()
    zero = next((row["position"] for row in rows if axis != "checkpoint" and row[axis] == 0), None)
    later = [row["position"] for row in rows if zero is not None and row["position"] > zero]
    if zero is None or not later:
        return alt.layer(panel)
    mark = alt.Chart(inline([{"position": zero + 0.5}])).mark_rule(color=GREY, strokeDash=[1, 3])
    return alt.layer(mark.encode(x=x), panel)


def draw_heatmap(data: pa.Table) -> Chart:
    """A cell for each site at each checkpoint, dark for small numbers and light for large ones."""
    alt = import_altair()
    rows = sorted(data.to_pylist(), key=lambda row: (row["checkpoint"], row["place"]))
    drawn = chart_rows(rows, ("checkpoint", "label", "place", "site", "value", "spread", "null"))
    labels = {row["checkpoint"]: row["label"] for row in rows}
    sites = {row["place"]: f"{row['stack']} {row['site']}" if row["stack"] else row["site"] for row in rows}
    order, places = list(labels), sorted(sites, reverse=True)
    # Ordinal numbers with names: two checkpoints, or stacks, may share a name.
    # As many names as have room, the first and the last among them.
    room = max(1, WIDE // (7 * max(map(len, labels.values())) + 14) - 1)
    ticks = sorted({order[round(k * (len(order) - 1) / room)] for k in range(room + 1)})
    across = {
        "values": ticks,
        "labelExpr": _lookup(labels),
        "labelAngle": 0,
        "labelOverlap": False,
        "title": "training step",
        "grid": False,
    }
    up = {"labelExpr": _lookup(sites), "title": None, "grid": False}
    metric, population = rows[0]["metric"], rows[0]["population"]
    cells = (
        alt.Chart(inline(drawn))
        .mark_rect()
        .encode(
            x=alt.X("checkpoint:O", axis=across, scale={"domain": order}),
            y=alt.Y("place:O", axis=up, scale={"domain": places}),
            color=alt.Color("value:Q", legend={"title": metric, "gradientLength": 200, "tickCount": 5}),
            tooltip=tooltip("label", "site", "value", "spread", "null"),
        )
    )
    chart = cells.properties(width=WIDE, height=max(LOW, min(16 * len(places), 2 * HIGH)))
    title = f"{metric} at every site and step, population {population}"
    return titled(chart, title, subtitle(data))


def _lookup(names: dict[int, str]) -> str:
    """A Vega expression that names a number."""
    found = [names.get(number, "") for number in range(max(names) + 1)]
    return f"{json.dumps(found)}[datum.value]"
