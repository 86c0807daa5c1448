"""A metric over the depth of models: profiles, at one checkpoint or at several, with and without sink tokens."""

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from anisoscope.errors import SpecError
from anisoscope.figures.drawing import (
    HIGH,
    WIDE,
    Chart,
    band_and_line,
    by_population,
    chart_rows,
    depth_axis,
    import_altair,
    legend,
    name_series,
    named,
    subtitle,
    titled,
    with_suspects,
)
from anisoscope.figures.rows import (
    NUMBERS,
    WHO,
    at_last_checkpoint,
    at_steps,
    blocks_of,
    select_rows,
    spaced_checkpoints,
    table_of,
    with_labels,
)

PROFILE = (*WHO, "site", "block", "depth", *NUMBERS, "points")
NULL_LINE = "grey dashed: null"
_SHOWN = ("series", "population", "site", "depth", "value", "spread", "null", "points", "step")


def profile_data(
    table: pa.Table,
    *,
    metric: str = "leading_variance",
    populations: Sequence[str] = ("all", "typical"),
    steps: Collection[int] | None = None,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """A metric over the depth of several models: a row per block, at each model's last checkpoint or at given steps.

    `low` and `high` are value ∓ spread, NaN where there was one batch.
    """
    rows = blocks_of(select_rows(table, metric=metric, populations=populations, corpus=corpus, keys=keys))
    rows = at_last_checkpoint(rows) if steps is None else at_steps(rows, steps)
    return table_of(rows, PROFILE)


def steps_data(
    table: pa.Table,
    *,
    model: str,
    metric: str = "leading_variance",
    population: str = "all",
    steps: Collection[int] | None = None,
    most: int = 8,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Profiles of one model at several steps: those asked, or at most `most`, evenly spaced in the logarithm.

    The first and the last are always among them. Where a training has several stages, or no steps, checkpoints are
    spaced evenly by their index; where only some steps are known, as beside a `main`, the others are left out.
    """
    rows = blocks_of(select_rows(table, model=model, metric=metric, populations=[population], corpus=corpus, keys=keys))
    if steps is not None:
        rows = at_steps(rows, steps)
    else:
        if most < 2:
            raise SpecError(f"the first and the last step are always shown: most is at least 2; came {most}")
        rows = [row for row in rows if row["step"] is not None] or rows
        chosen = spaced_checkpoints(rows, most)
        rows = [row for row in rows if row["checkpoint"] in chosen]
    return table_of(with_labels(rows), (*PROFILE, "label"))


def populations_data(
    table: pa.Table,
    *,
    model: str,
    metric: str = "leading_variance",
    populations: Sequence[str] | None = None,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """One model's profile at its last checkpoint on every population that has it: the bell with and without sinks.

    Spectra are told apart by `all` and `typical`, which leaves tokens of extreme norm out.
    """
    rows = select_rows(table, model=model, metric=metric, populations=populations, corpus=corpus, keys=keys)
    return table_of(at_last_checkpoint(blocks_of(rows)), PROFILE)


def profile(table: pa.Table, **choice: Any) -> Chart:
    """Draw `profile_data`, which takes the same choices: a panel for each population, a line for each model."""
    return draw_profile(profile_data(table, **choice))


def populations(table: pa.Table, *, model: str, metric: str = "leading_variance", **choice: Any) -> Chart:
    """Draw `populations_data`: one model, a line for each population."""
    return draw_populations(populations_data(table, model=model, metric=metric, **choice))


def steps(table: pa.Table, *, model: str, **choice: Any) -> Chart:
    """Draw `steps_data`: one model, a line for each step, from dark to light as training goes on."""
    return draw_steps(steps_data(table, model=model, **choice))


def draw_profile(data: pa.Table) -> Chart:
    """A profile's data as lines with bands: colour for the model, shape for its kind, a panel for each population."""
    alt = import_altair()
    rows = name_series(data.to_pylist())
    drawn = chart_rows(rows, (*_SHOWN, "low", "high", "kind", *with_suspects(rows)))
    names, panels, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("series", "population", "kind"))
    colour = alt.Color("series:N", scale={"domain": names}, legend=legend(names))
    shape = alt.Shape("kind:N", scale=_shapes(kinds), legend=legend(kinds) if len(kinds) > 1 else None)
    metric = rows[0]["metric"]
    layers = band_and_line(drawn, depth_axis(), metric, colour=colour, shown=_SHOWN, shape=shape)
    chart = by_population(layers, panels)
    title = f"{metric} at the blocks, {named('population', panels)}"
    steps = sorted({row["step"] for row in rows if row["step"] is not None})
    when = named("step", steps) if steps and len(steps) <= 3 else None
    return titled(chart, title, subtitle(data), " · ".join(filter(None, (when, _null_said(drawn)))))


def draw_populations(data: pa.Table) -> Chart:
    """Populations of one model as lines of one panel."""
    alt = import_altair()
    rows = name_series(data.to_pylist(), "population")
    drawn = chart_rows(rows, (*_SHOWN, "low", "high", *with_suspects(rows)))
    names = list(dict.fromkeys(row["series"] for row in rows))
    colour = alt.Color("series:N", scale={"domain": names}, legend=legend(names, "population"))
    stacks = list(dict.fromkeys(row["stack"] for row in rows))
    metric = rows[0]["metric"]
    shape = alt.Shape("series:N", scale={"domain": names}, legend=legend(names, "population"))
    layers = band_and_line(drawn, depth_axis(), metric, colour=colour, shown=_SHOWN, shape=shape, names=names)
    chart = layers.properties(width=WIDE, height=HIGH)
    title = f"{metric} at the blocks, {named('population', names)}"
    return titled(chart, title, subtitle(data), _null_said(drawn), f"{stacks[0]} stack" if stacks[0] else None)


def draw_steps(data: pa.Table) -> Chart:
    """Profiles of one model at several steps, in an order of colours."""
    alt = import_altair()
    rows = name_series(data.to_pylist(), "label")
    shown = ("label", "site", "depth", "value", "spread", "null", "points", "stage")
    drawn = chart_rows(rows, (*shown, "series", "low", "high", *with_suspects(rows)))
    labels = list(dict.fromkeys(row["series"] for row in sorted(rows, key=lambda row: row["checkpoint"])))
    scheme = {"domain": labels, "scheme": alt.SchemeParams("viridis", extent=[0.0, 0.9])}
    colour = alt.Color("series:O", scale=scheme, sort=labels, legend=legend(labels, "training step"))
    metric, population = rows[0]["metric"], rows[0]["population"]
    layers = band_and_line(drawn, depth_axis(), metric, colour=colour, shown=shown)
    title = f"{metric} at the blocks as training goes on, population {population}"
    return titled(layers.properties(width=WIDE, height=HIGH), title, subtitle(data), _null_said(drawn))


def _shapes(kinds: Sequence[str]) -> dict[str, Any]:
    shapes = {"decoder": "circle", "encoder": "square", "encoder-decoder": "diamond"}
    return {"domain": list(kinds), "range": [shapes.get(kind, "cross") for kind in kinds]}


def _null_said(rows: Sequence[dict[str, Any]]) -> str | None:
    return NULL_LINE if any(row["null"] is not None for row in rows) else None
