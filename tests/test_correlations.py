"""Correlations over checkpoints: known answers, and who passes by chance."""

import math
from pathlib import Path

import numpy as np
import pytest

from anisoscope.claims.correlations import KINDS, correlate, correlate_table, read_column
from anisoscope.errors import SpecError
from anisoscope.store import SCHEMA


def of(found: list[dict], kind: str, part: str) -> dict:
    return next(row for row in found if (row["kind"], row["of"]) == (kind, part))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ties", [False, True])
def test_values_are_those_of_scipy(kind: str, ties: bool) -> None:
    from scipy import stats

    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(2, 30))
    if ties:
        x, y = x.round(), y.round()
    reference = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}[kind]
    found = correlate(x, y, resamples=10)
    assert of(found, kind, "levels")["value"] == pytest.approx(reference(x, y).statistic, abs=1e-12)
    assert of(found, kind, "differences")["value"] == pytest.approx(
        reference(np.diff(x), np.diff(y)).statistic, abs=1e-12
    )


def test_what_moves_together_is_found_and_constant_series_have_no_number() -> None:
    chance = np.random.default_rng(1)
    x = chance.normal(size=21).cumsum()
    found = correlate(x, -2 * x + 0.1 * chance.normal(size=21), resamples=500)
    for kind in KINDS:
        row = of(found, kind, "differences")
        assert row["value"] < -0.7
        assert row["p"] < 0.01
        assert row["interval"][1] < 0
        assert math.isnan(of(found, kind, "levels")["p"])
    assert math.isnan(of(correlate(x, np.ones(21), resamples=10), "pearson", "levels")["value"])


def test_few_checkpoints_have_a_value_and_no_interval() -> None:
    row = of(correlate(np.arange(5.0), np.arange(5.0) ** 2), "spearman", "levels")
    assert row["value"] == pytest.approx(1.0)
    assert math.isnan(row["interval"][0])


def test_drifting_series_pass_by_their_levels_and_not_by_their_differences() -> None:
    from scipy import stats

    chance = np.random.default_rng(2)
    trials, passed, naive = 200, 0, 0
    for trial in range(trials):
        x, y = chance.normal(size=(2, 21)).cumsum(1)
        # 39 permutations meet the level of 5 % exactly: two of the forty orders.
        passed += of(correlate(x, y, seed=trial, resamples=39), "pearson", "differences")["p"] <= 0.05
        naive += stats.pearsonr(x, y).pvalue <= 0.05
    # One-sided 99.9 % limit of a binomial with 200 trials of 5 %: 21. The usual test of the levels passes half of them.
    assert passed <= 21
    assert naive > 60


def table_of(rows: list[dict]) -> "object":
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=SCHEMA)


def row(step: int | None, metric: str, value: float, **others: object) -> dict:
    site = {"loss": "output"}.get(metric, "final_norm")
    told = {"key": f"k{step}", "model": "m", "corpus": "c", "stage": None, "revision": f"step{step}", "suspect": None}
    return {**told, "step": step, "site": site, "population": "all", "metric": metric, "value": value, **others}


def test_a_measure_is_paired_with_the_loss_of_its_own_checkpoint() -> None:
    rows = [row(step, "isoscore", float(step % 5)) for step in range(12)]
    rows += [row(step, "loss", -float(step % 5)) for step in range(12)]
    rows += [row(99, "isoscore", 7.0, suspect="wrong"), row(None, "isoscore", 9.0)]
    found = correlate_table(table_of(rows[::-1]), "isoscore[final_norm]", resamples=50)
    assert {one.checkpoints for one in found} == {12}
    assert all(one.value == pytest.approx(-1.0) for one in found)
    own = {("m", step): float(step % 5) for step in range(12)}
    found = correlate_table(table_of(rows), "isoscore[final_norm]", against=own, named="accuracy", resamples=50)
    assert all(one.value == pytest.approx(1.0) for one in found)
    assert found[0].as_json()["p"] is None
    with pytest.raises(SpecError, match="no checkpoint has both"):
        correlate_table(table_of(rows), "twonn[final_norm]")


def test_a_column_of_ones_own_is_read_from_csv(tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    file.write_text("model,step,lambada\nm,0,0.1\nm,1000,0.5\n")
    assert read_column(file) == {("m", 0): 0.1, ("m", 1000): 0.5}
    file.write_text("model,step,a,b\nm,0,0.1,0.2\n")
    assert read_column(file, "b") == {("m", 0): 0.2}
    with pytest.raises(SpecError, match="name one of its columns: a, b"):
        read_column(file)
    file.write_text("step,a\n0,1\n")
    with pytest.raises(SpecError, match="wants the columns model, step"):
        read_column(file)
