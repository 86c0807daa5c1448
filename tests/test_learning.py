"""Claims on gradients over trainings: what is planted is found, and how often chance passes."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from anisoscope.claims import Verdict, judge
from anisoscope.claims.learning import beyond_untrained
from anisoscope.columns import SCHEMA

BLOCKS = 4
STEPS = (0, 1, 4, 16, 64, 256, 1024)


def training(
    excess: np.ndarray,
    p: np.ndarray,
    *,
    ratio_p: float = 0.005,
    error: float = 0.01,
    trend: tuple[float, float] | None = None,
    attenuation: tuple[float, float, float] | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Rows of one training; excess and p are (steps, blocks)."""
    found = []
    for place, step in enumerate(STEPS):
        for block in range(BLOCKS):
            given = {
                "key": f"{changes.get('model', 'm')}{step}",
                "model": "m",
                "kind": "decoder",
                "corpus": "pydoc",
                "population": "typical",
                "metric_version": 1,
                "step": step,
                "revision": f"step{step}",
                "gradient": "virtual",
                "proxy": "pca",
                "variant": "mean=in",
                "site": f"block.{block}",
                "depth": (block + 1) / BLOCKS,
            } | changes
            value = float(excess[place, block])
            reach = error * 1.959964
            found += [
                given | {"metric": "tangent_excess", "value": value, "p": float(p[place, block])},
                given
                | {
                    "metric": "tangent_energy",
                    "value": 0.5 + value,
                    "low": 0.5 + value - reach,
                    "high": 0.5 + value + reach,
                },
                given | {"metric": "normal_ratio", "value": 9.0, "p": ratio_p},
            ]
            if trend is not None:
                found.append(given | {"metric": "tangent_frequency_trend", "value": trend[0], "p": trend[1]})
            if attenuation is not None:
                value, low, high = attenuation
                beside = {"gradient": None, "proxy": None, "variant": None}
                found.append(
                    given | beside | {"metric": "frequency_attenuation", "value": value, "low": low, "high": high}
                )
    return found


def judged(*trainings: list[dict[str, Any]]) -> dict[str, Verdict]:
    verdicts = judge(pa.Table.from_pylist([row for part in trainings for row in part], schema=SCHEMA))
    return {one.claim: one for one in verdicts if one.p_adjusted is not None}


def planted(first: int, last: int = len(STEPS), base: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """An excess of .2 above that of the untrained model at some checkpoints."""
    excess = np.full((len(STEPS), BLOCKS), base)
    excess[first:last] += 0.2
    return excess, np.where(excess > 0, 0.005, 0.5)


def test_what_appears_at_the_sixteenth_step_and_stays_emerges_early_and_persists() -> None:
    found = judged(training(*planted(3)))
    assert found["emerges early"].holds is True
    assert found["emerges early"].effect == pytest.approx(16 / 1024)
    assert "step 16" in found["emerges early"].text
    assert found["persists"].holds is True
    assert found["persists"].effect == 1


def test_what_appears_at_the_last_step_only_does_not_emerge_early() -> None:
    found = judged(training(*planted(6)))
    assert found["emerges early"].holds is False
    assert found["persists"].holds is None
    assert "no checkpoint is enriched more than the untrained one but the last" in found["persists"].text


def test_what_never_appears_cannot_last_in_any_seed() -> None:
    found = judged(training(*planted(3), model="m-seed0"), training(*planted(7), model="m-seed1"))
    assert found["persists"].holds is None
    assert "so nothing could last" in found["persists"].text


@pytest.mark.parametrize(("steps", "told"), [((0, 1, 4, 16), True), ((0, 1, 4, 16, 64), True), ((1024,), False)])
def test_few_checkpoints_cannot_tell_and_one_says_nothing(steps: tuple[int, ...], told: bool) -> None:
    found = judged([row for row in training(*planted(3)) if row["step"] in steps])
    for claim in ("emerges early", "persists", "emerges early (the paper's control)"):
        assert (claim in found) is told
        if told:
            few = f"{len(steps)} checkpoints of known step, where 5 are needed" in found[claim].text
            assert few is (len(steps) < 5)
            assert found[claim].holds is None or not few


def test_checkpoints_of_unknown_step_cannot_tell() -> None:
    rows = [row | {"step": None} for row in training(*planted(3))]
    assert "0 checkpoints of known step" in judged(rows)["emerges early"].text


@pytest.mark.parametrize(("base", "emerges"), [(0.0, True), (0.25, None)])
def test_proxies_of_the_checkpoint_before_are_held_against_the_untrained_model_too(
    base: float, emerges: bool | None
) -> None:
    """What its own proxy has at step 0 is what a proxy of the past must exceed: it has no step 0 itself."""
    excess, p = planted(3) if emerges else planted(7, base=base)
    rolling = [row for row in training(excess, p, variant="mean=in;fit=rolling") if row["step"] > 0]
    own = training(np.full_like(excess, base), np.full_like(p, 0.005 if base else 0.5))
    table = pa.Table.from_pylist([*own, *rolling], schema=SCHEMA)
    found = {(one.claim, one.variant): one for one in judge(table)}
    mine = found["emerges early", "virtual, pca, fit=rolling"]
    assert mine.holds is emerges
    if emerges:
        assert mine.effect == pytest.approx(16 / 1024)
    assert found["emerges early", "virtual, pca"].holds is None
    assert found["emerges early (the paper's control)", "virtual, pca, fit=rolling"].holds is True
    # Proxies of other fits are judged where they end (tangent enrichment), not over a training.
    others = training(excess, p, variant="mean=in;fit=frozen")
    assert not any(
        "frozen" in (one.variant or "") and "emerges" in one.claim
        for one in judge(pa.Table.from_pylist([*own, *others], schema=SCHEMA))
    )


def test_blocks_below_a_control_without_a_p_do_not_emerge() -> None:
    """Three of four beat random spaces and lie below the next directions; the fourth is above all, by chance."""
    excess = np.zeros((len(STEPS), BLOCKS))
    p = np.full(excess.shape, 0.5)
    excess[3:, :3], p[3:, :3] = -0.01, 0.005
    excess[3:, 3], p[3:, 3] = 0.2, 0.6
    found = judged(training(excess, p, gradient="activation"))
    for claim in ("emerges early", "persists", "tangent enrichment"):
        assert found[claim].holds is None, claim


def test_what_vanishes_does_not_persist() -> None:
    assert judged(training(*planted(2, 4)))["persists"].holds is False


def test_an_excess_that_the_untrained_model_has_already_is_not_learning_but_the_papers_control_sees_it() -> None:
    excess = np.full((len(STEPS), BLOCKS), 0.25)
    found = judged(training(excess, np.full_like(excess, 0.005)))
    assert found["emerges early"].holds is None
    assert "no checkpoint is enriched" in found["emerges early"].text
    assert found["emerges early (the paper's control)"].holds is True
    assert found["persists (the paper's control)"].holds is True


def test_a_control_that_was_not_measured_is_not_judged() -> None:
    rows = training(*planted(3))
    judged_claims = {"emerges early", "persists", "emerges early (the paper's control)"}
    assert judged_claims <= judged(rows).keys()
    for metric, left in (
        ("normal_ratio", {"emerges early", "persists"}),
        ("tangent_excess", {"emerges early (the paper's control)"}),
    ):
        found = judged([row for row in rows if row["metric"] != metric]).keys()
        assert found & judged_claims == left


def test_every_seed_must_say_so() -> None:
    good, bad = planted(3), planted(6)
    agree = judged(*(training(*good, model=f"m-seed{seed}") for seed in range(3)))
    assert agree["emerges early"].holds is True
    assert (agree["emerges early"].subject, agree["emerges early"].replicates) == ("m-seed*", 3)
    differ = judged(training(*good, model="m-seed0"), training(*bad, model="m-seed1"))
    assert differ["emerges early"].holds is None


def test_trends_with_frequency_have_a_side() -> None:
    for value, p, holds in ((0.3, 0.001, True), (-0.3, 0.999, False), (0.01, 0.4, None)):
        found = judged(training(*planted(3), trend=(value, p)))
        assert found["grows with frequency"].holds is holds


def test_attenuation_is_told_by_its_interval() -> None:
    claim = "curvature is attenuated by frequency bias"
    for interval, holds in (((0.6, 0.5, 0.7), True), ((1.5, 1.3, 1.7), False), ((0.9, 0.5, 1.6), None)):
        found = judged(training(*planted(3), attenuation=interval))
        assert found[claim].holds is holds
    nothing = judged(training(*planted(3), attenuation=(float("nan"), float("nan"), float("nan"))))
    assert nothing[claim].holds is None
    assert "0 blocks of 4" in nothing[claim].text


def test_kinds_are_told_apart_over_models() -> None:
    rng = np.random.default_rng(0)

    def several(kind: str, base: float) -> list[dict[str, Any]]:
        parts = []
        for seed in range(3):
            excess, p = planted(3, base=base + 0.01 * rng.standard_normal())
            parts += training(excess, p, model=f"{kind}-seed{seed}", kind=kind)
        return parts

    claim = "encoders and decoders differ in enrichment"
    assert judged(several("decoder", 0.2), several("encoder", 0.0))[claim].holds is True
    assert judged(several("decoder", 0.1), several("encoder", 0.1))[claim].holds is None
    assert claim not in judged(several("decoder", 0.2))


def test_growth_since_the_untrained_model_is_a_test_of_its_level() -> None:
    rng, passed, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        noise = rng.normal(0, 0.01, (2, BLOCKS))
        reach = 0.01 * stats.norm.ppf(0.975)
        blocks, before = (
            {str(k): {"value": value, "low": value - reach, "high": value + reach} for k, value in enumerate(row)}
            for row in noise
        )
        passed += beyond_untrained(blocks, before, blocks, before) <= 0.05
    low, high = stats.binom.interval(0.999, trials, 0.05)
    assert low <= passed <= high


def test_chance_rarely_emerges() -> None:
    """Uniform p at every block of every checkpoint, excesses of noise: at most the nominal rate holds."""
    rng, trials, held = np.random.default_rng(2), 200, 0
    for _ in range(trials):
        p = rng.uniform(1 / 200, 1, (len(STEPS), BLOCKS))
        excess = rng.normal(0, 0.01, p.shape)
        held += judged(training(excess, p))["emerges early"].holds is True
    assert held <= stats.binom.ppf(0.999, trials, 0.05)


def test_proxies_and_variants_that_agree_are_told_together() -> None:
    from anisoscope.claims import headlines

    several = [training(*planted(3), proxy=proxy) for proxy in ("pca", "seminmf")]
    verdicts = judge(pa.Table.from_pylist([row for part in several for row in part], schema=SCHEMA))
    mine = [one for one in verdicts if one.claim == "emerges early"]
    (told,) = (one for one in headlines(verdicts) if one.claim == "emerges early")
    assert len(mine) == 2
    assert "the same with 1 more of its proxies and variants" in told.text
    assert headlines([mine[0]]) == [mine[0]]
