"""Claims about the profile of a model over its blocks, and about kinds of models."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from anisoscope.claims.findings import Finding, Subject, bound, counted, number, on_side, open_questions, ordered_pairs
from anisoscope.claims.profiles import Profile, family_of, finite
from anisoscope.claims.resampling import Bounds, Resampling, held_out_peak, student, welch

BELL_MARGIN = 0.05
FLAT_MARGIN = 0.1
INSIDE = (0.2, 0.8)
MIN_MODELS = 3


def judge_profile(profile: Profile, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Is it a bell, is it flat?"""
    values, pools = finite(profile.values)
    notes = open_questions(pools)
    subject = Subject(
        name=profile.model,
        models=(profile.model,),
        place=profile.place,
        variant=profile.stack,
        replicates=len(values),
        unit="batch",
        notes=() if profile.lacks else notes,
    )
    for claim, test in (("bell", bell), ("flat", flat)):
        finding = Finding(claim=claim, says=profile.lacks) if profile.lacks else test(profile, how)
        yield subject, replace(finding, supported=None) if notes else finding


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
        effect=height.effect,
        interval=height.interval,
        # A peak elsewhere is no evidence for a bell, however high the middle.
        p=height.p_above if highest in inside or math.isnan(height.p_above) else 1.0,
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
        effect=span.effect,
        # NaN, where there is no interval, stays NaN.
        interval=(0.0 if span.low < 0 else span.low, span.high),
        p=span.p_below,
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
            found = student(_by_model(decoders, _height), margin=BELL_MARGIN, level=how.level)
            side = on_side(found, BELL_MARGIN, above=True)
            says = f"the peak inside is {number(found.effect)} above the higher end on average"
            yield _kind("decoders are bells", side, found, found.p_above, says, decoders=decoders)
        if encoders:
            found = student(_by_model(encoders, _range), margin=FLAT_MARGIN, level=how.level)
            side = on_side(found, FLAT_MARGIN, above=False)
            says = f"the highest and the lowest block differ by {number(found.effect)} on average"
            yield _kind("encoders are flat", side, found, found.p_below, says, encoders=encoders)
        if encoders and decoders:
            found = welch(_by_model(decoders, _height), _by_model(encoders, _height), level=how.level)
            # No test shows that two things are the same: it holds or cannot be told.
            side = found.low > 0 or found.high < 0 or None
            says = f"the peak inside is {number(found.effect)} higher in decoders than in encoders"
            p = min(found.p_above, found.p_below)
            yield _kind("encoders and decoders differ", side, found, p, says, encoders=encoders, decoders=decoders)


def _kind(
    claim: str, side: bool | None, found: Bounds, p: float, says: str, **kinds: list[Profile]
) -> tuple[Subject, Finding]:
    counts = {kind: len({family_of(item.model) for item in members}) for kind, members in kinds.items()}
    missing = " and ".join(
        counted(MIN_MODELS - count, kind[:-1]) for kind, count in counts.items() if count < MIN_MODELS
    )
    subject = Subject(
        name=" and ".join(kinds),
        models=tuple(sorted({item.model for members in kinds.values() for item in members})),
        place=next(iter(kinds.values()))[0].place,
        variant=None,
        replicates=sum(counts.values()),
        unit="model",
        notes=(f"a claim about a kind needs {MIN_MODELS} models of it, and lacks {missing}",) if missing else (),
    )
    return subject, Finding(
        claim=claim,
        supported=None if missing else side,
        effect=found.effect,
        interval=found.interval,
        p=p,
        says=says,
        details={kind: float(count) for kind, count in counts.items()},
    )


def _by_model(profiles: Iterable[Profile], statistic: Callable[[Profile], float]) -> list[float]:
    """One number a model; seeds of one training are one model, and give their mean."""
    families: dict[str, list[float]] = defaultdict(list)
    for profile in profiles:
        families[family_of(profile.model)].append(statistic(profile))
    return [sum(values) / len(values) for values in families.values()]


def _height(profile: Profile) -> float:
    """Peak inside over the higher end, its block chosen on other pools than those its height is read from."""
    values, pools = finite(profile.values)
    half = (pools if len(np.unique(pools)) > 1 else np.arange(len(values))) % 2
    halves = [values[half == part] if (half == part).any() else values for part in (0, 1)]
    return held_out_peak(halves, _inside(profile.depths), np.array([0, len(profile.depths) - 1]))


def _range(profile: Profile) -> float:
    """Highest less lowest block; noise only makes it larger, which flatness must bear."""
    return float(np.ptp(finite(profile.values)[0].mean(0)))
