"""How claims are corrected for their number, what most blocks mean, and how verdicts speak."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from anisoscope.claims import CLAIMS, Verdict, judge
from anisoscope.claims.resampling import false_discovery_rate, holm, most
from anisoscope.store import SCHEMA

BLOCKS = 12
FLOOR = 1 / 200


def rows(p: Any, *, excess: float = 0.2, metric: str = "tangent_excess", **changes: Any) -> list[dict[str, Any]]:
    given = {
        "key": f"{changes.get('model', 'm')}-{changes.get('step', 8)}",
        "model": "m",
        "kind": "decoder",
        "corpus": "text",
        "population": "all",
        "metric": metric,
        "metric_version": 1,
        "step": 8,
        "gradient": "virtual",
        "proxy": "pca",
        "variant": "mean=in",
        **changes,
    }
    p_values = np.broadcast_to(p, BLOCKS)
    return [
        given | {"site": f"block.{k}", "depth": (k + 1) / BLOCKS, "value": excess, "p": float(one)}
        for k, one in enumerate(p_values)
    ]


def judged(*parts: list[dict[str, Any]]) -> list[Verdict]:
    return judge(pa.Table.from_pylist([row for part in parts for row in part], schema=SCHEMA))


def of(verdicts: list[Verdict], model: str, claim: str = "tangent enrichment") -> Verdict:
    return next(one for one in verdicts if one.subject == model and one.claim == claim)


# Families and near copies


def test_the_papers_control_does_not_soften_the_correction_of_ours() -> None:
    """It always holds: in one family with it, a single p of .02 among ten would pass."""
    ours = [rows(0.02 if k == 0 else 0.9, model=f"m{k}") for k in range(10)]
    papers = [rows(FLOOR, excess=9.0, metric="normal_ratio", model=f"m{k}") for k in range(10)]
    alone, beside = judged(*ours), judged(*ours, *papers)
    assert of(alone, "m0").holds is of(beside, "m0").holds is None
    assert of(beside, "m0").p_adjusted == of(alone, "m0").p_adjusted == pytest.approx(0.2)
    assert of(beside, "m0", "tangent enrichment (the paper's control)").holds is True


def test_near_copies_of_one_hypothesis_do_not_help_or_burden_another() -> None:
    """A true effect measured under forty variants made a p of .04 among ten models pass."""
    ten = [rows(FLOOR if k == 0 else 0.04 if k == 1 else 0.9, model=f"m{k}") for k in range(10)]
    copies = [rows(FLOOR, variant=f"mean=in;fit={k}", model="m0") for k in range(40)]
    assert of(judged(*ten), "m1").holds is None
    with_copies = judged(*ten, *copies)
    assert of(with_copies, "m1").holds is None
    assert of(with_copies, "m1").p_adjusted == of(judged(*ten), "m1").p_adjusted
    assert of(with_copies, "m0").holds is True


def test_populations_of_one_model_share_a_hypothesis_and_other_gradients_do_not() -> None:
    same = judged(rows(0.04), rows(0.04, population="typical"))
    assert [one.p_adjusted for one in same] == pytest.approx([0.04, 0.04])
    other = judged(rows(0.04), rows(0.9, gradient="activation"))
    assert sorted(one.p_adjusted for one in other) == pytest.approx([0.08, 1.0])


def test_weighted_holm_is_holm_without_repeats_and_keeps_its_level_with_them() -> None:
    random, wrong = np.random.default_rng(0), 0
    names = ["a", "a", "a", "a", "b", "c"]
    for _ in range(1000):
        shared = random.normal()
        normal = [0.9 * shared + np.sqrt(1 - 0.81) * random.normal() for _ in range(4)] + random.normal(size=2).tolist()
        p_values = stats.norm.sf(normal).tolist()
        assert holm(p_values) == pytest.approx(holm(p_values, range(6)))
        wrong += min(holm(p_values, names)) <= 0.05
    assert wrong <= stats.binom.isf(0.001, 1000, 0.05)


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_false_discoveries_stay_rare_whatever_is_copied(shared: float) -> None:
    """Five true hypotheses with twenty copies each, five false ones with four: 500 draws."""
    random = np.random.default_rng(1)
    names = [k for k in range(10) for _ in range(20 if k < 5 else 4)]
    of_rows = []
    for _ in range(500):
        p_values = []
        for k in range(10):
            common = random.normal()
            for _ in range(20 if k < 5 else 4):
                z = np.sqrt(shared) * common + np.sqrt(1 - shared) * random.normal()
                p_values.append(float(stats.norm.sf(z + (5 if k < 5 else 0))))
        passed = np.array(false_discovery_rate(p_values, names, level=0.95)) <= 0.05
        by_hypothesis = {k: passed[[name == k for name in names]].any() for k in range(10)}
        false, found = sum(by_hypothesis[k] for k in range(5, 10)), sum(by_hypothesis.values())
        of_rows.append(false / max(1, found))
        assert sum(by_hypothesis[k] for k in range(5)) == 5
    assert np.mean(of_rows) <= 0.05 + 3 * np.std(of_rows) / np.sqrt(500)


def pinned(p: float, correlation: float, model: str) -> list[dict[str, Any]]:
    plain = {"metric": "centroid_distance", "gradient": None, "proxy": None, "variant": None, "population": "content"}
    return [row | plain | {"value": correlation} for row in rows(p, model=model)]


def test_what_does_not_hold_is_corrected_too() -> None:
    """One correlation above zero at .03 among twenty of none is what chance gives."""
    claim = "frequent types are pinned"
    strange = pinned(0.06, 0.3, "m0")
    assert of(judged(strange), "m0", claim).holds is False
    none = [pinned(0.9, 0.01, f"m{k}") for k in range(1, 20)]
    among = of(judged(strange, *none), "m0", claim)
    assert among.holds is None
    assert "the evidence against it may be chance" in among.reason
    assert among.p_against_adjusted == pytest.approx(0.6)


# Most blocks


def test_partial_conjunction_by_hand() -> None:
    assert most([0.005] * 12) == pytest.approx(0.005)
    assert most([0.005] * 7 + [0.9] * 5) == pytest.approx(0.03)
    assert most([0.0] * 6 + [0.05] * 6) == pytest.approx(0.05)
    assert most([0.0, 0.0, 0.0, float("nan")]) == pytest.approx(0.0)
    assert most([0.01, float("nan")]) == 1.0
    assert np.isnan(most([]))


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_exactly_half_of_the_blocks_is_seldom_most_of_them(shared: float) -> None:
    """Counting blocks below .05 said "most" in 27 % of such models."""
    random, trials = np.random.default_rng(2), 500
    passed = counted = 0
    for _ in range(trials):
        noise = np.sqrt(shared) * random.normal() + np.sqrt(1 - shared) * random.normal(size=BLOCKS)
        p = (1 + np.floor(199 * stats.norm.sf(noise + np.where(np.arange(BLOCKS) < 6, 6, 0)))) / 200
        passed += of(judged(rows(p)), "m").holds is True
        counted += 2 * int((p <= 0.05).sum()) > BLOCKS
    assert passed <= stats.binom.isf(0.001, trials, 0.05)
    if shared == 0:
        assert counted > 0.2 * trials


# Smallest effects and words


def test_an_effect_too_small_to_matter_does_not_hold() -> None:
    small = of(judged(rows(FLOOR, excess=0.0015)), "m")
    assert small.holds is None
    assert "the mean is not above 0.01" in small.reason
    assert (small.smallest_effect, CLAIMS["tangent enrichment"].smallest_effect) == (0.01, 0.01)
    assert "smallest effect that counts 0.01" in small.text


def test_a_verdict_on_one_model_speaks_of_its_weights_on_this_text() -> None:
    assert "“tangent enrichment” holds for these weights on this text" in of(judged(rows(FLOOR)), "m").text


@pytest.mark.parametrize(("at_start", "present"), [(FLOOR, True), (0.9, False)])
def test_what_an_untrained_model_passes_is_present_before_training(at_start: float, present: bool) -> None:
    found = of(judged(rows(at_start, step=0), rows(FLOOR, step=100)), "m")
    assert found.holds is True
    assert found.before_training is present
    assert ("present before training" in found.text) is present
    assert of(judged(rows(FLOOR)), "m").before_training is None


def test_every_open_verdict_has_a_reason() -> None:
    found = judged(rows(0.5), rows(0.5, metric="normal_ratio", excess=2.0), pinned(0.9, 0.01, "m"))
    assert found
    for one in found:
        assert one.holds is None
        assert one.reason
        assert f"is inconclusive: {one.reason}" in one.text
