"""Which figures a run has rows for; nothing is computed yet."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.verdicts import Verdict
from anisoscope.columns import SCHEMA
from anisoscope.figures import captions, curving, depth, dimension, judgements, places, tangents, training
from anisoscope.figures.choosing import (
    GRIDE,
    Chosen,
    Group,
    among,
    checkpoints_of,
    distinct,
    groups_of,
    in_chunks,
    in_order,
    one_setting,
    plain_states,
)
from anisoscope.figures.drawing import PALETTE, Chart
from anisoscope.records import FINAL_NORM_SITES, Unit
from anisoscope.revisions import training_order
from anisoscope.store import name_trainings
from anisoscope.tracks import PREFIX as CONCEPTS
from anisoscope.tracks import Attached, trace_concepts

# Checkpoints across in a heatmap.
ACROSS = 48
# Where populations differ most: sinks move spectra and angles, repeats move dimensions.
POPULATIONS = ("leading_variance", "mean_cosine", "twonn")
# Verdicts to a figure.
VERDICTS = 40
_DRAWN = frozenset((*SCHEMA.names, "seq_len"))


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
    family: str = ""
    """What it shares with the figures that show the same of other models; empty where it is the only one."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Plans of one section."""

    section: str
    plans: Callable[[], Iterator[Plan]]


def sources(table: pa.Table, units: Sequence[Unit], verdicts: Sequence[Verdict]) -> Iterator[Source]:
    """Where plans come from, each by its section: one that fails leaves the others alone."""
    table = name_trainings(table)
    # Settings are not drawn, but for the window length.
    states = plain_states(table.select([name for name in table.column_names if name in _DRAWN]))
    losses = table.filter(pc.field("metric") == "loss")
    corpora = distinct(states, "corpus")
    for corpus in corpora:
        here = states.filter(pc.field("corpus") == corpus)
        end = f" on {corpus}" if len(corpora) > 1 else ""
        for metric in distinct(here, "metric"):
            # Those have a figure of their own, over scales.
            if not re.fullmatch(GRIDE, metric):
                yield Source(section="profiles", plans=partial(_of_metric, here, losses, metric, end))
        yield Source(section="final norm", plans=partial(_of_stages, here, end))
        yield Source(section="dimension", plans=partial(_of_scales, here, end))
        if units:
            yield Source(section="populations", plans=partial(_of_lengths, here, end))
    yield Source(section="alignment", plans=partial(_of_gradients, table))
    yield Source(section="curvature", plans=partial(_of_curvature, table))
    yield Source(section="concepts", plans=partial(_of_concepts, units))
    yield Source(section="populations", plans=partial(_of_owners, units))
    yield Source(section="weights", plans=partial(_of_weights, units))
    yield Source(section="verdicts", plans=partial(_of_verdicts, verdicts))


def _of_stages(states: pa.Table, end: str) -> Iterator[Plan]:
    """Metrics through the final norm."""
    if FINAL_NORM_SITES[0] in distinct(states, "site"):
        inside = states.filter(among("metric", places.STAGE_METRICS))
        keys = distinct(inside.filter(pc.field("site") == FINAL_NORM_SITES[0]), "key")
        chosen = one_setting(inside.filter(among("key", keys)))
        for population in in_order({"all", "typical"} & set(distinct(chosen.table, "population"))):
            yield Plan(
                name=f"stages-{population}{end}",
                section="final norm",
                title=f"Through the final norm, {population}{end}",
                data=partial(places.stages_data, chosen.table, populations=[population]),
                draw=places.draw_stages,
                caption=chosen.counted(captions.stages_caption),
            )


def _of_scales(states: pa.Table, end: str) -> Iterator[Plan]:
    names = [name for name in distinct(states, "metric") if re.fullmatch(GRIDE, name)]
    scaled = states.filter(among("metric", names))
    chosen = one_setting(scaled.filter(pc.field("depth").is_valid()))
    for model in distinct(chosen.table, "model"):
        yield Plan(
            name=f"scales-{model}{end}",
            section="dimension",
            title=f"gride of {model} against scale{end}",
            data=partial(_scales_of, chosen.table, model),
            draw=dimension.draw_scales,
            caption=chosen.counted(captions.scales_caption),
            family=f"scales{end}",
        )


def _scales_of(rows: pa.Table, model: str) -> pa.Table:
    mine = rows.filter(pc.field("model") == model)
    return dimension.scales_data(mine, model=model, populations=in_order(distinct(mine, "population")))


def _of_lengths(states: pa.Table, end: str) -> Iterator[Plan]:
    """Leading variance over window lengths, where units differ in nothing else that is seen in the table."""
    if "seq_len" not in states.column_names or len(distinct(states, "seq_len")) < 2:
        return
    blocks = states.filter(pc.field("depth").is_valid() & (pc.field("metric") == "leading_variance"))
    found = blocks.group_by(["key", "seq_len"], use_threads=False).aggregate([]).to_pylist()
    lengths = {one["key"]: one["seq_len"] for one in found if one["seq_len"] is not None}
    parts = []
    for length in sorted(set(lengths.values())):
        parts.append(one_setting(blocks.filter(pc.field("seq_len") == length)).table)
    mine = [part for part in parts if len(part)]
    if len(mine) < 2:
        return
    rows = pa.concat_tables(mine)
    which = [name for name in ("all", "typical") if name in distinct(rows, "population")]
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
    rows = table.filter(kept & among("metric", ["tangent_energy", *tangents.CONTROLLED]))
    rows = rows.select([name for name in rows.column_names if name in _DRAWN])
    for group in groups_of(rows.filter(pc.field("bin").is_null()), "model", "corpus", "population", "variant"):
        yield _of_alignment(group)
    # The variant of a bin states its frequency: all bins are one figure.
    for group in groups_of(rows.filter(pc.field("bin").is_valid()), "model", "corpus", "population"):
        names = group.names
        chosen = one_setting(group.table)
        yield Plan(
            name="alignment_bins-" + "-".join(map(str, names.values())),
            section="alignment",
            title=f"tangent_energy of {names['model']} by token frequency, {names['population']}",
            data=partial(tangents.alignment_bins_data, chosen.table, **names),
            draw=tangents.draw_alignment_bins,
            caption=chosen.counted(captions.bins_caption),
            family=f"alignment_bins-{names['corpus']}-{names['population']}",
        )


def _of_alignment(group: Group) -> Plan:
    """The rows are chosen when the figure is made: of many models few are."""
    names = group.names

    @cache
    def chosen() -> Chosen:
        return one_setting(group.table)

    @cache
    def axis() -> str:
        several = len(checkpoints_of(chosen().table)) > 1
        stepped = None not in distinct(chosen().table, "step")
        return ("step" if stepped else "checkpoint") if several else "depth"

    return Plan(
        name="alignment-" + "-".join(map(str, names.values())),
        section="alignment",
        title=f"tangent_energy of {names['model']} and its controls, {names['population']}, {names['variant']}",
        data=lambda: tangents.alignment_data(chosen().table, axis=axis(), **names),
        draw=lambda data: tangents.draw_alignment(data, axis=axis()),
        caption=lambda data: chosen().counted(captions.alignment_caption)(data),
        family=f"alignment-{names['corpus']}-{names['population']}-{names['variant']}",
    )


def _of_curvature(table: pa.Table) -> Iterator[Plan]:
    rows = table.filter((pc.field("metric") == "curvature_visibility") & pc.field("variant").is_valid())
    stated = rows.filter(among("variant", [name for name in distinct(rows, "variant") if "exponent=" in name]))
    for group in groups_of(stated, "corpus", "population"):
        yield Plan(
            name="curvature-" + "-".join(map(str, group.names.values())),
            section="curvature",
            title=f"curvature_visibility against sampling, {group.names['population']}",
            data=partial(curving.curvature_data, group.table, **group.names),
            draw=curving.draw_curvature,
            caption=captions.curvature_caption,
        )


def _of_concepts(units: Sequence[Unit]) -> Iterator[Plan]:
    """The life of concepts at each site, where there are several checkpoints."""
    attached = [
        Attached(
            model=unit.spec.run or unit.spec.model,
            corpus=unit.spec.corpus,
            stage=next((record.stage for record in unit.records), None),
            step=unit.spec.step,
            revision=unit.spec.revision,
            settings=unit.spec.as_dict(),
            arrays=unit.attachments,
        )
        for unit in units
        if any(name.startswith(CONCEPTS) for name in unit.attachments)
    ]
    for traced in trace_concepts(attached):
        if len(traced.history.steps) > 1:
            yield Plan(
                name=f"concepts-{traced.model}-{traced.site}",
                section="concepts",
                title=f"Concepts of {traced.model} at {traced.site}",
                data=partial(curving.concepts_data, curving.concept_rows(traced.history)),
                draw=partial(curving.draw_concepts, of=f"{traced.model}, {traced.site}, {traced.corpus}"),
                caption=captions.concepts_caption,
                need="share_of_energy",
                family="concepts",
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
            family="owners",
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
                family=f"embeddings-{site}",
            )


def _of_verdicts(verdicts: Sequence[Verdict]) -> Iterator[Plan]:
    ordered = sorted(verdicts, key=lambda one: list(judgements.HOLDS).index(one.holds))
    for number, some in enumerate(in_chunks(ordered, VERDICTS)):
        part = f" ({number + 1})" if len(verdicts) > VERDICTS else ""
        yield Plan(
            name=f"verdicts{part}",
            section="verdicts",
            title=f"Verdicts on claims{part}",
            data=partial(judgements.verdicts_data, some),
            draw=judgements.draw_verdicts,
            caption=captions.verdicts_caption,
            need=None,
            family="verdicts",
        )


def _of_metric(states: pa.Table, losses: pa.Table, metric: str, end: str) -> Iterator[Plan]:
    """Profile, dynamics, steps and heatmaps of one metric on one corpus."""
    rows = one_setting(states.filter(pc.field("metric") == metric))
    blocks = rows.table.filter(pc.field("depth").is_valid())
    populations = in_order(distinct(blocks, "population"))
    models = distinct(blocks, "model")
    checkpoints = Counter(one["model"] for one in checkpoints_of(blocks))
    for number, some in enumerate(in_chunks(models, len(PALETTE))):
        part = f" ({number + 1})" if len(models) > len(PALETTE) else ""
        yield Plan(
            name=f"profile-{metric}{end}{part}",
            section="profiles",
            title=f"{metric} over depth{end}{part}",
            data=partial(_profiles_of, blocks, some, metric, populations),
            draw=depth.draw_profile,
            caption=rows.counted(captions.profile_caption),
            family=f"profile-{metric}{end}",
        )
        yield from _dynamics(blocks.filter(among("model", some)), losses, rows, metric, populations, end, part)
    for model in models:
        if checkpoints[model] > 1:
            yield from _training(blocks, rows, model, metric, populations[0], end)
        if len(populations) > 1 and metric in POPULATIONS:
            yield Plan(
                name=f"populations-{metric}-{model}{end}",
                section="populations",
                title=f"{metric} of {model} by population{end}",
                data=partial(depth.populations_data, blocks, model=model, metric=metric),
                draw=depth.draw_populations,
                caption=rows.counted(captions.populations_caption),
                family=f"populations-{metric}{end}",
            )


def _profiles_of(blocks: pa.Table, models: list[str], metric: str, populations: list[str]) -> pa.Table:
    return depth.profile_data(blocks.filter(among("model", models)), metric=metric, populations=populations)


def _dynamics(
    blocks: pa.Table, losses: pa.Table, rows: Chosen, metric: str, populations: list[str], end: str, part: str
) -> Iterator[Plan]:
    """Of models with several checkpoints; those without a step are left out where others have one."""
    stepped = blocks.filter(pc.field("step").is_valid())
    # Steps that start again in every stage have no place on one axis.
    axis = "step" if len(distinct(stepped, "step")) > 1 and len(distinct(stepped, "stage")) == 1 else "checkpoint"
    mine = stepped if axis == "step" else blocks
    if max(Counter(one["model"] for one in checkpoints_of(mine)).values(), default=0) < 2:
        return
    yield Plan(
        name=f"dynamics-{metric}{end}{part}",
        section="dynamics",
        title=f"{metric} as training goes on{end}{part}",
        data=partial(_dynamics_of, mine, losses, metric, populations, axis),
        draw=partial(training.draw_dynamics, axis=axis),
        caption=rows.counted(captions.dynamics_caption),
        family=f"dynamics-{metric}{end}",
    )


def _dynamics_of(blocks: pa.Table, losses: pa.Table, metric: str, populations: list[str], axis: str) -> pa.Table:
    theirs = losses.filter(among("key", distinct(blocks, "key")))
    both = pa.concat_tables([blocks, theirs.select(blocks.column_names)])
    return training.dynamics_data(both, metric=metric, populations=populations, axis=axis)


def _training(blocks: pa.Table, rows: Chosen, model: str, metric: str, population: str, end: str) -> Iterator[Plan]:
    yield Plan(
        name=f"steps-{metric}-{model}{end}",
        section="dynamics",
        title=f"{metric} of {model} over depth, step by step{end}",
        data=partial(depth.steps_data, blocks, model=model, metric=metric, population=population),
        draw=depth.draw_steps,
        caption=rows.counted(captions.steps_caption),
        family=f"steps-{metric}{end}",
    )
    yield Plan(
        name=f"heatmap-{metric}-{model}{end}",
        section="dynamics",
        title=f"{metric} of {model} at every site and step{end}",
        data=partial(
            training.heatmap_data,
            rows.table,
            model=model,
            metric=metric,
            population=population,
            most=ACROSS,
        ),
        draw=training.draw_heatmap,
        caption=rows.counted(captions.heatmap_caption),
        family=f"heatmap-{metric}{end}",
    )
