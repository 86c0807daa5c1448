"""Claims about a training: spacing of checkpoints, common steps of seeds, early minima, settings that differ."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anisoscope.claims import Verdict, judge
from anisoscope.claims.correlations import correlate_table
from anisoscope.claims.trainings import gap_in, growth_of, step_mean
from anisoscope.columns import TABLE_SCHEMA

LINEAR = np.linspace(0, 20_000, 21).astype(int)
LOG = np.unique(np.concatenate([[0], np.geomspace(1, 20_000, 24).round()])).astype(int)[-21:]
LOG[0] = 0
GRIDS = {"evenly spaced": LINEAR, "log-spaced": LOG}

Curve = Callable[[np.ndarray], np.ndarray]


def rows(steps: Sequence[int], levels: Iterable[float], model: str, **changes: Any) -> list[dict[str, Any]]:
    """A training of five equal blocks and eight batches, one level at each step."""
    found = []
    for step, level in zip(steps, levels, strict=True):
        for block in range(5):
            found.append(
                {
                    "key": f"{model}-{step}",
                    "model": model,
                    "kind": "decoder",
                    "corpus": "text",
                    "population": "all",
                    "metric": "leading_variance",
                    "metric_version": 1,
                    "step": int(step),
                    "revision": f"step{step}",
                    "site": f"block.{block}",
                    "depth": (block + 1) / 5,
                    "value": float(level),
                    "values": [float(level)] * 8,
                    **changes,
                }
            )
    return found


def table(*parts: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([row for part in parts for row in part], schema=TABLE_SCHEMA)


def seeds(curve: Curve, steps: np.ndarray, spread: float, **changes: Any) -> pa.Table:
    random = np.random.default_rng(3)
    levels = [curve(steps / 20_000) + spread * random.normal(size=len(steps)) for _ in range(3)]
    return table(*(rows(steps.tolist(), one, f"m-seed{k}", **changes) for k, one in enumerate(levels)))


def verdict(found: pa.Table, claim: str, **wanted: Any) -> Verdict:
    (one,) = (
        one
        for one in judge(found, resamples=200)
        if one.claim == claim and all(getattr(one, name) == value for name, value in wanted.items())
    )
    return one


SATURATING: Curve = lambda share: 0.1 + 0.4 * (1 - np.exp(-8 * share))  # noqa: E731
GOES_ON: Curve = lambda share: 0.1 + 0.4 * share  # noqa: E731


@pytest.mark.parametrize("grid", GRIDS)
def test_the_spacing_of_checkpoints_does_not_decide_growth(grid: str) -> None:
    """By the number of checkpoints one saturating curve held on even steps and did not on log-spaced ones."""
    steps = GRIDS[grid]
    assert len(steps) == 21
    assert verdict(seeds(SATURATING, steps, 0.003), "grows then stabilises").holds is True
    assert verdict(seeds(GOES_ON, steps, 0.003), "grows then stabilises").holds is False


@pytest.mark.parametrize("grid", GRIDS)
def test_the_spacing_of_checkpoints_does_not_decide_rise_and_fall(grid: str) -> None:
    given = {"metric": "twonn", "population": "types"}
    hump: Curve = lambda share: np.interp(share, [0, 0.4, 1], [8.0, 16.0, 10.0])  # noqa: E731
    for curve, holds in ((hump, True), (lambda share: 8 + 8 * (1 - np.exp(-8 * share)), False)):
        found = verdict(seeds(curve, GRIDS[grid], 0.05, **given), "rises then falls", variant="from=0")
        assert found.holds is holds


def test_growth_and_late_change_are_those_of_the_curve() -> None:
    numbers = [growth_of(SATURATING(steps / 20_000)[None, :], steps) for steps in (LINEAR, LOG)]
    assert numbers[0][0] == pytest.approx(numbers[1][0], abs=1e-3)
    assert numbers[0][1].min() == pytest.approx(numbers[1][1].min(), abs=2e-3)


def test_means_over_intervals_weigh_their_steps() -> None:
    """Numbers about intervals, of a rate that doubles at half of the training, on two grids."""

    def total(step: np.ndarray) -> np.ndarray:
        return np.where(step < 10_000, step, 2.0 * step - 10_000)

    means = []
    for steps in (LINEAR, LOG):
        rates = np.concatenate([[99.0], np.diff(total(steps)) / np.diff(steps)])
        means.append(step_mean(rates[None, :], steps)[0])
    assert means == pytest.approx([1.5, 1.5])


DROPPED = [0, 1, 2, 3, 5, 7, 9, 11, 13, 4096]


def of_live_seeds() -> pa.Table:
    """Three seeds of which a live budget dropped different steps: all that is left in common ends at 13."""
    late = (
        [64, 116, 210, 464, 840, 1522, 2756],
        [53, 141, 256, 565, 1024, 2261, 3360],
        [78, 172, 312, 620, 1248, 3000],
    )
    parts = []
    for seed, more in enumerate(late):
        steps = np.array(sorted({*DROPPED, *more}))
        parts.append(rows(steps.tolist(), 0.1 + 0.4 * steps / 4096 + 0.001 * seed, f"m-seed{seed}"))
    return table(*parts)


def test_seeds_without_common_late_steps_are_refused_with_the_reason() -> None:
    found = verdict(of_live_seeds(), "grows then stabilises")
    assert found.holds is None
    assert "no common checkpoint between steps 13 and 4096, more than half of the training" in found.reason
    assert "10 common steps: 0, 1, 2, 3, 5, 7, 9, 11, 13, 4096 (of 30 measured by any seed)" in found.text
    assert found.steps == tuple(DROPPED)
    assert np.isnan(found.p_adjusted)


def test_common_steps_are_printed_where_they_suffice() -> None:
    found = verdict(seeds(SATURATING, LINEAR, 0.003), "grows then stabilises")
    assert "21 common steps: 0, 1000, 2000, 3000" in found.text
    assert "measured by any seed" not in found.text
    assert found.steps == tuple(LINEAR.tolist())


@pytest.mark.parametrize(
    ("common", "says"),
    [
        ([0, 1, 2, 4, 8, 16], ""),
        ([0, 2, 4, 8, 16], ""),
        ([0, 1, 2, 16], "between steps 2 and 16, more than half"),
        ([0, 1, 2], "between steps 2 and 16, more than half"),
        ([8, 16], "none before step 8, where 4 of the 6 measured checkpoints lie"),
        ([0, 8, 16], "between steps 0 and 8, where 3 of the 6 measured checkpoints lie"),
    ],
)
def test_gaps(common: list[int], says: str) -> None:
    found = gap_in(common, [0, 1, 2, 4, 8, 16])
    assert says in found
    assert bool(found) is bool(says)


COLLAPSE: Curve = lambda share: np.interp(share, [0, 0.06, 0.5, 1], [30.0, 12.0, 20.0, 14.0])  # noqa: E731


@pytest.mark.parametrize("grid", GRIDS)
def test_a_rise_after_an_early_collapse_counts_and_the_text_says_so(grid: str) -> None:
    """From the first checkpoint on this could never hold: 300 of 300 said that it does not."""
    given = {"metric": "twonn", "population": "types"}
    whole = verdict(seeds(COLLAPSE, GRIDS[grid], 0.05, **given), "rises then falls", variant="from=0")
    assert whole.holds is True
    # Log-spaced checkpoints miss the peak itself.
    assert 4 < whole.effect < 7
    assert "after an early fall of " in whole.text
    assert 1000 <= whole.details["early_minimum_step"] <= 2000
    published = verdict(seeds(COLLAPSE, LINEAR, 0.05, **given), "rises then falls", variant="from=1000")
    assert "early" not in published.text


def test_one_run_with_an_early_collapse_gives_its_rise_too() -> None:
    random = np.random.default_rng(0)
    one = rows(LINEAR.tolist(), COLLAPSE(LINEAR / 20_000), "m", metric="twonn", population="types")
    one = [row | {"values": [row["value"] + 0.1 * random.normal() for _ in range(16)]} for row in one]
    whole = verdict(table(one), "rises then falls", variant="from=0")
    assert whole.holds is None
    assert "a claim about training needs 3 seeds, and has 1" in whole.reason
    assert whole.effect == pytest.approx(6, abs=0.5)
    assert whole.p < 0.05
    assert whole.details["early_minimum_step"] == 2000


# Settings that differ


def measured(level: float, key: str, **settings: Any) -> list[dict[str, Any]]:
    shape = level * np.sin(np.linspace(0, np.pi, 8))
    noise = 0.01 * np.random.default_rng(0).normal(size=(16, 8))
    given = rows([100] * 8, shape, "m", key=key, **{"seq_len": 512, **settings})[::5]
    return [
        row | {"site": f"block.{k}", "depth": (k + 1) / 8, "values": (shape[k] + noise[:, k]).tolist()} | settings
        for k, row in enumerate(given)
    ]


def test_of_two_settings_one_is_judged_and_the_verdict_names_it() -> None:
    """Which file is judged must not depend on its key."""
    for first, second in (("a", "b"), ("b", "a")):
        short = measured(0.3, first, seq_len=128)
        long = measured(0.0, second, seq_len=512, points=10)
        for parts in ((short, long), (long, short)):
            found = verdict(table(*parts), "bell")
            assert found.effect == pytest.approx(0.0, abs=0.02)
            assert (
                "1 result file of the same checkpoints under other settings left out (judged: seq_len 512)"
                in found.text
            )


def test_checkpoints_of_different_settings_are_not_one_series() -> None:
    steps = [0, 1000, 2000, 3000, 4000, 5000]
    mixed = [rows(steps, [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], f"m-seed{k}", seq_len=512) for k in range(3)] + [
        rows([0, 2500, 5000], [0.9, 0.9, 0.9], f"m-seed{k}", seq_len=64, key=f"{k}") for k in range(3)
    ]
    # One key cannot stand for three checkpoints.
    mixed = [[row | {"key": f"{row['model']}-{row['step']}-{row['seq_len']}"} for row in part] for part in mixed]
    found = verdict(table(*mixed), "grows then stabilises")
    assert found.steps == tuple(steps)
    assert found.effect == pytest.approx(0.3)
    assert "9 result files of the same checkpoints under other settings left out (judged: seq_len 512)" in found.text


def test_models_measured_under_different_settings_are_named() -> None:
    parts = [
        [row | {"model": f"m{k}", "key": f"m{k}"} for row in measured(0.3, f"m{k}", seq_len=512 if k else 128)]
        for k in range(3)
    ]
    found = verdict(table(*parts), "decoders are bells")
    assert "its models were measured under different settings: seq_len 128; seq_len 512" in found.text


def test_a_correlation_uses_one_setting_and_says_so() -> None:
    parts = [
        rows([step], [level * step], "m", site="final_norm", metric=metric, key=f"{step}-{length}", seq_len=length)[:1]
        for step in range(12)
        for length, level in ((512, 1.0), (64, -1.0))
        for metric in ("isoscore", "loss")
    ]
    found = correlate_table(table(*parts), "isoscore[final_norm]", resamples=20)
    assert {one.checkpoints for one in found} == {12}
    assert "12 result files" in found[0].note
