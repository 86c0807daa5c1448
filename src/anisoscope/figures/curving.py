"""Curvature against the exponent of sampling, and the life of concepts in training."""

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.figures.drawing import (
    GREY,
    HIGH,
    PALETTE,
    WIDE,
    Chart,
    chart_rows,
    error_bars,
    import_altair,
    inline,
    is_number,
    legend,
    step_axis,
    subtitle,
    titled,
    tooltip,
    x_order,
)
from anisoscope.figures.rows import (
    WHO,
    at_last_checkpoint,
    count_label,
    listed,
    log_position,
    number_checkpoints,
    table_of,
)
from anisoscope.figures.tangents import narrowed
from anisoscope.store import name_trainings
from anisoscope.tracks import ConceptHistory

_CURVATURE = (*WHO, "variant", "site", "depth", "exponent", "value", "low", "high", "points")
CONCEPTS = {
    "step": pa.int64(),
    "track": pa.int64(),
    "cosine": pa.float64(),
    "share_of_energy": pa.float64(),
    "top_tokens": pa.string(),
}


def curvature_data(
    table: pa.Table,
    *,
    population: str | None = None,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Curvature visibility against the exponent with which tokens were sampled, at last checkpoints.

    The exponent is read from the variant, as in `exponent=0.25`; rows that do not state one are left out.
    """
    table = name_trainings(table).filter(pc.field("metric") == "curvature_visibility")
    rows = narrowed(table, population=population, corpus=corpus, keys=keys)
    stated = [{**row, "exponent": exponent} for row in rows if (exponent := _exponent(row["variant"])) is not None]
    if not stated:
        raise SpecError("wanted curvature_visibility with exponent= in its variant; there is none")
    number_checkpoints(stated)
    last = sorted(at_last_checkpoint(stated), key=lambda row: (row["exponent"], row["model"], row["depth"] or 0.0))
    return table_of(last, _CURVATURE, own_intervals=True)


def concepts_data(table: pa.Table, *, most: int = 40) -> pa.Table:
    """Concepts followed through training, with their places on the axis of steps; the `most` that live longest.

    step             of the checkpoint
    track            which concept; one that died and came back is another
    cosine           of its direction with that at the checkpoint before; null where it was born
    share_of_energy  of the gradients that lies along its direction
    top_tokens       the tokens that have most of it, as text
    """
    if missing := [name for name in CONCEPTS if name not in table.column_names]:
        raise SpecError(f"wanted columns {listed(CONCEPTS)}; there is no {listed(missing)}")
    rows = table.select(list(CONCEPTS)).to_pylist()
    lives: dict[int, list[float]] = {}
    for row in rows:
        share = row["share_of_energy"]
        lives.setdefault(row["track"], []).append(share if is_number(share) else 0.0)
    # Of those that live as long, the larger first.
    longest = sorted(lives, key=lambda track: (-len(lives[track]), -max(lives[track]), track))[:most]
    places = {track: place for place, track in enumerate(longest)}
    position = log_position(row["step"] for row in rows)
    shaped = [
        {
            **row,
            "position": position(row["step"]),
            "label": count_label(row["step"]),
            "place": places[row["track"]],
        }
        for row in sorted(rows, key=lambda row: (row["track"], row["step"]))
        if row["track"] in places
    ]
    columns = [*CONCEPTS.items(), ("position", pa.float64()), ("label", pa.string()), ("place", pa.int64())]
    return pa.Table.from_pylist(shaped, schema=pa.schema(columns, metadata={"concepts": str(len(lives))}))


def concept_rows(history: ConceptHistory) -> pa.Table:
    """What `concepts_data` reads, of the concepts of a site: one row per track and checkpoint."""
    rows = [
        {**row, "top_tokens": " ".join(token.strip() or repr(token)[1:-1] for token in row["top_tokens"])}
        for row in history.rows()
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(list(CONCEPTS.items())))


def _exponent(variant: str | None) -> float | None:
    for part in (variant or "").split(";"):
        name, _, value = part.partition("=")
        if name.strip() == "exponent":
            try:
                return float(value)
            except ValueError:
                return None
    return None


def curvature(table: pa.Table, **choice: Any) -> Chart:
    """Draw `curvature_data`: intervals of each block against the exponent."""
    return draw_curvature(curvature_data(table, **choice))


def concepts(table: pa.Table, *, most: int = 40) -> Chart:
    """Draw `concepts_data`: shares and turning of concepts as training goes on."""
    return draw_concepts(concepts_data(table, most=most))


def draw_curvature(data: pa.Table) -> Chart:
    """Points with intervals, and a line through the means of each block."""
    alt = import_altair()
    rows = data.to_pylist()
    sites = list(dict.fromkeys(row["site"] for row in sorted(rows, key=lambda row: row["depth"] or 0.0)))
    scheme = {"domain": sites, "scheme": alt.SchemeParams("viridis", extent=[0.0, 0.9])}
    colour = alt.Color("site:O", scale=scheme, sort=sites, legend=legend(sites))
    shown = ("model", "site", "population", "exponent", "value", "low", "high", "points")
    values = sorted({row["exponent"] for row in rows})
    # Blocks stand beside one another, so that their intervals can be told apart.
    apart = 0.4 * min((b - a for a, b in pairwise(values)), default=0.5) / len(sites)
    middle = (len(sites) - 1) / 2

    def beside(some: list[Any]) -> list[Any]:
        return [
            {**row, "beside": round(row["exponent"] + apart * (sites.index(row["site"]) - middle), 4)} for row in some
        ]

    drawn = beside(chart_rows(rows, shown))
    absent = beside([{"site": row["site"], "exponent": row["exponent"]} for row in rows if not is_number(row["value"])])
    base = alt.Chart(inline(drawn))
    axis = {"values": values, "title": "sampling exponent", "format": ".3~f"}
    # Exponents at which nothing can be told have their place too.
    ends = [values[0] - apart * len(sites), values[-1] + apart * len(sites)]
    x = alt.X("beside:Q", scale={"domain": ends, "nice": False, "zero": False}, axis=axis)
    scale = {"zero": True}
    y = alt.Y("value:Q", title="curvature_visibility", scale=scale, axis={"tickCount": 5})
    mean = alt.Y("mean(value):Q", title="curvature_visibility")
    line = base.mark_line(strokeWidth=1.4).encode(x=x, y=mean, color=colour)
    dots = base.mark_point(filled=True, size=36, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip(*shown))
    zero = alt.Chart(inline([{"value": 0.0}])).mark_rule(color=GREY, strokeDash=[5, 3]).encode(y="value:Q")
    crosses = (
        alt.Chart(inline(absent))
        .mark_point(shape="cross", angle=45, size=40, yOffset=-8)
        .encode(x=x, y=alt.datum(0), color=colour, tooltip=tooltip("site", "exponent"))
    )
    layers = [zero, error_bars(drawn, x, colour, scale), line, dots, *([crosses] if absent else [])]
    chart = alt.layer(*layers).properties(width=WIDE, height=HIGH)
    which = " and ".join(sorted({row["population"] for row in rows}))
    said = "bars: 95 % intervals · lines: means · grey dashed: flat" + (" · ×: cannot be told" if absent else "")
    return titled(chart, f"curvature_visibility against sampling, population {which}", subtitle(data), said)


def draw_concepts(data: pa.Table, *, of: str | None = None) -> Chart:
    """Share of the gradients' energy, and cosine with the checkpoint before; in colour those that live longest."""
    alt = import_altair()
    rows = data.to_pylist()
    named = sorted({row["place"] for row in rows})[: len(PALETTE) - 2]
    tops = {row["place"]: row["top_tokens"] or "" for row in rows}
    labels = {place: f"{place + 1}: {tops[place][:28]}" for place in named}
    shown = ("series", "track", "label", "share_of_energy", "cosine", "top_tokens")
    colour = alt.Color("series:N", scale={"domain": list(labels.values())}, legend=legend(labels.values(), "concept"))
    x, panels = step_axis(rows, "step"), []
    for name, title in (("share_of_energy", "share of gradient energy"), ("cosine", "cosine with the one before")):
        drawn = [
            {**short, "series": labels.get(short["place"], "other")}
            for short in chart_rows(rows, (*shown[1:], "position", "place"), need=name)
        ]
        y = alt.Y(f"{name}:Q", title=title, scale={"zero": name != "cosine"}, axis={"tickCount": 5})
        layers = []
        for base, ink in (
            ([row for row in drawn if row["place"] not in labels], alt.value(GREY)),
            ([row for row in drawn if row["place"] in labels], colour),
        ):
            chart = alt.Chart(inline(base))
            faint = 1.0 if ink is colour else 0.35
            line = chart.mark_line(strokeWidth=1.6, opacity=faint)
            dots = chart.mark_point(filled=True, size=22, opacity=faint)
            layers.append(line.encode(x=x, y=y, color=ink, detail="track:N", order=x_order(x)))
            layers.append(dots.encode(x=x, y=y, color=ink, tooltip=tooltip(*shown)))
        panels.append(alt.layer(*layers).properties(width=WIDE, height=HIGH - 60 if name == "cosine" else HIGH - 30))
    chart = alt.vconcat(*panels, spacing=12).resolve_scale(color="shared")
    count = len({row["track"] for row in rows})
    every = int((data.schema.metadata or {}).get(b"concepts", count))
    told = f"the {count} of {every} concepts that live longest" if count < every else f"{count} concepts"
    said = f"{told}, at {len({row['step'] for row in rows})} checkpoints · in colour: the longest lives"
    return titled(chart, "Concepts as training goes on", *([of] if of else []), said)
