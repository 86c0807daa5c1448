"""Which figures a run has rows for; nothing is computed yet."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.verdicts import Verdict
from anisoscope.figures import captions, curving, depth, dimension, judgements, places, tangents, training
from anisoscope.figures.drawing import PALETTE, Chart
from anisoscope.records import FINAL_NORM_SITES, Unit
from anisoscope.revisions import training_order
from anisoscope.store import SCHEMA, name_trainings

# Checkpoints across in a heatmap.
ACROSS = 48
# Where populations differ most: sinks move spectra and angles, repeats move dimensions.
POPULATIONS = ("leading_variance", "mean_cosine", "twonn")
# Verdicts to a figure.
VERDICTS = 40
_GRIDE = r"gride_\d+"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What makes a figure; nothing is computed yet."""

    name: str
    section: str
    title: str
    data: Callable[[], pa.Table]
    draw: Callable[[pa.Table], Chart]
    caption: Callable[[pa.Table], str]
    need: str | None = "value"
    """The column that must have a number somewhere."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Plans of one section."""

    section: str
    plans: Callable[[], Iterator[Plan]]


def sources(table: pa.Table, units: Sequence[Unit], verdicts: Sequence[Verdict]) -> Iterator[Source]:
    """Where plans come from, each by its section: one that fails leaves the others alone."""
    table = name_trainings(table)
    plain = pc.field("gradient").is_null() & pc.field("bin").is_null() & pc.field("variant").is_null()
    states = table.filter(plain & (pc.field("site") != "output") & (pc.field("population") != "rows"))
    corpora = _distinct(states, "corpus")
    for corpus in corpora:
        here = states.filter(pc.field("corpus") == corpus)
        end = f" on {corpus}" if len(corpora) > 1 else ""
        for metric in _distinct(here, "metric"):
            # Those have a figure of their own, over scales.
            if not re.fullmatch(_GRIDE, metric):
                yield Source(section="profiles", plans=partial(_of_metric, here, table, metric, end))
        yield Source(section="final norm", plans=partial(_of_stages, here, end))
        yield Source(section="dimension", plans=partial(_of_scales, here, end))
        yield Source(section="populations", plans=partial(_of_lengths, here, units, end))
    yield Source(section="alignment", plans=partial(_of_gradients, table))
    yield Source(section="curvature", plans=partial(_of_curvature, table))
    yield Source(section="populations", plans=partial(_of_owners, units))
    yield Source(section="weights", plans=partial(_of_weights, units))
    yield Source(section="verdicts", plans=partial(_of_verdicts, verdicts))


def _of_stages(states: pa.Table, end: str) -> Iterator[Plan]:
    """Metrics through the final norm."""
    if FINAL_NORM_SITES[0] in _distinct(states, "site"):
        inside = states.filter(_among("metric", places.STAGE_METRICS))
        keys = _distinct(inside.filter(pc.field("site") == FINAL_NORM_SITES[0]), "key")
        chosen = _one_setting(inside.filter(_among("key", keys)))
        for population in _ordered({"all", "typical"} & set(_distinct(chosen.table, "population"))):
            yield Plan(
                name=f"stages-{population}{end}",
                section="final norm",
                title=f"Through the final norm, {population}{end}",
                data=partial(places.stages_data, chosen.table, populations=[population]),
                draw=places.draw_stages,
                caption=chosen.counted(captions.stages_caption),
            )


def _of_scales(states: pa.Table, end: str) -> Iterator[Plan]:
    names = [name for name in _distinct(states, "metric") if re.fullmatch(_GRIDE, name)]
    scaled = states.filter(_among("metric", names))
    chosen = _one_setting(scaled.filter(pc.field("depth").is_valid()))
    for model in _distinct(chosen.table, "model"):
        mine = chosen.table.filter(pc.field("model") == model)
        yield Plan(
            name=f"scales-{model}{end}",
            section="dimension",
            title=f"gride of {model} against scale{end}",
            data=partial(dimension.scales_data, mine, model=model, populations=_ordered(_distinct(mine, "population"))),
            draw=dimension.draw_scales,
            caption=chosen.counted(captions.scales_caption),
        )


def _of_lengths(states: pa.Table, units: Sequence[Unit], end: str) -> Iterator[Plan]:
    """Leading variance over window lengths, where units differ in nothing else that is seen in the table."""
    lengths = {unit.key: unit.spec.seq_len for unit in units}
    blocks = states.filter(pc.field("depth").is_valid() & (pc.field("metric") == "leading_variance"))
    blocks = blocks.filter(_among("key", list(lengths)))
    parts = []
    for length in sorted(set(lengths.values())):
        keys = [key for key, found in lengths.items() if found == length]
        parts.append(_one_setting(blocks.filter(_among("key", keys))).table)
    mine = [part for part in parts if len(part)]
    if len(mine) < 2:
        return
    rows = pa.concat_tables(mine)
    which = [name for name in ("all", "typical") if name in _distinct(rows, "population")]
    yield Plan(
        name=f"lengths-leading_variance{end}",
        section="populations",
        title=f"leading_variance against window length{end}",
        data=partial(dimension.lengths_data, rows, lengths, populations=which),
        draw=dimension.draw_lengths,
        caption=captions.lengths_caption,
    )


def _of_gradients(table: pa.Table) -> Iterator[Plan]:
    """Tangent energy with its controls, over training where there are several checkpoints, else over depth."""
    kept = pc.field("gradient").is_valid() & pc.field("depth").is_valid()
    rows = table.filter(kept & _among("metric", ["tangent_energy", *tangents.CONTROLLED]))
    for group in _groups(rows.filter(pc.field("bin").is_null()), "model", "corpus", "population", "variant"):
        names = group.names
        chosen = _one_setting(group.table)
        several = len(_checkpoints(chosen.table)) > 1
        stepped = None not in _distinct(chosen.table, "step")
        axis = ("step" if stepped else "checkpoint") if several else "depth"
        yield Plan(
            name="alignment-" + "-".join(map(str, names.values())),
            section="alignment",
            title=f"tangent_energy of {names['model']} and its controls, {names['population']}, {names['variant']}",
            data=partial(tangents.alignment_data, chosen.table, axis=axis, **names),
            draw=partial(tangents.draw_alignment, axis=axis),
            caption=chosen.counted(captions.alignment_caption),
        )
    for group in _groups(rows.filter(pc.field("bin").is_valid()), "model", "corpus", "population", "variant"):
        names = group.names
        chosen = _one_setting(group.table)
        yield Plan(
            name="alignment_bins-" + "-".join(map(str, names.values())),
            section="alignment",
            title=f"tangent_energy of {names['model']} by token frequency, {names['population']}, {names['variant']}",
            data=partial(tangents.alignment_bins_data, chosen.table, **names),
            draw=tangents.draw_alignment_bins,
            caption=chosen.counted(captions.bins_caption),
        )


def _of_curvature(table: pa.Table) -> Iterator[Plan]:
    rows = table.filter((pc.field("metric") == "curvature_visibility") & pc.field("variant").is_valid())
    stated = rows.filter(_among("variant", [name for name in _distinct(rows, "variant") if "exponent=" in name]))
    for group in _groups(stated, "corpus", "population"):
        yield Plan(
            name="curvature-" + "-".join(map(str, group.names.values())),
            section="curvature",
            title=f"curvature_visibility against sampling, {group.names['population']}",
            data=partial(curving.curvature_data, group.table, **group.names),
            draw=curving.draw_curvature,
            caption=captions.curvature_caption,
        )


def _last_units(units: Iterable[Unit], ending: str) -> list[Unit]:
    """Of each model or training the last unit with such attachments; of one checkpoint the one that has most."""
    best: dict[str, tuple[Any, Unit]] = {}
    for unit in units:
        spec = unit.spec
        if size := sum(name.endswith(ending) for name in unit.attachments):
            stage = next((record.stage for record in unit.records), None)
            rank = training_order(stage, spec.step, spec.revision), size, spec.tokens, unit.key
            who = spec.run or spec.model
            if who not in best or rank > best[who][0]:
                best[who] = rank, unit
    return [unit for _, unit in best.values()]


def _of_owners(units: Sequence[Unit]) -> Iterator[Plan]:
    for unit in _last_units(units, ".shares"):
        name = places.name_of(unit)
        yield Plan(
            name=f"owners-{name}",
            section="populations",
            title=f"Owners of the leading axis of {name}",
            data=partial(places.owners_data, unit),
            draw=places.draw_owners,
            caption=captions.owners_caption,
            need="share",
        )


def _of_weights(units: Sequence[Unit]) -> Iterator[Plan]:
    for unit in _last_units(units, ".rows"):
        name = places.name_of(unit)
        for part in sorted(unit.attachments):
            if not (part.startswith("weights/") and part.endswith(".rows")):
                continue
            site = part.removeprefix("weights/").removesuffix(".rows")
            yield Plan(
                name=f"embeddings-{site}-{name}",
                section="weights",
                title=f"{site} of {name} in two dimensions",
                data=partial(places.embeddings_data, unit, site=site),
                draw=places.draw_embeddings,
                caption=captions.embeddings_caption,
                need="x",
            )


def _of_verdicts(verdicts: Sequence[Verdict]) -> Iterator[Plan]:
    ordered = sorted(verdicts, key=lambda one: list(judgements.HOLDS).index(one.holds))
    for number, some in enumerate(_chunks(ordered, VERDICTS)):
        part = f" ({number + 1})" if len(verdicts) > VERDICTS else ""
        yield Plan(
            name=f"verdicts{part}",
            section="verdicts",
            title=f"Verdicts on claims{part}",
            data=partial(judgements.verdicts_data, some),
            draw=judgements.draw_verdicts,
            caption=captions.verdicts_caption,
            need=None,
        )


def _of_metric(states: pa.Table, table: pa.Table, metric: str, end: str) -> Iterator[Plan]:
    """Profile, dynamics, steps and heatmaps of one metric on one corpus."""
    rows = _one_setting(states.filter(pc.field("metric") == metric))
    blocks = rows.table.filter(pc.field("depth").is_valid())
    populations = _ordered(_distinct(blocks, "population"))
    models = _distinct(blocks, "model")
    for number, some in enumerate(_chunks(models, len(PALETTE))):
        mine = blocks.filter(_among("model", some))
        part = f" ({number + 1})" if len(models) > len(PALETTE) else ""
        yield Plan(
            name=f"profile-{metric}{end}{part}",
            section="profiles",
            title=f"{metric} over depth{end}{part}",
            data=partial(depth.profile_data, mine, metric=metric, populations=populations),
            draw=depth.draw_profile,
            caption=rows.counted(captions.profile_caption),
        )
        yield from _dynamics(mine, table, rows, metric, populations, f"{end}{part}")
    for model in models:
        mine = blocks.filter(pc.field("model") == model)
        if len(_checkpoints(mine)) > 1:
            yield from _training(mine, rows, model, metric, populations[0], end)
        if len(populations) > 1 and metric in POPULATIONS:
            yield Plan(
                name=f"populations-{metric}-{model}{end}",
                section="populations",
                title=f"{metric} of {model} by population{end}",
                data=partial(depth.populations_data, mine, model=model, metric=metric),
                draw=depth.draw_populations,
                caption=rows.counted(captions.populations_caption),
            )


def _dynamics(
    blocks: pa.Table, table: pa.Table, rows: "_Chosen", metric: str, populations: list[str], end: str
) -> Iterator[Plan]:
    """Of models with several checkpoints; those without a step are left out where others have one."""
    stepped = blocks.filter(pc.field("step").is_valid())
    # Steps that start again in every stage have no place on one axis.
    axis = "step" if len(_distinct(stepped, "step")) > 1 and len(_distinct(stepped, "stage")) == 1 else "checkpoint"
    mine = stepped if axis == "step" else blocks
    if all(len(_checkpoints(mine.filter(pc.field("model") == model))) < 2 for model in _distinct(mine, "model")):
        return
    losses = table.filter((pc.field("metric") == "loss") & _among("key", _distinct(mine, "key")))
    yield Plan(
        name=f"dynamics-{metric}{end}",
        section="dynamics",
        title=f"{metric} as training goes on{end}",
        data=partial(
            training.dynamics_data, pa.concat_tables([mine, losses]), metric=metric, populations=populations, axis=axis
        ),
        draw=partial(training.draw_dynamics, axis=axis),
        caption=rows.counted(captions.dynamics_caption),
    )


def _training(blocks: pa.Table, rows: "_Chosen", model: str, metric: str, population: str, end: str) -> Iterator[Plan]:
    yield Plan(
        name=f"steps-{metric}-{model}{end}",
        section="dynamics",
        title=f"{metric} of {model} over depth, step by step{end}",
        data=partial(depth.steps_data, blocks, model=model, metric=metric, population=population),
        draw=depth.draw_steps,
        caption=rows.counted(captions.steps_caption),
    )
    yield Plan(
        name=f"heatmap-{metric}-{model}{end}",
        section="dynamics",
        title=f"{metric} of {model} at every site and step{end}",
        data=partial(
            training.heatmap_data,
            rows.table.filter(pc.field("model") == model),
            model=model,
            metric=metric,
            population=population,
            most=ACROSS,
        ),
        draw=training.draw_heatmap,
        caption=rows.counted(captions.heatmap_caption),
    )


_CHECKPOINT = ("model", "stage", "step", "revision")


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """Rows of one unit a checkpoint, and how many units were passed over."""

    table: pa.Table
    others: int

    def counted(self, caption: Callable[[pa.Table], str]) -> Callable[[pa.Table], str]:
        """The caption, and a word on units that are not shown."""
        if not self.others:
            return caption
        units = f"{self.others} unit{'s' if self.others > 1 else ''}"
        return lambda data: (
            f"{caption(data)} Not shown: {units} of the same checkpoints under other settings or versions."
        )


def _one_setting(rows: pa.Table) -> _Chosen:
    """Of each checkpoint the unit with the latest version of the metric and most points; of equals the first key."""
    sums = rows.group_by([*_CHECKPOINT, "key"]).aggregate([("points", "sum"), ("metric_version", "max")]).to_pylist()
    latest = max((unit["metric_version_max"] for unit in sums), default=0)
    best: dict[tuple[Any, ...], tuple[int, str]] = {}
    for unit in sorted(sums, key=lambda unit: unit["key"]):
        checkpoint = tuple(unit[name] for name in _CHECKPOINT)
        if unit["metric_version_max"] == latest and unit["points_sum"] > best.get(checkpoint, (-1, ""))[0]:
            best[checkpoint] = unit["points_sum"], unit["key"]
    keys = {key for _, key in best.values()}
    chosen = rows.filter(_among("key", list(keys)))
    return _Chosen(table=chosen, others=len({unit["key"] for unit in sums} - keys))


def _checkpoints(rows: pa.Table) -> list[dict[str, Any]]:
    return rows.group_by(list(_CHECKPOINT)).aggregate([]).to_pylist()


@dataclass(frozen=True, kw_only=True)
class _Group:
    names: dict[str, Any]
    table: pa.Table


def _groups(rows: pa.Table, *names: str) -> Iterator[_Group]:
    """Rows that share these columns, in the order in which they come."""
    for found in rows.group_by(list(names), use_threads=False).aggregate([]).to_pylist():
        mask = pc.scalar(True)
        for name, value in found.items():
            mask = mask & (pc.field(name).is_null() if value is None else pc.field(name) == value)
        yield _Group(names=found, table=rows.filter(mask))


def _among(column: str, names: Iterable[Any]) -> Any:
    # Arrow would not know the type of no names.
    return pc.field(column).isin(pa.array(list(names), SCHEMA.field(column).type))


def _distinct(table: pa.Table, column: str) -> list[Any]:
    return table[column].unique().to_pylist()


def _ordered(populations: Iterable[str]) -> list[str]:
    places = {name: place for place, name in enumerate(("all", "typical", "types", "matched", "content"))}
    return sorted(populations, key=lambda name: (places.get(name, len(places)), name))


def _chunks(names: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(names[start : start + size]) for start in range(0, len(names), size)]
