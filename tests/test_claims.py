"""The claims: how often they are wrong where nothing is there, how often they see what is, and what they say.

Rates are held against the one-sided 99.9 % limit of the binomial around the level that is promised: .05 for p, .025 for
each side of an interval. All of it is seeded.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats
from scipy.optimize import isotonic_regression

from anisoscope.claims import Verdict, judge
from anisoscope.claims.profiles import Profile, family_of, finite
from anisoscope.claims.resampling import (
    Resampling,
    bound_peak,
    bound_rise_and_fall,
    design_effect,
    fit_after_fall,
    held_out_peak,
    holm,
    pool_numbers,
    rise_and_fall_elsewhere,
    rising_prefixes,
    student,
    welch,
)
from anisoscope.claims.shapes import bell, flat, judge_kinds
from anisoscope.claims.trainings import judge_trainings
from anisoscope.columns import SCHEMA

HOW = Resampling(resamples=400)
BATCHES, BLOCKS = 16, 8
BELL = np.sin(np.linspace(0, np.pi, BLOCKS))
SERIES = np.sin(np.linspace(0, np.pi, 8))

Noise = Callable[[np.random.Generator, int, int], np.ndarray]


def pooled(random: np.random.Generator, batches: int, columns: int) -> np.ndarray:
    """Pools share 70 % of the variance."""
    pools = pool_numbers(batches)
    shared = random.normal(size=(pools.max() + 1, columns))[pools]
    return math.sqrt(0.7) * shared + math.sqrt(0.3) * random.normal(size=(batches, columns))


def pooled_walk(random: np.random.Generator, batches: int, columns: int) -> np.ndarray:
    """The same, and pools move neighbouring columns together."""
    pools = pool_numbers(batches)
    shared = random.normal(size=(pools.max() + 1, columns)).cumsum(1)[pools] / math.sqrt(columns / 2)
    return math.sqrt(0.7) * shared + math.sqrt(0.3) * random.normal(size=(batches, columns))


NOISE: dict[str, Noise] = {
    "normal": lambda random, n, k: random.normal(size=(n, k)),
    "heavy tails": lambda random, n, k: random.standard_t(3, size=(n, k)) / math.sqrt(3),
    "skewed": lambda random, n, k: (random.lognormal(size=(n, k)) - math.exp(0.5)) / 2.16,
    "skewed down": lambda random, n, k: (math.exp(0.5) - random.lognormal(size=(n, k))) / 2.16,
    "correlated over blocks": lambda random, n, k: random.normal(size=(n, k)).cumsum(1) / math.sqrt(k / 2),
    "pools": pooled,
    "pools over neighbours": pooled_walk,
}


def limit(trials: int, level: float) -> int:
    """More false positives than this come once in a thousand if the level is kept."""
    return int(stats.binom.isf(0.001, trials, level))


def profile(values: np.ndarray, *, model: str = "m", **rest: Any) -> Profile:
    blocks = values.shape[1]
    given = {
        "place": ("leading_variance", "all", "pydoc"),
        "kind": "decoder",
        "stack": None,
        "stage": None,
        "step": None,
        "revision": None,
        "sites": tuple(f"block.{k}" for k in range(blocks)),
        "depths": (np.arange(blocks) + 1) / blocks,
    }
    return Profile(model=model, values=values, **{**given, **rest})


def rows(values: np.ndarray, *, model: str = "m", **rest: Any) -> list[dict[str, Any]]:
    """Rows of a table for one checkpoint: values (batches, blocks), and two sites that no claim may read."""
    blocks = values.shape[1]
    given = {
        "key": f"{model}-{rest.get('step')}-{rest.get('corpus')}",
        "model": model,
        "kind": "decoder",
        "corpus": "pydoc",
        "population": "all",
        "metric": "leading_variance",
        "metric_version": 1,
        **rest,
    }
    sites = [(f"block.{k}", (k + 1) / blocks, values[:, k]) for k in range(blocks)]
    ends = [(name, None, np.full(len(values), -9.0)) for name in ("embed", "final_norm")]
    return [
        {**given, "site": site, "depth": depth, "values": column.tolist(), "value": float(column.mean())}
        for site, depth, column in [*sites, *ends]
    ]


def table(*parts: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([row for part in parts for row in part], schema=SCHEMA)


def noisy(shape: Any, spread: float = 0.01, *, batches: int = BATCHES, seed: int = 0) -> np.ndarray:
    shape = np.asarray(shape, float)
    return shape + spread * np.random.default_rng(seed).normal(size=(batches, len(shape)))


def find(verdicts: Iterable[Verdict], **wanted: Any) -> Verdict:
    found = [one for one in verdicts if all(getattr(one, name) == value for name, value in wanted.items())]
    assert len(found) == 1, [(one.claim, one.subject, one.population, one.variant) for one in verdicts]
    return found[0]


# False positives and power: one model, over batches

# The interior is exactly .05 above one end, so that every one of its blocks is a chance to be wrong.
BELL_AT_MARGIN = np.array([0.0, *[0.05] * (BLOCKS - 2), -1.0])
# One pair differs by exactly .1, and no other comes near.
FLAT_AT_MARGIN = np.array([0.0, *[0.05] * (BLOCKS - 2), 0.1])
NOT_BELLS = {
    "at the margin": BELL_AT_MARGIN,
    "flat": np.zeros(BLOCKS),
    "rising": np.linspace(0, 1, BLOCKS),
    "falling": np.linspace(1, 0, BLOCKS),
}


def bell_rate(shape: np.ndarray, noise: Noise, spread: float, trials: int, batches: int = BATCHES) -> int:
    random = np.random.default_rng(1)
    draws = (profile(shape + spread * noise(random, batches, len(shape))) for _ in range(trials))
    return sum(bell(one, HOW).supported is True for one in draws)


@pytest.mark.parametrize("noise", NOISE)
def test_bells_are_seldom_seen_at_the_margin(noise: str) -> None:
    assert bell_rate(BELL_AT_MARGIN, NOISE[noise], 0.02, 300) <= limit(300, 0.025)


@pytest.mark.parametrize("shape", NOT_BELLS)
@pytest.mark.parametrize("batches", [8, 32])
def test_bells_are_seldom_seen_where_there_is_none(shape: str, batches: int) -> None:
    assert bell_rate(NOT_BELLS[shape], NOISE["heavy tails"], 0.02, 100, batches) <= limit(100, 0.025)


@pytest.mark.parametrize("noise", NOISE)
def test_bells_are_seen(noise: str) -> None:
    assert bell_rate(0.3 * BELL, NOISE[noise], 0.02, 60) > 54


def test_pools_are_allowed_for_and_would_fool_a_test_that_did_not() -> None:
    random, trials = np.random.default_rng(2), 300
    honest = naive = 0
    for _ in range(trials):
        values = BELL_AT_MARGIN + 0.02 * pooled(random, BATCHES, BLOCKS)
        grid = values[:, 1:-1, None] - values[:, None, [0, -1]]
        honest += bound_peak(grid, pool_numbers(BATCHES), HOW, margin=0.05).low > 0.05
        naive += bound_peak(grid, np.arange(BATCHES), HOW, margin=0.05).low > 0.05
    assert honest <= limit(trials, 0.025)
    assert naive > limit(trials, 0.025)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("spread", [0.004, 0.04])
def test_flatness_is_seldom_seen_at_the_margin(noise: str, spread: float) -> None:
    random, trials = np.random.default_rng(3), 120
    draws = (profile(FLAT_AT_MARGIN + spread * NOISE[noise](random, BATCHES, BLOCKS)) for _ in range(trials))
    found = [flat(one, HOW).supported for one in draws]
    assert found.count(True) <= limit(trials, 0.025)
    assert found.count(False) <= limit(trials, 0.025)


@pytest.mark.parametrize("noise", NOISE)
def test_flatness_is_seen_and_so_is_its_absence(noise: str) -> None:
    random = np.random.default_rng(4)
    still = [profile(0.02 * BELL + 0.006 * NOISE[noise](random, BATCHES, BLOCKS)) for _ in range(100)]
    steep = [profile(0.3 * BELL + 0.006 * NOISE[noise](random, BATCHES, BLOCKS)) for _ in range(50)]
    assert [flat(one, HOW).supported for one in still].count(True) > 90
    assert [flat(one, HOW).supported for one in steep].count(False) > 45


def test_intervals_cover_what_they_are_about() -> None:
    """The truth is outside a side of the interval no more often than it may be, and p agrees with the interval."""
    random, trials, truth = np.random.default_rng(5), 200, np.array([0.1, 0.3, 0.5, 0.5, 0.4, 0.2])
    above = below = 0
    for _ in range(trials):
        values = truth + 0.05 * random.normal(size=(BATCHES, len(truth)))
        grid = values[:, 1:-1, None] - values[:, None, [0, -1]]
        for margin in (0.3, 0.2):
            found = bound_peak(grid, pool_numbers(BATCHES), HOW, margin=margin)
            assert (found.low > margin) == (found.p_above <= 0.05 + 1e-12)
            assert (found.high < margin) == (found.p_below <= 0.05 + 1e-12)
        above += found.low > 0.3
        below += found.high < 0.3
    assert above <= limit(trials, 0.025)
    assert below <= limit(trials, 0.025)


# False positives and power: kinds


def models_of(kind: str, heights: Iterable[float], random: np.random.Generator) -> list[Profile]:
    shapes = [height * BELL + 0.01 * random.normal(size=(BATCHES, BLOCKS)) for height in heights]
    return [profile(values, model=f"{kind}{number}", kind=kind) for number, values in enumerate(shapes)]


HEIGHTS: dict[str, Callable[[np.random.Generator, float, int], np.ndarray]] = {
    "normal": lambda random, centre, n: centre + 0.03 * random.normal(size=n),
    "heavy tails": lambda random, centre, n: centre + 0.03 * random.standard_t(3, size=n),
    "uniform": lambda random, centre, n: centre + random.uniform(-0.05, 0.05, size=n),
}


@pytest.mark.parametrize("spread", HEIGHTS)
@pytest.mark.parametrize(("encoders", "decoders"), [(3, 3), (3, 8)])
def test_kinds_that_are_the_same_seldom_differ_and_margins_are_kept(spread: str, encoders: int, decoders: int) -> None:
    random, trials = np.random.default_rng(6), 120
    held = dict.fromkeys(("decoders are bells", "encoders are flat", "encoders and decoders differ"), 0)
    for _ in range(trials):
        # The decoders are, on average, bells of the height that no longer counts; the encoders are the same.
        both = [
            *models_of("encoder", HEIGHTS[spread](random, 0.05, encoders), random),
            *models_of("decoder", HEIGHTS[spread](random, 0.05, decoders), random),
        ]
        for _, found in judge_kinds(both, HOW):
            held[found.claim] += found.supported is True
    assert held["decoders are bells"] <= limit(trials, 0.025)
    assert held["encoders and decoders differ"] <= limit(trials, 0.05)


def pairs_of_kinds(spread: str, many: int) -> list[list[list[float]]]:
    random = np.random.default_rng(23)
    return [[HEIGHTS[spread](random, 0.0, count).tolist() for count in (3, many)] for _ in range(1000)]


@pytest.mark.parametrize("spread", HEIGHTS)
@pytest.mark.parametrize("many", [3, 8, 30])
def test_kinds_of_unequal_number_seldom_differ(spread: str, many: int) -> None:
    found = [welch(*pair, level=0.95) for pair in pairs_of_kinds(spread, many)]
    assert sum(min(one.p_above, one.p_below) <= 0.05 for one in found) <= limit(1000, 0.05)


def test_welchs_own_degrees_of_freedom_would_be_too_many() -> None:
    own = [stats.ttest_ind(*pair, equal_var=False).pvalue for pair in pairs_of_kinds("uniform", 8)]
    assert sum(p <= 0.05 for p in own) > limit(1000, 0.05)


def test_encoders_at_the_margin_are_seldom_flat() -> None:
    random, trials = np.random.default_rng(7), 200
    found = [
        next(iter(judge_kinds(models_of("encoder", HEIGHTS["normal"](random, 0.1, 4), random), HOW)))[1].supported
        for _ in range(trials)
    ]
    assert found.count(True) <= limit(trials, 0.025)


def test_kinds_that_differ_are_seen() -> None:
    random = np.random.default_rng(8)
    held = []
    for _ in range(50):
        encoders = models_of("encoder", HEIGHTS["normal"](random, 0.0, 3) * 0.3, random)
        decoders = models_of("decoder", HEIGHTS["normal"](random, 0.5, 3), random)
        held += [found.supported for _, found in judge_kinds([*encoders, *decoders], HOW)]
    assert held.count(True) > 0.9 * len(held)


def test_the_height_of_noise_is_not_flattered() -> None:
    random = np.random.default_rng(9)
    noise = [pooled(random, BATCHES, BLOCKS) for _ in range(300)]
    _, found = next(iter(judge_kinds([profile(one, model=f"m{k}") for k, one in enumerate(noise)], HOW)))
    assert found.effect <= 0
    inside = slice(1, 6)
    assert np.mean([one.mean(0)[inside].max() - one.mean(0)[[0, -1]].max() for one in noise]) > 0.1
    assert held_out_peak([np.array([[0, 1, 2, 0]]), np.array([[0, 3, 1, 2]])], np.array([1, 2]), np.array([0, 3])) == 0


# False positives and power: trainings

MONOTONE = {
    "flat": np.zeros(8),
    "rising": np.linspace(0, 0.3, 8),
    "slowly falling": np.linspace(0.02, 0, 8),
    "a jump, then flat": np.array([-1.0, *[0.0] * 7]),
    "flat, then falling": np.array([0.0] * 5 + [-0.1, -0.3, -1.0]),
    "a valley": np.abs(np.linspace(-0.2, 0.2, 8)),
}


@pytest.mark.parametrize("shape", MONOTONE)
def test_monotone_series_seldom_rise_and_fall(shape: str) -> None:
    random, trials = np.random.default_rng(10), 100
    for noise in ("normal", "pools"):
        # A batch that is high at one step is high at all: what pairs share must not count.
        draws = [
            MONOTONE[shape] + 0.02 * NOISE[noise](random, BATCHES, 8) + random.normal(size=(BATCHES, 1))
            for _ in range(trials)
        ]
        wrong = sum(bound_rise_and_fall(values, pool_numbers(BATCHES), HOW).p <= 0.05 for values in draws)
        assert wrong <= limit(trials, 0.05), noise


@pytest.mark.parametrize("noise", ["heavy tails", "skewed", "correlated over blocks", "pools over neighbours"])
def test_monotone_series_seldom_rise_and_fall_whatever_the_noise(noise: str) -> None:
    random, trials = np.random.default_rng(11), 150
    draws = [MONOTONE["a jump, then flat"] + 0.02 * NOISE[noise](random, BATCHES, 8) for _ in range(trials)]
    assert sum(bound_rise_and_fall(values, pool_numbers(BATCHES), HOW).p <= 0.05 for values in draws) <= limit(
        trials, 0.05
    )


def test_pools_would_fool_a_test_of_series_that_did_not_allow_for_them() -> None:
    random, trials = np.random.default_rng(12), 100
    draws = [MONOTONE["a jump, then flat"] + 0.02 * pooled(random, BATCHES, 8) for _ in range(trials)]
    naive = sum(bound_rise_and_fall(values, np.arange(BATCHES), HOW).p <= 0.05 for values in draws)
    assert naive > limit(trials, 0.05)


def test_series_that_rise_and_fall_are_seen_and_so_is_their_peak() -> None:
    random, trials = np.random.default_rng(13), 100
    shape = np.array([0.0, 0.2, 0.5, 0.6, 0.5, 0.4, 0.3, 0.25])
    found = [
        bound_rise_and_fall(
            shape + 0.05 * random.normal(size=(BATCHES, 8)) + random.normal(size=(BATCHES, 1)),
            pool_numbers(BATCHES),
            HOW,
        )
        for _ in range(trials)
    ]
    assert sum(one.p <= 0.05 for one in found) > 90
    assert sum(one.place_interval[0] <= 3 <= one.place_interval[1] for one in found) > 90
    assert sum(one.interval[0] <= 0.35 <= one.interval[1] for one in found) > 90


def trainings_of(series: np.ndarray, metric: str = "twonn", *, spread: float = 0.0, seed: int = 0) -> list[Profile]:
    """One profile for each seed (row) and step, of five equal blocks."""
    random = np.random.default_rng(seed)
    return [
        profile(
            level + spread * random.normal(size=(BATCHES, 1)) + np.zeros(5),
            model=f"m-seed{row}",
            place=(metric, "all", "pydoc"),
            step=1000 * column,
        )
        for row, one in enumerate(series)
        for column, level in enumerate(one)
    ]


@pytest.mark.parametrize("shape", ["flat", "rising", "a jump, then flat", "flat, then falling"])
def test_seeds_that_are_rough_but_monotone_seldom_rise_and_fall(shape: str) -> None:
    random, trials = np.random.default_rng(14), 150
    held = []
    for _ in range(trials):
        series = 10 * MONOTONE[shape] + random.normal(size=(3, 8))
        held += [found.supported for _, found in judge_trainings(trainings_of(series), HOW)]
    # Each training is judged from step 0 and from step 1,000.
    assert len(held) == 2 * trials
    assert held[::2].count(True) <= limit(trials, 0.025)
    assert held[1::2].count(True) <= limit(trials, 0.025)


def test_seeds_that_agree_by_chance_are_allowed_for_and_would_fool_a_plain_test() -> None:
    random, trials, shape = np.random.default_rng(21), 200, np.array([-9.0, *[0.0] * 11])
    honest = plain = 0
    for _ in range(trials):
        series = shape + random.normal(size=(9, 12))
        others = np.stack([np.delete(series, seed, axis=0).mean(0) for seed in range(9)])
        effects = rise_and_fall_elsewhere(series, others)
        honest += student(effects, margin=0.0, level=0.95, overlap=1 / 8).p_above <= 0.05
        plain += student(effects, margin=0.0, level=0.95).p_above <= 0.05
    _, judged = next(iter(judge_trainings(trainings_of(series), HOW)))
    assert judged.interval == pytest.approx(student(effects, margin=0.0, level=0.95, overlap=1 / 8).interval)
    assert honest <= limit(trials, 0.025)
    assert plain > limit(trials, 0.025)


def test_seeds_that_rise_and_fall_are_seen() -> None:
    random = np.random.default_rng(15)
    held = [
        next(iter(judge_trainings(trainings_of(10 * SERIES + random.normal(size=(3, 8))), HOW)))[1].supported
        for _ in range(50)
    ]
    assert held.count(True) > 45


GROWTH = {
    "as much as no longer counts": (0.05 * np.array([0, 1, 1, 1, 1, 1, 1, 1]), 0.003),
    # The last third rises by a quarter of the growth, which is no longer settled.
    "to the end": (np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.675, 0.9, 0.9]) * 0.5, 0.004),
    "not at all": (np.zeros(8), 0.02),
}


@pytest.mark.parametrize("case", GROWTH)
def test_what_does_not_grow_and_stabilise_seldom_seems_to(case: str) -> None:
    random, trials = np.random.default_rng(16), 200
    shape, spread = GROWTH[case]
    run, seeds = 0, 0
    for trial in range(trials):
        noise = spread * random.normal(size=(3, 8))
        three = trainings_of(shape + noise, "leading_variance")
        seeds += next(iter(judge_trainings(three, HOW)))[1].supported is True
        one = trainings_of(shape[None, :], "leading_variance", spread=4 * spread, seed=trial)
        run += next(iter(judge_trainings(one, HOW)))[1].p <= 0.05
    assert seeds <= limit(trials, 0.025)
    assert run <= limit(trials, 0.025)


def test_what_grows_and_stabilises_is_seen() -> None:
    random, trials = np.random.default_rng(17), 50
    shape = np.array([0.0, 0.3, 0.45, 0.5, 0.5, 0.5, 0.5, 0.5])
    run, seeds = 0, 0
    for trial in range(trials):
        three = trainings_of(shape + 0.01 * random.normal(size=(3, 8)), "leading_variance")
        seeds += next(iter(judge_trainings(three, HOW)))[1].supported is True
        one = trainings_of(shape[None, :], "leading_variance", spread=0.02, seed=trial)
        run += next(iter(judge_trainings(one, HOW)))[1].p <= 0.05
    assert min(run, seeds) > 45


def test_many_claims_at_once_seldom_give_one_wrong() -> None:
    random, trials = np.random.default_rng(18), 80
    wrong = 0
    for _ in range(trials):
        shapes = [BELL_AT_MARGIN + 0.02 * random.normal(size=(BATCHES, BLOCKS)) for _ in range(4)]
        found = judge(table(*(rows(one, model=f"m{k}") for k, one in enumerate(shapes))), resamples=400)
        wrong += any(one.holds for one in found)
    assert wrong <= limit(trials, 0.05)


# The arithmetic


def test_pools_are_runs_of_consecutive_batches() -> None:
    assert pool_numbers(16).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert pool_numbers(7).tolist() == [0] * 7
    assert pool_numbers(10).tolist() == [0] * 5 + [1] * 5
    assert pool_numbers(14).tolist() == [0] * 4 + [1] * 5 + [2] * 5


def test_the_design_effect_by_hand() -> None:
    values = np.repeat([0.0, 1.0, 2.0], 4)[:, None]
    # Between pools: 4 (1 + 0 + 1) / 2 = 4. Over all: 8 / 11.
    assert design_effect(values - values.mean(), pool_numbers(12)) == pytest.approx([5.5])
    assert design_effect(np.tile([1.0, -1.0], 6)[:, None], pool_numbers(12)).tolist() == [1.0]
    assert design_effect(values[:8] - values[:8].mean(), pool_numbers(8)).tolist() == [1.0]


def test_a_plain_contrast_gets_at_least_students_interval() -> None:
    values = np.random.default_rng(19).normal(1.0, 1.0, size=(40, 1, 1))
    found = bound_peak(values, np.arange(40), Resampling(), margin=0.0)
    plain = student(values.ravel(), margin=0.0, level=0.95)
    assert plain.interval == pytest.approx(stats.ttest_1samp(values.ravel(), 0).confidence_interval())
    assert found.effect == plain.effect
    assert found.low <= plain.low + 1e-12
    assert found.high >= plain.high - 1e-12
    assert found.high - found.low < 1.3 * (plain.high - plain.low)


def test_skewed_batches_widen_the_side_of_their_long_tail() -> None:
    values = np.random.default_rng(22).lognormal(sigma=1.2, size=(40, 1, 1))
    found = bound_peak(values, np.arange(40), Resampling(), margin=0.0)
    plain = student(values.ravel(), margin=0.0, level=0.95)
    assert found.high - found.effect > 1.2 * (plain.high - plain.effect)
    assert found.effect - found.low == pytest.approx(plain.effect - plain.low)


def test_students_p_and_welchs_error_are_scipys() -> None:
    one, two = [0.3, 0.5, 0.9, 0.4], [0.1, 0.12, 0.15]
    found = student(one, margin=0.05, level=0.95)
    assert found.p_above == pytest.approx(stats.ttest_1samp(one, 0.05).pvalue)
    assert found.p_below == 1.0
    apart, wanted = welch(one, two, level=0.9), stats.ttest_ind(one, two, equal_var=False)
    assert apart.p_above == pytest.approx(2 * stats.t.sf(wanted.statistic, 2))
    assert apart.p_below == 1.0
    reach = apart.effect / wanted.statistic * stats.t.isf(0.05, 2)
    assert apart.interval == pytest.approx((apart.effect - reach, apart.effect + reach))
    assert wanted.pvalue < apart.p_above
    assert all(math.isnan(end) for end in student([1.0], margin=0.0, level=0.95).interval)
    assert student([1.0, 1.0, 1.0], margin=0.0, level=0.95).p_above == 0.0
    wide, narrow = (student(one, margin=0.0, level=0.95, overlap=extra) for extra in (1 / 3, 0.0))
    assert wide.high - wide.effect == pytest.approx((narrow.high - narrow.effect) * math.sqrt((1 / 4 + 1 / 3) * 4))
    assert student([0.0, 0.0, 0.0], margin=0.0, level=0.95).p_above == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])
    assert holm([0.02, math.nan]) == pytest.approx([0.02, math.nan], nan_ok=True)
    assert holm([0.9, 0.9, 0.001]) == pytest.approx([1.0, 1.0, 0.003])
    assert holm([]) == []


def test_rising_fits_of_prefixes_are_scipys() -> None:
    series = np.random.default_rng(20).normal(size=(20, 9)).round(1)
    errors, firsts, lasts = rising_prefixes(series)
    for row, one in enumerate(series):
        for length in range(1, 10):
            fit = isotonic_regression(one[:length]).x
            wanted = (((fit - one[:length]) ** 2).sum(), fit[0], fit[-1])
            assert (errors[row, length - 1], firsts[row, length - 1], lasts[row, length - 1]) == pytest.approx(wanted)


def test_the_unimodal_fit_is_the_best_of_all_splits() -> None:
    for seed in range(20):
        series = np.random.default_rng(seed).normal(size=7)
        fits = [
            np.concatenate([isotonic_regression(series[:k]).x, isotonic_regression(series[k:], increasing=False).x])
            if 0 < k < 7
            else isotonic_regression(series, increasing=k == 7).x
            for k in range(8)
        ]
        best = min(fits, key=lambda fit: ((fit - series) ** 2).sum())
        found = bound_rise_and_fall(np.tile(series, (8, 1)), pool_numbers(8), HOW)
        assert found.place in np.flatnonzero(np.isclose(best, best.max()))
        assert found.effect == pytest.approx(best.max() - max(best[0], best[-1]))
        assert (found.rise, found.fall) == pytest.approx((best.max() - best[0], best.max() - best[-1]))


def test_levels_are_named_by_other_series() -> None:
    others = np.array([[0.0, 0.0, 3.0, 3.0, 1.0]] * 2)
    series = np.array([[1.0, 3.0, 6.0, 8.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    assert rise_and_fall_elsewhere(series, others) == pytest.approx([7 - 4, 3.5 - 5])
    assert rise_and_fall_elsewhere(np.array([[1.0, 2.0, 3.0]]), np.array([[0.0, 1.0, 2.0]])) == 0.0
    early = np.array([[30.0, 12.0, 20.0, 20.0, 14.0]])
    assert rise_and_fall_elsewhere(early, early, last_start=2, least_fall=1.0) == pytest.approx(6)
    assert rise_and_fall_elsewhere(early, early) == 0.0


# What is judged, and what is said


def test_an_empty_table_and_strange_metrics_give_no_verdict() -> None:
    assert judge(table()) == []
    assert judge(table(rows(noisy(BELL), metric="isoscore"))) == []
    assert {one.claim for one in judge(table(rows(noisy(BELL), metric="twonn", step=3)), resamples=50)} == set()


def test_a_bell_is_called_one_with_its_numbers() -> None:
    found = find(judge(table(rows(noisy(0.3 * BELL)))), claim="bell")
    assert found.holds is True
    assert (found.subject, found.metric, found.population, found.corpus, found.variant) == (
        "m",
        "leading_variance",
        "all",
        "pydoc",
        None,
    )
    assert found.effect == pytest.approx(0.29, abs=0.02)
    assert 0.05 < found.interval[0] < found.effect < found.interval[1]
    assert found.p <= found.p_adjusted <= 0.05
    assert found.replicates == BATCHES
    assert found.details["peak_depth"] in (0.5, 0.625)
    assert f"{found.effect:.3g} above the higher end (16 batches; 95 % interval" in found.text
    assert found.text.endswith("“bell” holds for these weights on this text.")
    assert find(judge(table(rows(noisy(0.3 * BELL)))), claim="flat").holds is False


def test_a_flat_profile_is_flat_and_no_bell() -> None:
    verdicts = judge(table(rows(noisy(np.full(BLOCKS, 0.2)))))
    assert find(verdicts, claim="flat").holds is True
    assert find(verdicts, claim="flat").interval[0] == 0.0
    assert find(verdicts, claim="bell").holds is False


def test_a_peak_near_the_end_is_no_bell_however_high_the_middle() -> None:
    shape = np.array([0.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.6, 0.0])
    found = find(judge(table(rows(noisy(shape)))), claim="bell")
    assert found.effect > 0.25
    assert found.holds is False
    assert found.p == 1.0
    assert found.details["peak_depth"] == 7 / 8
    # Where the outer block is no higher than noise, nothing is refuted.
    level = np.array([0.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.0])
    assert find(judge(table(rows(noisy(level, 0.03, seed=3)))), claim="bell").holds is not False


def test_a_bell_of_a_few_tokens_is_called_what_it_is() -> None:
    both = table(rows(noisy(0.9 * BELL)), rows(noisy(np.full(BLOCKS, 0.1)), population="typical"))
    verdicts = judge(both)
    everyone, typical = (find(verdicts, claim="bell", population=name) for name in ("all", "typical"))
    assert everyone.holds is True
    assert typical.holds is False
    assert (
        f"the bell is made by a few tokens (sink tokens): in `typical` the peak reads {typical.effect:.3g}."
        in everyone.text
    )
    honest = judge(table(rows(noisy(0.9 * BELL)), rows(noisy(0.8 * BELL), population="typical")))
    assert not any("sink" in one.text for one in honest)


def test_each_stack_of_an_encoder_decoder_is_judged_and_neither_counts_as_a_kind() -> None:
    parts = [rows(noisy(BELL), kind="encoder-decoder", stack=stack) for stack in ("encoder", "decoder")]
    verdicts = judge(table(*parts))
    assert sorted((one.claim, one.variant) for one in verdicts) == [
        ("bell", "decoder"),
        ("bell", "encoder"),
        ("flat", "decoder"),
        ("flat", "encoder"),
    ]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (noisy(BELL, batches=7), "an interval needs 8 batches"),
        (noisy(BELL, batches=9), "with 2 pools (of 3 needed) the interval covers sampling inside pools only"),
        (noisy(BELL[:4]), "it has 4 blocks, and a shape needs 5"),
        (np.full((16, 8), math.nan), "no batch has a value at every block"),
    ],
)
def test_too_little_is_inconclusive(values: np.ndarray, says: str) -> None:
    for claim in ("bell", "flat"):
        found = find(judge(table(rows(values))), claim=claim)
        assert found.holds is None
        assert says in found.text
        if len(values) != 9:
            assert math.isnan(found.interval[0])
            assert math.isnan(found.p)
            assert math.isnan(found.p_adjusted)


def test_a_profile_without_its_ends_has_no_shape() -> None:
    inner = [row for row in rows(noisy(BELL)) if row["site"] != "block.7"]
    assert "the first and the last block were not both measured" in find(judge(table(inner)), claim="bell").text
    outer = [row for row in rows(noisy(BELL)) if row["site"] != "block.0"]
    assert find(judge(table(outer)), claim="bell").holds is None


def test_batches_without_a_number_are_left_out_with_their_pool_kept() -> None:
    values = noisy(0.3 * BELL)
    values[5, 3] = math.nan
    found = find(judge(table(rows(values))), claim="bell")
    assert found.replicates == BATCHES - 1
    assert found.holds is True
    assert finite(values)[1].tolist() == [0] * 4 + [1] * 3 + [2] * 4 + [3] * 4
    kept = find(judge(table(rows(np.delete(values, 5, axis=0)))), claim="bell")
    assert found.effect == pytest.approx(kept.effect)


def test_two_live_trainings_of_one_model_are_two() -> None:
    runs = [rows(noisy(BELL), run=run, step=step, key=f"{run}-{step}") for run in ("a", "b") for step in (0, 8)]
    verdicts = [one for one in judge(table(*runs)) if one.claim == "bell"]
    assert {one.subject for one in verdicts} == {"a", "b"}


def test_the_last_checkpoint_is_judged() -> None:
    early, late = rows(noisy(0.5 * BELL), step=9), rows(noisy(0.0 * BELL), step=10)
    for parts in ([early, late], [late, early]):
        assert find(judge(table(*parts)), claim="flat").holds is True
    staged = [rows(noisy(0.5 * BELL), step=9, stage="stage1"), rows(noisy(0.0 * BELL), step=1, stage="stage2")]
    assert find(judge(table(*staged)), claim="flat").holds is True


def test_suspect_checkpoints_are_left_out_and_counted() -> None:
    good = rows(noisy(0.5 * BELL), step=1)
    bad = rows(noisy(0.0 * BELL), step=2, suspect="the same files as step 1")
    verdicts = judge(table(good, bad))
    assert find(verdicts, claim="bell").holds is True
    assert all("1 suspect checkpoint left out" in one.text for one in verdicts)
    assert not any("suspect" in one.text for one in judge(table(good)))


def test_a_checkpoint_measured_twice_counts_once_with_its_most_batches() -> None:
    few = rows(noisy(0.5 * BELL, batches=12), key="z")
    many = rows(noisy(0.5 * BELL, batches=20), key="a")
    assert find(judge(table(few, many)), claim="bell").replicates == 20


def kinds_table(encoders: int, decoders: int, **rest: Any) -> pa.Table:
    flats = [rows(noisy(0.02 * BELL, seed=k), model=f"e{k}", kind="encoder", **rest) for k in range(encoders)]
    bells = [rows(noisy((0.4 + 0.02 * k) * BELL, seed=k), model=f"d{k}", **rest) for k in range(decoders)]
    return table(*flats, *bells)


KIND_CLAIMS = ("decoders are bells", "encoders are flat", "encoders and decoders differ")


def test_three_of_each_kind_are_enough() -> None:
    verdicts = judge(kinds_table(3, 3))
    assert [find(verdicts, claim=claim).holds for claim in KIND_CLAIMS] == [True] * 3
    differ = find(verdicts, claim="encoders and decoders differ")
    assert differ.subject == "encoders and decoders"
    assert differ.replicates == 6
    assert differ.interval[0] > 0.3


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_models_are_inconclusive_about_a_kind(count: int) -> None:
    verdicts = judge(kinds_table(count, count))
    for claim in KIND_CLAIMS:
        found = find(verdicts, claim=claim)
        assert found.holds is None
        assert f"a claim about a kind needs 3 models of it, and lacks {3 - count} " in found.text
        assert math.isnan(found.interval[0]) == (count == 1)
        assert not math.isnan(found.effect)


def test_seeds_and_checkpoints_of_a_model_are_not_more_models() -> None:
    seeds = [rows(noisy(0.5 * BELL, seed=k), model=f"d-seed{k}") for k in range(5)]
    steps = [rows(noisy(0.5 * BELL, seed=k), model="e", step=k) for k in range(5)]
    found = find(judge(table(*seeds, *steps)), claim="decoders are bells")
    assert found.replicates == 2
    assert found.holds is None
    names = ("a-seed1", "a-seed_22", "a-seed-3", "a-Seed4")
    assert {family_of(name) for name in names} == {"a-seed*"}
    assert family_of("seeded-1b") == "seeded-1b"


def test_corpora_are_judged_apart() -> None:
    both = pa.concat_tables([kinds_table(0, 2), kinds_table(0, 1, corpus="enwik8")])
    counts = {one.corpus: one.replicates for one in judge(both) if one.claim == "decoders are bells"}
    assert counts == {"pydoc": 2, "enwik8": 1}


STEPS = (0, 1, 512, 1000, 2000, 4000, 8000, 16000, 32000)
RISES_FALLS = (8.0, 8.0, 9.0, 12.0, 16.0, 15.0, 13.0, 12.0, 11.0)


def training(series: Iterable[float], model: str = "m", seed: int = 0, **rest: Any) -> list[dict[str, Any]]:
    return [
        row
        for number, (step, level) in enumerate(zip(STEPS, series, strict=True))
        for row in rows(noisy(np.full(5, level), 0.05, seed=100 * seed + number), model=model, step=step, **rest)
    ]


def test_one_training_tells_its_effect_and_cannot_hold() -> None:
    verdicts = judge(table(training(RISES_FALLS, metric="twonn", population="types")))
    assert [one.variant for one in verdicts] == ["from=0", "from=1000"]
    whole, published = verdicts
    assert whole.claim == published.claim == "rises then falls"
    assert (whole.holds, published.holds) == (None, None)
    assert "a claim about training needs 3 seeds, and has 1" in whole.text
    assert whole.effect == pytest.approx(5, abs=0.1)
    assert published.effect == pytest.approx(4, abs=0.1)
    assert whole.interval[0] <= whole.effect <= whole.interval[1]
    assert whole.p < 0.05
    assert whole.details["peak_step"] == 2000
    assert whole.details["peak_step_low"] <= 2000 <= whole.details["peak_step_high"]
    assert "to step 2000" in whole.text


def test_three_seeds_of_a_training_can_hold() -> None:
    up_and_down = [training(RISES_FALLS, f"p-seed{k}", k, metric="twonn") for k in range(3)]
    grown = (0.1, 0.1, 0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6)
    grows = [training(grown, f"p-seed{k}", k) for k in range(3)]
    verdicts = judge(table(*up_and_down, *grows))
    trainings = [one for one in verdicts if one.claim in ("rises then falls", "grows then stabilises")]
    assert {(one.subject, one.replicates) for one in trainings} == {("p-seed*", 3)}
    assert [one.variant for one in trainings] == [None, "from=0", "from=1000"]
    assert [one.holds for one in trainings] == [True, True, True]
    two = judge(table(*up_and_down[:2]))
    assert [(one.subject, one.holds) for one in two] == [(f"p-seed{k}", None) for k in (0, 1)] * 2
    assert "needs 3 seeds, and has 2" in two[0].text


def test_three_seeds_that_only_rise_do_not_rise_and_fall() -> None:
    verdicts = judge(table(*(training(range(9), f"p-seed{k}", k, metric="twonn") for k in range(3))))
    # Not inconclusive: what surely neither rises nor falls by 5 % of its height speaks against the claim.
    held = [one.holds for one in verdicts if one.claim == "rises then falls"]
    assert held == [False, False]


def test_growth_that_goes_on_is_not_stable() -> None:
    growing = [training(0.1 + 0.8 * np.array(STEPS) / STEPS[-1], f"p-seed{k}", k) for k in range(3)]
    assert find(judge(table(*growing)), claim="grows then stabilises").holds is False


def test_series_need_five_checkpoints_of_known_step_measured_alike() -> None:
    short = [row for row in training(RISES_FALLS, metric="twonn") if row["step"] <= 1000]
    found = find(judge(table(short)), claim="rises then falls")
    assert (found.variant, found.holds) == ("from=0", None)
    assert "it has 4 checkpoints of known step, and 5 are needed" in found.text
    odd = rows(noisy(np.full(5, 9.0), batches=12), step=64000, metric="twonn")
    found = judge(table(training(RISES_FALLS, metric="twonn"), odd))[0]
    assert "1 checkpoint with other batches or blocks left out" in found.text
    late = [row for row in training(RISES_FALLS, metric="twonn") if row["step"] >= 1000]
    assert [one.variant for one in judge(table(late))] == ["from=1000"]


def test_verdicts_depend_on_the_seed_and_on_nothing_else() -> None:
    whole = kinds_table(2, 2)
    first = judge(whole, seed=3)
    shuffled = whole.take(pa.array(np.random.default_rng(0).permutation(whole.num_rows)))
    assert repr(judge(whole, seed=3)) == repr(first)
    assert repr(judge(shuffled, seed=3)) == repr(first)
    assert repr(judge(whole, seed=4)) != repr(first)


def test_what_is_found_of_a_model_does_not_depend_on_its_company() -> None:
    alone = find(judge(table(rows(noisy(0.3 * BELL)))), claim="bell")
    among = find(judge(table(rows(noisy(0.3 * BELL)), rows(noisy(BELL, seed=5), model="n"))), claim="bell", subject="m")
    assert (alone.effect, alone.interval, alone.p) == (among.effect, among.interval, among.p)
    assert among.p_adjusted > alone.p_adjusted


def test_a_claim_that_is_lost_to_multiplicity_says_so() -> None:
    shape = noisy(0.075 * BELL, 0.005)
    alone = find(judge(table(rows(shape))), claim="bell")
    assert alone.holds is True
    vague = [rows(noisy(0.09 * BELL, 0.05, seed=k), model=f"n{k}") for k in range(30)]
    among = find(judge(table(rows(shape), *vague), resamples=400), claim="bell", subject="m")
    assert among.holds is None
    assert among.interval[0] > 0.05
    assert "the evidence for it may be chance" in among.text


def test_a_stricter_level_widens_intervals() -> None:
    usual, strict = (find(judge(table(rows(noisy(BELL))), level=level), claim="bell") for level in (0.95, 0.99))
    assert strict.interval[0] < usual.interval[0] < usual.interval[1] < strict.interval[1]
    assert "99 % interval" in strict.text


def test_batches_that_are_all_equal_are_certain() -> None:
    found = find(judge(table(rows(np.tile(0.3 * BELL, (BATCHES, 1))))), claim="bell")
    assert found.holds is True
    assert found.interval == pytest.approx((found.effect, found.effect))


def test_verdicts_are_json_without_nan() -> None:
    verdicts = judge(kinds_table(1, 1))
    plain = [one.as_json() for one in verdicts]
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    differ = next(one for one in plain if one["claim"] == "encoders and decoders differ")
    assert differ["interval"] == [None, None]
    assert differ["p"] is None
    assert differ["details"] == {"encoders": 1.0, "decoders": 1.0}


def test_claims_load_no_torch() -> None:
    code = "import sys, anisoscope.claims; assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_run_with_two_pools_is_fitted_but_not_resampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an interval that covers sampling inside pools only was bootstrapped")

    monkeypatch.setattr("anisoscope.claims.trainings.bound_rise_and_fall", refuse)
    found = [
        row
        for number, (step, level) in enumerate(zip(STEPS, RISES_FALLS, strict=True))
        for row in rows(
            noisy(np.full(5, level), 0.05, batches=8, seed=number),
            model="m",
            step=step,
            metric="twonn",
            population="types",
        )
    ]
    whole, _ = judge(table(found))
    assert whole.holds is None
    assert math.isnan(whole.p)
    assert math.isnan(whole.interval[0])
    assert "to step 2000 and then falls" in whole.text
    assert "with 2 pools (of 3 needed)" in whole.text
    assert whole.details["rise"] > whole.effect == whole.details["fall"] == pytest.approx(5, abs=0.2)


def test_the_start_of_a_fit_is_the_best_of_all_starts() -> None:
    def residuals(part: np.ndarray, *, increasing: bool) -> float:
        return float(((isotonic_regression(part, increasing=increasing).x - part) ** 2).sum()) if len(part) else 0.0

    random = np.random.default_rng(5)
    normal = random.normal(size=(30, 10))
    series = np.concatenate([normal[:15], random.integers(0, 3, size=(15, 10)), normal[15:].cumsum(1)])
    fits = fit_after_fall(series, 6, 0.0)
    for row, one in enumerate(series):
        errors = [
            residuals(one[:start], increasing=False)
            + min(
                residuals(one[start:peak], increasing=True) + residuals(one[peak:], increasing=False)
                for peak in range(start, len(one) + 1)
            )
            for start in range(7)
        ]
        start = int(fits.start[row])
        assert errors[start] == pytest.approx(min(errors), abs=1e-12)
        before = residuals(one[:start], increasing=False)
        assert fits.error[row] == pytest.approx(errors[start] - before, abs=1e-12)
