"""Gradients against tangent spaces: with every control, and by token frequency."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.figures.choosing import distinct
from anisoscope.figures.drawing import (
    HIGH,
    NARROW,
    WIDE,
    Chart,
    chart_rows,
    depth_axis,
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
    Row,
    at_last_checkpoint,
    blocks_of,
    listed,
    mean_of,
    number_checkpoints,
    place_along,
    several_settings,
    table_of,
)
from anisoscope.store import name_trainings

# The hardest control that applies is another from block to block; the paper's is always there (docs/tangent.md).
ENERGY, HARDEST, NORMALS, SHUFFLED = QUANTITIES = (
    "tangent energy",
    "hardest control",
    "random normals",
    "shuffled targets",
)
CONTROLLED = ("tangent_excess", "normal_ratio", "tangent_gain")
_HOW = ("gradient", "proxy", "variant", "rank")
_POINT = ("quantity", "control", "position", "label", "depth", "blocks", "value", "low", "high", "p", "significant")
_ALIGNMENT = (*WHO, *_HOW, *_POINT)
_BINS = (*WHO, *_HOW, "site", "depth", "bin", "log10_frequency", "value", "low", "high", "points")
_FREQUENCY = "log10_frequency"


_CONTROLS = {
    "haar": "random spaces",
    "next": "the next principal directions",
    "permuted": "windows permuted",
    "permuted_directions": "directions of gradients permuted",
    "span": "random spaces among proxy and next directions",
    "flipped": "windows with random signs",
    "signs": "coordinates with random signs",
    "untrained": "the space of step 0",
}


def alignment_data(
    table: pa.Table,
    *,
    model: str,
    population: str | None = None,
    variant: str = "mean=in",
    axis: str = "step",
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Energy of gradients in the tangent proxy, and what each control puts there, for each gradient and proxy.

    Of `typical` tokens where no population is named, and they were measured.

    axis         step, tokens or checkpoint: means over the blocks as training goes on; depth: blocks of the last one
    quantity     `tangent energy`; the value of the `hardest control`, which `control` names; that of `random normals`,
                 the paper's control; the energy with `shuffled targets`, where that was asked for
    low, high    the energy's own interval, where there is one block to a point
    p            against that control; over blocks the median
    significant  of how many `blocks` the energy is above the control and p at most .05
    """
    rows = _aligned(table, model=model, population=population, variant=variant, corpus=corpus, keys=keys)
    found = [quantity for row in rows for quantity in _quantities(row)]
    if not found:
        raise SpecError(f"wanted tangent_energy of {model} [{population or 'any'}, {variant}] at blocks; there is none")
    points: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        where = () if axis != "depth" else (row["site"],)
        name = (*(row[part] for part in ("corpus", "stack", "gradient", "proxy", "checkpoint", "quantity")), *where)
        twin = points.setdefault(name, {}).setdefault(row["site"], row)
        if twin["key"] != row["key"]:
            raise SpecError(several_settings(twin, row))
    means = [_mean_of_quantity(list(blocks.values())) for blocks in points.values()]
    if axis == "depth":
        means = [{**row, "position": row["depth"], "label": row["site"]} for row in at_last_checkpoint(means)]
    else:
        means = place_along(means, axis)
    means.sort(
        key=lambda row: (row["gradient"], row["proxy"], row["quantity"] != ENERGY, row["quantity"], row["position"])
    )
    return table_of(means, _ALIGNMENT, own_intervals=True)


def alignment_bins_data(
    table: pa.Table,
    *,
    model: str,
    population: str | None = None,
    variant: str = "mean=in",
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Tangent energy by bin of token frequency, rarest first, at the blocks of a model's last checkpoint.

    `log10_frequency` is that of the bin, as a share of the text; null where its row does not state it. Populations are
    those of `alignment_data`.
    """
    found = _aligned(table, model=model, population=population, variant=None, corpus=corpus, keys=keys, bins=True)
    rows = [_with_frequency(row) for row in found if row["metric"] == "tangent_energy"]
    rows = [row for row in rows if row["variant"] in (variant, None)]
    if not rows:
        raise SpecError(f"wanted tangent_energy of {model} [{population or 'any'}, {variant}] by bin; there is none")
    last = at_last_checkpoint(rows)
    last.sort(key=lambda row: (row["gradient"], row["proxy"], row["variant"] or "", row["depth"], row["bin"]))
    return table_of(last, _BINS, own_intervals=True)


def _with_frequency(row: Row) -> Row:
    """A bin's row states its frequency in the variant, which would tell bins apart that belong together."""
    parts = (row["variant"] or "").split(";")
    stated = next((part.partition("=")[2] for part in parts if part.startswith(f"{_FREQUENCY}=")), None)
    variant = ";".join(part for part in parts if not part.startswith(f"{_FREQUENCY}=")) or None
    return {**row, "variant": variant, _FREQUENCY: None if stated is None else float(stated)}


def _aligned(
    table: pa.Table,
    *,
    model: str,
    population: str | None,
    variant: str | None,
    corpus: str | None,
    keys: Collection[str] | None,
    bins: bool = False,
) -> list[Row]:
    table = name_trainings(table)
    wanted = pc.field("metric").isin(["tangent_energy", *CONTROLLED]) & (pc.field("model") == model)
    wanted = wanted & (pc.field("bin").is_valid() if bins else pc.field("bin").is_null())
    wanted = wanted & (pc.field("variant") == variant) if variant is not None else wanted
    found = table.filter(wanted)
    if population is None:
        population = min(distinct(found, "population"), key=lambda name: name != "typical", default=None)
    rows = narrowed(found, population=population, corpus=corpus, keys=keys)
    if not rows:
        return []
    number_checkpoints(rows)
    return blocks_of(rows)


def narrowed(table: pa.Table, *, population: str | None, corpus: str | None, keys: Collection[str] | None) -> list[Row]:
    """The rows of one population, corpus or set of units, where one is named."""
    for column, names in (("population", population), ("corpus", corpus)):
        table = table if names is None else table.filter(pc.field(column) == names)
    return (table if keys is None else table.filter(pc.field("key").isin(list(keys)))).to_pylist()


def _quantities(row: Row) -> Iterable[Row]:
    if row["metric"] == "tangent_energy":
        yield {**row, "control": None, "quantity": ENERGY}
    if row["control"] and is_number(row["control_value"]):
        quantity = {"tangent_energy": SHUFFLED, "normal_ratio": NORMALS}.get(row["metric"], HARDEST)
        # The next directions have no p: what lies below them is not beyond chance, whatever others say.
        exceeded = row["value"] > (1 if quantity == NORMALS else 0)
        bare = {"low": None, "high": None, "metric": "tangent_energy"}
        yield {**row, **bare, "value": row["control_value"], "quantity": quantity, "exceeded": exceeded}


def _mean_of_quantity(blocks: Sequence[Row]) -> Row:
    known = [row for row in blocks if is_number(row["value"])]
    tested = sorted(row["p"] for row in known if is_number(row["p"]))
    alone = {} if len(blocks) == 1 else {"low": None, "high": None}
    return {
        **blocks[0],
        **alone,
        "value": mean_of([row["value"] for row in known]),
        "control": ", ".join(sorted({row["control"] for row in blocks if row["control"]})) or None,
        "blocks": len(known),
        "p": tested[len(tested) // 2] if tested else None,
        "significant": sum(row["p"] <= 0.05 and row["exceeded"] for row in known if is_number(row["p"]))
        if tested
        else None,
    }


def alignment(table: pa.Table, *, model: str, axis: str = "step", **choice: Any) -> Chart:
    """Draw `alignment_data`: a panel for each gradient and proxy, a line for the energy and each control."""
    return draw_alignment(alignment_data(table, model=model, axis=axis, **choice), axis=axis)


def alignment_bins(table: pa.Table, *, model: str, **choice: Any) -> Chart:
    """Draw `alignment_bins_data`: a panel for each gradient and proxy, a line for each block."""
    return draw_alignment_bins(alignment_bins_data(table, model=model, **choice))


def draw_alignment(data: pa.Table, *, axis: str = "step") -> Chart:
    """Panels of gradients and proxies; controls in other colours than the energy, and dashed."""
    alt = import_altair()
    rows = data.to_pylist()
    names = [name for name in QUANTITIES if any(row["quantity"] == name for row in rows)]
    colour = alt.Color("quantity:N", scale={"domain": names}, legend=legend(names))
    dash = alt.StrokeDash(
        "quantity:N",
        scale={"domain": names, "range": [[1, 0] if name == ENERGY else [5, 2] for name in names]},
        legend=None,
    )
    shown = ("quantity", "control", "label", "value", "low", "high", "p", "significant", "blocks")
    x = depth_axis("position") if axis == "depth" else step_axis(rows, axis, fine=False)

    def panel(mine: Sequence[Row], ends: tuple[float, float]) -> Any:
        drawn = chart_rows(mine, (*shown, "position"))
        base = alt.Chart(inline(drawn))
        scale = {"domain": [min(0.0, ends[0]), 1.07 * ends[1]], "nice": False}
        y = alt.Y("value:Q", title="share of gradient energy", scale=scale, axis={"tickCount": 5})
        line = base.mark_line(strokeWidth=1.8).encode(x=x, y=y, color=colour, strokeDash=dash, order=x_order(x))
        dots = base.mark_point(filled=True, size=34, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip(*shown))
        return alt.layer(error_bars(drawn, x, colour, scale), line, dots)

    where = "at the blocks" if axis == "depth" else "mean of the blocks, as training goes on"
    head = f"tangent_energy and its controls, {where}, population {rows[0]['population']}"
    hardest = sorted({name for row in rows if row["quantity"] == HARDEST for name in row["control"].split(", ")})
    words = [f"{name} ({_CONTROLS[name]})" if name in _CONTROLS else name for name in hardest]
    said = f"hardest control: {', '.join(words)}" if hardest else None
    return titled(
        _grid(rows, panel), head, subtitle(data), f"rank {_ranks(rows)} · {rows[0]['variant']}", said, width=66
    )


def draw_alignment_bins(data: pa.Table) -> Chart:
    """Panels of gradients and proxies; bins to the right, from rare tokens to frequent ones."""
    alt = import_altair()
    rows = data.to_pylist()
    sites = list(dict.fromkeys(row["site"] for row in sorted(rows, key=lambda row: row["depth"] or 0.0)))
    scheme = {"domain": sites, "scheme": alt.SchemeParams("viridis", extent=[0.0, 0.9])}
    colour = alt.Color("site:O", scale=scheme, sort=sites, legend=legend(sites))
    shown = ("site", "bin", _FREQUENCY, "value", "low", "high", "points")
    if all(is_number(row[_FREQUENCY]) for row in rows):
        title = "token frequency, log10 of its share"
        x = alt.X(f"{_FREQUENCY}:Q", scale={"zero": False, "padding": 10}, axis={"title": title, "tickCount": 5})
    else:
        axis = {"title": "bin of token frequency, rarest first", "format": "d", "tickMinStep": 1}
        most = max(row["bin"] for row in rows)
        x = alt.X("bin:Q", scale={"domain": [-0.4, most + 0.4], "nice": False}, axis=axis)

    def panel(mine: Sequence[Row], ends: tuple[float, float]) -> Any:
        drawn = chart_rows(mine, shown)
        base = alt.Chart(inline(drawn))
        room = 0.05 * (ends[1] - ends[0]) or 0.05
        scale = {"domain": [ends[0] - room, ends[1] + room], "zero": False}
        y = alt.Y("value:Q", title="tangent_energy", scale=scale, axis={"tickCount": 5})
        line = base.mark_line(strokeWidth=1.6).encode(x=x, y=y, color=colour, order=x_order(x))
        dots = base.mark_point(filled=True, size=30, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip(*shown))
        return alt.layer(error_bars(drawn, x, colour, scale), line, dots)

    head = f"tangent_energy at the blocks by token frequency, population {rows[0]['population']}"
    how = f"rank {_ranks(rows)} · {rows[0]['variant']} · bars: 95 % intervals"
    return titled(_grid(rows, panel), head, subtitle(data), how)


def _ranks(rows: Sequence[Row]) -> str:
    return listed({row["rank"] for row in rows if row["rank"] is not None})


def _grid(rows: Sequence[Row], panel: Any) -> Any:
    """Panels for each gradient, with its proxies beside one another on the same scale."""
    alt = import_altair()
    lines = []
    variants = {row["variant"] for row in rows}
    for gradient in dict.fromkeys(row["gradient"] for row in rows):
        here = [row for row in rows if row["gradient"] == gradient]
        places = list(dict.fromkeys((row["proxy"], row["variant"]) for row in here))
        known = [row[name] for row in here for name in ("value", "low", "high") if is_number(row[name])]
        ends = min(known, default=0.0), max(known, default=1.0)
        line = []
        for proxy, variant in places:
            mine = [row for row in here if (row["proxy"], row["variant"]) == (proxy, variant)]
            text = f"{gradient} gradients, {proxy}" + (f", {variant}" if len(variants) > 1 else "")
            head = alt.TitleParams(text=text, fontSize=11, fontWeight="normal", offset=4)
            width = NARROW if len(places) > 1 else WIDE
            line.append(panel(mine, ends).properties(width=width, height=HIGH - 50, title=head))
        lines.append(alt.hconcat(*line, spacing=14))
    return alt.vconcat(*lines, spacing=14).resolve_scale(color="shared", strokeDash="shared")
