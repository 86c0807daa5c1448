"""Old theories as claims: what they read, how often they are wrong, what one run can say."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from anisoscope.claims import Verdict, judge
from anisoscope.claims.theories import GROWTH, PREDICTIONS, Prediction
from anisoscope.columns import SCHEMA

STEPS = (0, 10, 100, 1000, 2000, 4000, 8000, 16000)


def rows_of(theory: Prediction, read: np.ndarray, *, model: str) -> list[dict[str, Any]]:
    """A run whose checkpoints give the theory exactly these numbers."""
    rows = []
    for step, wanted in zip(STEPS, read, strict=True):
        given: dict[str, Any] = {
            "key": f"{model}-{step}",
            "model": model,
            "kind": "decoder",
            "corpus": "pydoc",
            "population": theory.population,
            "metric_version": 1,
            "step": step,
            "null": 0.0,
        }
        sites = ("block.0", "block.1") if theory.sites == "block.*" else (theory.sites,)
        for metric in theory.metrics:
            for number, site in enumerate(sites):
                place = given | {"metric": metric, "site": site}
                if metric == "partition_isotropy":
                    for variant, value in (("centred=no", 0.3), ("centred=yes", 0.3 + wanted)):
                        rows.append(place | {"variant": variant, "value": value})
                    # A variant that the claim must not read.
                    rows.append(place | {"variant": "centred=no;signs=one", "value": 9.0})
                elif metric == "rare_drift":
                    rows.append(place | {"value": float(np.exp(wanted)), "variant": "from=0"})
                elif metric == "hull_margin":
                    rows.append(place | {"value": 0.5 + wanted, "null": 0.5})
                else:
                    sign = -1.0 if metric == "attention_entropy" else 1.0
                    # Blocks differ, and only their mean counts.
                    rows.append(place | {"value": sign * wanted + (number - (len(sites) - 1) / 2)})
    return rows


def judged(theory: Prediction, runs: np.ndarray, *, extra: list[dict[str, Any]] | None = None) -> list[Verdict]:
    rows = [row for seed, run in enumerate(runs) for row in rows_of(theory, run, model=f"m-seed{seed}")]
    return [
        one for one in judge(pa.Table.from_pylist(rows + (extra or []), schema=SCHEMA)) if one.claim == theory.claim
    ]


def series_with(theory: Prediction, effect: float) -> np.ndarray:
    """A series that the theory reads as this effect."""
    grown = np.linspace(0, 1, len(STEPS))
    reads = float(theory.read(grown[None, :])[0])
    return effect * grown / reads


TESTED = [theory for theory in PREDICTIONS if theory.metrics != ("mean_cosine",)]
each_theory = pytest.mark.parametrize("theory", TESTED, ids=lambda theory: theory.claim)


@each_theory
def test_a_theory_reads_what_it_says(theory: Prediction) -> None:
    random = np.random.default_rng(0)
    effect = theory.margin + 0.2
    runs = np.stack([series_with(theory, effect + 0.01 * random.normal()) for _ in range(4)])
    (verdict,) = judged(theory, runs)
    assert verdict.effect == pytest.approx(theory.read(runs).mean(), abs=1e-9)
    assert verdict.holds is True
    assert verdict.p_adjusted < 0.05
    assert verdict.replicates == 4
    assert verdict.subject == "m-seed*"
    (against,) = judged(theory, np.stack([series_with(theory, -0.2 + 0.01 * random.normal()) for _ in range(4)]))
    assert against.holds is False


@each_theory
def test_a_theory_is_seldom_confirmed_at_its_margin(theory: Prediction) -> None:
    random, trials = np.random.default_rng(1), 300
    wrong = 0
    for _ in range(trials):
        noise = random.normal(size=3) * 0.1
        (verdict,) = judged(theory, np.stack([series_with(theory, theory.margin + one) for one in noise]))
        wrong += verdict.holds is True
    # Two-sided at .05, and only one side is a confirmation.
    assert wrong <= int(stats.binom.isf(0.001, trials, 0.025))


def test_one_run_has_its_number_and_no_verdict() -> None:
    theory = TESTED[0]
    (verdict,) = judged(theory, series_with(theory, 0.9)[None, :])
    assert verdict.holds is None
    assert verdict.effect == pytest.approx(0.9)
    assert "needs 3 seeds, and has 1" in verdict.text
    assert np.isnan(verdict.p)


def test_what_is_to_be_explained_is_judged_beside_a_theory_and_not_alone() -> None:
    explained = next(theory for theory in PREDICTIONS if theory.metrics == ("mean_cosine",))
    runs = np.stack([series_with(explained, GROWTH + 0.2 + 0.01 * seed) for seed in range(3)])
    assert judged(explained, runs) == []
    beside = [
        row for seed in range(3) for row in rows_of(TESTED[0], series_with(TESTED[0], 0.5), model=f"m-seed{seed}")
    ]
    (verdict,) = judged(explained, runs, extra=beside)
    assert verdict.holds is True
    assert verdict.population == "all"


def test_rows_of_a_changed_norm_and_an_untrained_cone_say_nothing() -> None:
    cone = next(theory for theory in TESTED if theory.claim == "states move into a cone")
    runs = np.stack([np.full(len(STEPS), 0.2 + 0.01 * seed) for seed in range(3)])
    (verdict,) = judged(cone, runs)
    assert verdict.holds is not True
    assert verdict.effect == pytest.approx(0)
    grown = np.stack([series_with(cone, 0.3 + 0.01 * seed) for seed in range(3)])
    (plain,) = judged(cone, grown)
    changed = [
        row | {"variant": "bias=0", "value": -9.0, "key": "changed"}
        for seed in range(3)
        for row in rows_of(cone, grown[seed], model=f"m-seed{seed}")
    ]
    (beside,) = judged(cone, grown, extra=changed)
    assert beside.effect == plain.effect


def test_steps_without_a_number_and_suspect_checkpoints_are_left_out() -> None:
    theory = TESTED[0]
    runs = np.stack([np.full(len(STEPS), 0.4 + 0.01 * seed) for seed in range(3)])
    runs[:, 2] = np.nan
    (verdict,) = judged(theory, runs)
    assert verdict.effect == pytest.approx(0.41)
    rows = [row for seed, run in enumerate(runs) for row in rows_of(theory, run, model=f"m-seed{seed}")]
    for row in rows:
        if row["step"] == 1000:
            row |= {"value": 99.0, "suspect": "identical files"}
    found = [one for one in judge(pa.Table.from_pylist(rows, schema=SCHEMA)) if one.claim == theory.claim]
    assert found[0].effect == pytest.approx(0.41)
    assert "3 suspect checkpoints left out" in found[0].text
