"""Dimension against the scale at which it is read, and leading variance against the length of windows."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.figures.drawing import (
    Chart,
    band_and_line,
    by_population,
    chart_rows,
    import_altair,
    legend,
    name_series,
    named,
    subtitle,
    titled,
)
from anisoscope.figures.rows import (
    NUMBERS,
    WHO,
    Row,
    at_last_checkpoint,
    blocks_of,
    listed,
    mean_over_blocks,
    number_checkpoints,
    select_rows,
    table_of,
)

SCALES = (*WHO, "site", "depth", "scale", *NUMBERS, "points")
_LINE = ("model", "corpus", "population", "stack", "seq_len")
LENGTHS = (*WHO, "seq_len", "blocks", *NUMBERS, "points")


def scales_data(
    table: pa.Table,
    *,
    model: str,
    populations: Sequence[str] = ("all", "types"),
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """GRIDE at every block and scale of one model's last checkpoint: `gride_k` reads neighbours k/2 and k.

    A dimension that holds over scales is one of the cloud; one that moves with the scale is not yet resolved, or noise.
    """
    names = sorted(filter(_scale, table["metric"].unique().to_pylist()), key=_scale)
    if not names:
        raise SpecError("wanted metrics gride_2, gride_4 ...; there is none")
    rows = []
    for name in names:
        found = select_rows(table, model=model, metric=name, populations=populations, corpus=corpus, keys=keys)
        rows += [{**row, "scale": _scale(name)} for row in at_last_checkpoint(blocks_of(found))]
    return table_of(rows, SCALES)


def _scale(metric: str) -> int:
    found = re.fullmatch(r"gride_(\d+)", metric)
    return int(found.group(1)) if found else 0


def lengths_data(
    table: pa.Table,
    lengths: Mapping[str, int],
    *,
    metric: str = "leading_variance",
    populations: Sequence[str] = ("all", "typical"),
    corpus: str | None = None,
) -> pa.Table:
    """A metric averaged over the blocks of each model's last checkpoint, against the length of windows.

    lengths  `Spec.seq_len` of each unit by its key; the table itself does not hold it
    """
    there = set(table["key"].unique().to_pylist())
    groups: dict[int, list[str]] = {}
    for key, length in lengths.items():
        if key in there:
            groups.setdefault(length, []).append(key)
    if not groups:
        raise SpecError(f"wanted lengths of the units {listed(there)}; they are given for {listed(lengths)}")
    found: list[Row] = []
    for length, keys in sorted(groups.items()):
        units = table.filter(pc.field("key").isin(keys))
        which = [name for name in populations if name in units["population"].unique().to_pylist()]
        if which and metric in units["metric"].unique().to_pylist():
            some = select_rows(units, metric=metric, populations=which, corpus=corpus, keys=None, batches=True)
            found += [{**row, "seq_len": length} for row in blocks_of(some)]
    # Counted again over all lengths: windows of two checkpoints are no comparison.
    number_checkpoints(found)
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in at_last_checkpoint(found):
        lines.setdefault(tuple(row[name] for name in _LINE), []).append(row)
    rows = [{**line[0], **mean_over_blocks(line)} for line in lines.values()]
    return table_of(rows, LENGTHS)


def scales(table: pa.Table, *, model: str, **choice: Any) -> Chart:
    """Draw `scales_data`: a line for each block, from dark to light with depth."""
    return draw_scales(scales_data(table, model=model, **choice))


def lengths(table: pa.Table, lengths: Mapping[str, int], **choice: Any) -> Chart:
    """Draw `lengths_data`: a line for each model."""
    return draw_lengths(lengths_data(table, lengths, **choice))


def draw_scales(data: pa.Table) -> Chart:
    """Dimension over scale, a panel for each population."""
    alt = import_altair()
    shown = ("series", "population", "scale", "value", "spread", "null", "points")
    rows = name_series(data.to_pylist(), "site")
    drawn = chart_rows(rows, (*shown, "low", "high"))
    sites = list(dict.fromkeys(row["series"] for row in rows))
    scheme = {"domain": sites, "scheme": alt.SchemeParams("viridis", extent=[0.0, 0.9])}
    colour = alt.Color("series:O", scale=scheme, sort=sites, legend=legend(sites))
    values = sorted({row["scale"] for row in rows})
    axis = {"values": values, "title": "scale k", "format": "d"}
    x = alt.X("scale:Q", scale={"type": "log", "base": 2, "nice": False, "padding": 8}, axis=axis)
    which = list(dict.fromkeys(row["population"] for row in rows))
    chart = by_population(band_and_line(drawn, x, "dimension (gride_k)", colour=colour, shown=shown), which)
    title = f"gride at the blocks against scale, {named('population', which)}"
    return titled(chart, title, subtitle(data), "at scale k: distances to neighbours k/2 and k · grey dashed: null")


def draw_lengths(data: pa.Table) -> Chart:
    """A metric over window length, a panel for each population."""
    alt = import_altair()
    shown = ("series", "population", "seq_len", "blocks", "value", "spread", "null", "points")
    rows = name_series(data.to_pylist())
    drawn = chart_rows(rows, (*shown, "low", "high"))
    names = list(dict.fromkeys(row["series"] for row in rows))
    colour = alt.Color("series:N", scale={"domain": names}, legend=legend(names))
    axis = {"values": sorted({row["seq_len"] for row in rows}), "title": "window length (tokens)", "format": "d"}
    x = alt.X("seq_len:Q", scale={"type": "log", "base": 2, "nice": False, "padding": 8}, axis=axis)
    metric = rows[0]["metric"]
    which = list(dict.fromkeys(row["population"] for row in rows))
    chart = by_population(band_and_line(drawn, x, metric, colour=colour, shown=shown), which)
    title = f"{metric}, mean of the blocks, against window length, {named('population', which)}"
    return titled(chart, title, subtitle(data), "grey dashed: null")
