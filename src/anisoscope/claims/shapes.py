"""Claims about the profile of a model over its blocks, and about encoders and decoders."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from anisoscope.claims.catalogue import CLAIMS
from anisoscope.claims.findings import (
    KINDS,
    WEIGHTS,
    Finding,
    Subject,
    bound,
    counted,
    either,
    number,
    on_side,
    ordered_pairs,
    too_few,
)
from anisoscope.claims.profiles import Profile, finite, recipe_of
from anisoscope.claims.resampling import Bounds, Resampling, held_out_peak, student, welch

BELL_MARGIN = CLAIMS["bell"].smallest_effect
FLAT_MARGIN = CLAIMS["flat"].smallest_effect
DIFFERENCE = CLAIMS["encoders and decoders differ"].smallest_effect
INSIDE = (0.2, 0.8)
MIN_MODELS = 3


def judge_profile(
    profile: Profile, how: Resampling, untrained: Profile | None = None
) -> Iterator[tuple[Subject, Finding]]:
    """Is it a bell, is it flat, and was it so before training?"""
    values, pools = finite(profile.values)
    missing = profile.lacks or too_few(pools)
    subject = Subject(
        name=profile.model,
        models=(profile.model,),
        place=profile.place,
        variant=profile.stack,
        question=(profile.stack,),
        replicates=len(values),
        unit="batch",
        of=WEIGHTS,
    )
    for claim, test in (("bell", bell), ("flat", flat)):
        finding = Finding(claim=claim, says="no shape can be read") if profile.lacks else test(profile, how)
        if missing:
            finding = replace(finding, supported=None, decides=False, reason=missing)
        elif untrained is not None and not untrained.lacks and not too_few(finite(untrained.values)[1]):
            finding = replace(finding, at_start=test(untrained, how).supported is True)
        yield subject, finding


def _inside(depths: np.ndarray) -> np.ndarray:
    """Blocks at depth .2 to .8 that are not ends."""
    places = np.flatnonzero((depths > INSIDE[0] - 1e-9) & (depths < INSIDE[1] + 1e-9))
    return places[(places > 0) & (places < len(depths) - 1)]


def bell(profile: Profile, how: Resampling) -> Finding:
    """Peak inside over the higher end:  max_k min_e (μ_k - μ_e),  k at depth .2 to .8, e the first and last block.

    It holds if that exceeds .05 and the highest of all blocks is inside; it does not if that stays below .05 or a block
    outside is reliably higher than all inside.
    """
    values, pools = finite(profile.values)
    inside = _inside(profile.depths)
    outside = np.setdiff1d(np.arange(len(profile.depths)), inside)
    height = bound(values[:, inside, None] - values[:, None, [0, -1]], pools, how, BELL_MARGIN)
    beside = bound(values[:, outside, None] - values[:, None, inside], pools, how, 0.0)
    highest = int(values.mean(0).argmax())
    depth = float(profile.depths[highest])
    supported = on_side(height, BELL_MARGIN, above=True)
    if highest not in inside:
        supported = False if supported is False or beside.low > 0 else None
    return Finding(
        claim="bell",
        supported=supported,
        reason=f"the interval includes {BELL_MARGIN:g}"
        if highest in inside
        else "the highest block is outside, but not reliably",
        effect=height.effect,
        interval=height.interval,
        # A peak elsewhere is no evidence for a bell, however high the middle.
        p=height.p_above if highest in inside or math.isnan(height.p_above) else 1.0,
        p_against=either(height.p_below, beside.p_above),
        says=f"the highest block is at depth {depth:.2f}, and the best at depth .2 to .8 is {number(height.effect)} "
        "above the higher end",
        details={"peak_depth": depth, "peak": float(values.mean(0)[highest])},
    )


def flat(profile: Profile, how: Resampling) -> Finding:
    """Equivalence: the largest difference of two blocks,  max_ij (μ_i - μ_j),  is below .1."""
    values, pools = finite(profile.values)
    left, right = ordered_pairs(len(profile.depths))
    span = bound((values[:, left] - values[:, right])[:, :, None], pools, how, FLAT_MARGIN)
    return Finding(
        claim="flat",
        supported=on_side(span, FLAT_MARGIN, above=False),
        reason=f"the interval includes {FLAT_MARGIN:g}",
        effect=span.effect,
        # NaN, where there is no interval, stays NaN.
        interval=(0.0 if span.low < 0 else span.low, span.high),
        p=span.p_below,
        p_against=span.p_above,
        says=f"the highest and the lowest block differ by {number(span.effect)}",
        details={"highest": float(values.mean(0).max()), "lowest": float(values.mean(0).min())},
    )


def judge_kinds(last: Sequence[Profile], how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Are decoders bells, encoders flat, and do they differ?"""
    usable = [item for item in last if item.kind in ("encoder", "decoder") and item.lacks is None]
    for place in sorted({item.place for item in usable}):
        encoders = [item for item in usable if item.place == place and item.kind == "encoder"]
        decoders = [item for item in usable if item.place == place and item.kind == "decoder"]
        if decoders:
            found = student(_by_recipe(decoders, _height), margin=BELL_MARGIN, level=how.level)
            yield _kind(
                Finding(
                    claim="decoders are bells",
                    supported=on_side(found, BELL_MARGIN, above=True),
                    p=found.p_above,
                    p_against=found.p_below,
                    says=f"the peak inside is {number(found.effect)} above the higher end on average",
                ),
                found,
                decoders=decoders,
            )
        if encoders:
            found = student(_by_recipe(encoders, _range), margin=FLAT_MARGIN, level=how.level)
            yield _kind(
                Finding(
                    claim="encoders are flat",
                    supported=on_side(found, FLAT_MARGIN, above=False),
                    p=found.p_below,
                    p_against=found.p_above,
                    says=f"the highest and the lowest block differ by {number(found.effect)} on average",
                ),
                found,
                encoders=encoders,
            )
        if encoders and decoders:
            heights = [list(_by_recipe(models, _height)) for models in (decoders, encoders)]
            found = welch(heights[0], heights[1], level=how.level, margin=DIFFERENCE)
            yield _kind(
                Finding(
                    claim="encoders and decoders differ",
                    # No test shows that two things are the same: it holds or is inconclusive.
                    supported=found.low > DIFFERENCE or found.high < -DIFFERENCE or None,
                    p=min(found.p_above, found.p_below),
                    says=f"the peak inside is {number(found.effect)} higher in decoders than in encoders",
                ),
                found,
                encoders=encoders,
                decoders=decoders,
            )


def _kind(finding: Finding, found: Bounds, **kinds: list[Profile]) -> tuple[Subject, Finding]:
    counts = {kind: len({recipe_of(item.model) for item in members}) for kind, members in kinds.items()}
    subject = kinds_subject(
        {kind: [item.model for item in members] for kind, members in kinds.items()},
        place=next(iter(kinds.values()))[0].place,
    )
    missing = missing_recipes(counts)
    return subject, replace(
        finding,
        supported=None if missing else finding.supported,
        decides=not missing,
        reason=missing or f"the interval includes {finding.declared.smallest_effect:g} or less",
        effect=found.effect,
        interval=found.interval,
        details={kind: float(count) for kind, count in counts.items()},
    )


def kinds_subject(
    models: Mapping[str, Sequence[str]],
    *,
    place: tuple[str, str, str],
    variant: str | None = None,
    question: tuple[str | None, ...] = (),
) -> Subject:
    """Encoders, decoders or both, as what a finding is about: recipes are counted, not their seeds."""
    return Subject(
        name=" and ".join(models),
        models=tuple(sorted({name for names in models.values() for name in names})),
        place=place,
        variant=variant,
        question=question,
        replicates=sum(len({recipe_of(name) for name in names}) for names in models.values()),
        unit="model",
        of=KINDS,
    )


def missing_recipes(counts: Mapping[str, int]) -> str:
    """What a claim about kinds lacks; empty where there are enough recipes of each."""
    missing = [counted(MIN_MODELS - count, kind[:-1]) for kind, count in counts.items() if count < MIN_MODELS]
    if not missing:
        return ""
    needed = f"a claim about a kind needs {MIN_MODELS} models of it, and lacks {' and '.join(missing)}"
    return f"{needed}; seeds of one recipe count as one model"


def by_recipe(values: Iterable[tuple[str, float]]) -> list[float]:
    """One number a recipe: the mean over its seeds."""
    recipes: dict[str, list[float]] = defaultdict(list)
    for model, value in values:
        recipes[recipe_of(model)].append(value)
    return [sum(found) / len(found) for found in recipes.values()]


def _by_recipe(profiles: Iterable[Profile], statistic: Callable[[Profile], float]) -> list[float]:
    return by_recipe((profile.model, statistic(profile)) for profile in profiles)


def _height(profile: Profile) -> float:
    """Peak inside over the higher end, its block chosen on other pools than those its height is read from."""
    values, pools = finite(profile.values)
    half = (pools if len(np.unique(pools)) > 1 else np.arange(len(values))) % 2
    halves = [values[half == part] if (half == part).any() else values for part in (0, 1)]
    return held_out_peak(halves, _inside(profile.depths), np.array([0, len(profile.depths) - 1]))


def _range(profile: Profile) -> float:
    """Highest less lowest block; noise only makes it larger, so flatness is harder to show."""
    return float(np.ptp(finite(profile.values)[0].mean(0)))
