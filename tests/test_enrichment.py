"""Tangent enrichment as a claim: our control and the paper's side by side, and how often chance passes."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from anisoscope.claims import Verdict, judge
from anisoscope.claims.enrichment import simes
from anisoscope.columns import SCHEMA

BLOCKS = 6


def rows(
    excess: np.ndarray, p: np.ndarray, ratio: np.ndarray, ratio_p: np.ndarray, **changes: Any
) -> list[dict[str, Any]]:
    given = {
        "key": "k",
        "model": "m",
        "kind": "decoder",
        "corpus": "pydoc",
        "population": "all",
        "metric_version": 1,
        "step": 8,
        "gradient": "virtual",
        "proxy": "pca",
        "variant": "mean=in",
    } | changes
    return [
        given | {"metric": metric, "site": f"block.{k}", "depth": (k + 1) / BLOCKS, "value": float(v), "p": float(q)}
        for metric, values, ps in (("tangent_excess", excess, p), ("normal_ratio", ratio, ratio_p))
        for k, (v, q) in enumerate(zip(values, ps, strict=True))
    ]


def table_of(*parts: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([row for part in parts for row in part], schema=SCHEMA)


def judged(*parts: list[dict[str, Any]]) -> dict[str, Verdict]:
    found = judge(table_of(*parts))
    return {one.claim: one for one in found if one.claim.startswith("tangent enrichment")}


def test_simes_by_hand() -> None:
    assert simes([0.04, 0.01, 0.5]) == pytest.approx(0.03)
    assert simes([float("nan"), 0.2]) == 0.2
    assert np.isnan(simes([]))


def test_a_null_that_the_papers_control_passes_is_told_apart() -> None:
    even = np.linspace(0.2, 0.9, BLOCKS)
    found = judged(rows(np.full(BLOCKS, 0.01), even, np.full(BLOCKS, 20.0), np.full(BLOCKS, 0.005)))
    assert found["tangent enrichment"].holds is None
    assert found["tangent enrichment (the paper's control)"].holds is True
    assert found["tangent enrichment"].variant == "virtual, pca, mean=in"
    assert "in 0 blocks of 6" in found["tangent enrichment"].text


def test_a_signal_is_found_by_both_and_one_below_its_control_by_none() -> None:
    floor = np.full(BLOCKS, 0.005)
    found = judged(rows(np.full(BLOCKS, 0.2), floor, np.full(BLOCKS, 20.0), floor))
    assert [one.holds for one in found.values()] == [True, True]
    assert found["tangent enrichment"].effect == pytest.approx(0.2)
    below = judged(rows(np.full(BLOCKS, -0.2), floor, np.full(BLOCKS, 0.5), floor))
    assert [one.holds for one in below.values()] == [None, None]


@pytest.mark.parametrize(("enriched", "holds"), [(6, True), (4, True), (3, None), (1, None)])
def test_a_few_blocks_are_not_the_model(enriched: int, holds: bool | None) -> None:
    """Chance alone would not give one of them, but the mean of all may owe its sign to a rounding."""
    floor = np.full(BLOCKS, 0.005)
    p = np.where(np.arange(BLOCKS) < enriched, 0.005, 0.6)
    found = judged(rows(np.full(BLOCKS, 0.1), p, np.full(BLOCKS, 20.0), floor))
    assert found["tangent enrichment"].p <= 0.05
    assert found["tangent enrichment"].holds is holds
    assert ("takes most of them" in found["tangent enrichment"].text) is (holds is None)
    assert found["tangent enrichment (the paper's control)"].holds is True


def test_a_share_of_anisotropy_counts_beyond_that_of_random_normals() -> None:
    def shares(value: float, p: float, **changes: Any) -> list[dict[str, Any]]:
        fields = {"metric": "tangent_anisotropy_share", "variant": "mean=in;share=isoscore", "control": "normal"}
        level = np.full(BLOCKS, value)
        made = rows(level, np.full(BLOCKS, p), level, level, **{"control_value": 0.1} | changes)[:BLOCKS]
        return [row | fields | changes for row in made]

    claim = "tangent share of gradient anisotropy (the paper's control)"
    # Rows against the next principal directions have no p, and other ways to take a share are not the paper's.
    others = [*shares(9.0, 0.5, control="next"), *shares(9.0, 0.005, variant="mean=in;share=energy")]
    (found,) = [one for one in judge(table_of(shares(0.4, 0.005), others)) if one.claim == claim]
    assert found.holds is True
    assert found.effect == pytest.approx(0.3)
    (below,) = [one for one in judge(table_of(shares(0.05, 0.005))) if one.claim == claim]
    assert below.holds is None


def test_of_several_settings_of_a_checkpoint_one_is_judged_and_the_others_are_counted() -> None:
    """Which would otherwise be mixed block by block, or the last key would speak for all."""
    floor, high = np.full(BLOCKS, 0.005), np.full(BLOCKS, 20.0)
    weak = rows(np.full(BLOCKS, 0.01), np.full(BLOCKS, 0.9), high, floor, key="a", points=100, rank=4)
    strong = rows(np.full(BLOCKS, 0.2), floor, high, floor, key="b", points=200, rank=16)
    for parts in ((weak, strong), (strong, weak)):
        found = judged(*parts)["tangent enrichment"]
        assert found.effect == pytest.approx(0.2)
        assert "1 unit of the same checkpoints under other settings left out" in found.text
    # Of a later version whatever its points; of equals the first key.
    newer = [row | {"metric_version": 2} for row in weak]
    assert judged(strong, newer)["tangent enrichment"].effect == pytest.approx(0.01)
    alike = [row | {"points": 100} for row in strong]
    assert judged(alike, weak)["tangent enrichment"].effect == pytest.approx(0.01)
    # Other gradients or proxies in units of their own are no other settings; blocks of two units are not mixed.
    halves = [row | {"key": "c"} for row in strong[: BLOCKS // 2]], strong[BLOCKS // 2 :]
    other = rows(np.full(BLOCKS, 0.2), floor, high, floor, key="d", points=200, proxy="seminmf")
    assert "left out" not in judged(strong, other)["tangent enrichment"].text
    assert judged(*halves)["tangent enrichment"].replicates == BLOCKS // 2


def energy_shares(value: float, **controls: tuple[float, float | None]) -> list[dict[str, Any]]:
    """Rows of a share, one for each block and control: its value there, and p."""
    level = np.full(BLOCKS, value)
    made = rows(level, level, level, level, metric="tangent_anisotropy_share", variant="mean=in;share=energy")[:BLOCKS]
    return [
        row | {"metric": "tangent_anisotropy_share", "control": name, "control_value": chance, "p": p}
        for row in made
        for name, (chance, p) in controls.items()
    ]


@pytest.mark.parametrize(
    ("controls", "holds", "effect"),
    [
        # Coupled: windows paired anew decide, whatever normals and the next directions say.
        ({"normal": (0.0, 0.005), "next": (0.9, None), "permuted": (0.3, 0.005)}, True, 0.1),
        ({"normal": (0.0, 0.005), "next": (0.0, None), "permuted": (0.3, 0.4)}, None, 0.1),
        # Uncoupled: the hardest of three, and both that have a p.
        ({"normal": (0.0, 0.005), "next": (0.2, None), "haar": (0.1, 0.005), "signs": (0.15, 0.005)}, True, 0.2),
        ({"normal": (0.0, 0.005), "next": (0.5, None), "haar": (0.1, 0.005), "signs": (0.15, 0.005)}, None, -0.1),
        ({"normal": (0.0, 0.005), "next": (0.2, None), "haar": (0.1, 0.005), "signs": (0.39, 0.3)}, None, 0.01),
        ({"haar": (0.1, 0.005), "signs": (0.15, None)}, None, 0.25),
        # Too few windows.
        ({"normal": (0.0, 0.005), "permuted": (float("nan"), float("nan"))}, None, float("nan")),
    ],
)
def test_our_controls_decide_for_shares_of_anisotropy(
    controls: dict[str, tuple[float, float | None]], holds: bool | None, effect: float
) -> None:
    found = {one.claim: one for one in judge(table_of(energy_shares(0.4, **controls)))}
    assert found["tangent share of gradient anisotropy"].holds is holds
    assert found["tangent share of gradient anisotropy"].effect == pytest.approx(effect, nan_ok=True)
    assert "tangent share of gradient anisotropy (the paper's control)" not in found


@pytest.mark.parametrize(("above", "holds"), [(4, True), (3, None)])
def test_blocks_below_the_next_directions_are_not_beyond_chance(above: int, holds: bool | None) -> None:
    """These have no p of their own, and one block far above them would carry the mean."""
    drawn = {"haar": (0.1, 0.005), "signs": (0.15, 0.005)}
    rows = energy_shares(0.4, **drawn, next=(0.0, None))
    below = {f"block.{k}" for k in range(above, BLOCKS)}
    rows = [row | {"control_value": 0.41} if row["control"] == "next" and row["site"] in below else row for row in rows]
    found = {one.claim: one for one in judge(table_of(rows))}
    assert found["tangent share of gradient anisotropy"].effect > 0
    assert found["tangent share of gradient anisotropy"].holds is holds
    assert f"in {above} blocks of 6" in found["tangent share of gradient anisotropy"].text


def test_shares_held_against_normals_alone_have_no_verdict_under_our_control() -> None:
    found = judge(table_of(energy_shares(0.4, normal=(0.0, 0.005), next=(0.1, None))))
    assert not [one for one in found if one.claim == "tangent share of gradient anisotropy"]


def distances(r: np.ndarray, p: np.ndarray) -> list[dict[str, Any]]:
    fields = {"metric": "centroid_distance", "population": "content", "variant": None, "gradient": None, "proxy": None}
    return [row | fields for row in rows(r, p, r, p)[:BLOCKS]]


def pinned(*parts: list[dict[str, Any]]) -> Verdict:
    (found,) = [one for one in judge(table_of(*parts)) if one.claim == "frequent types are pinned"]
    return found


def test_frequent_types_are_pinned_where_distance_falls_with_frequency() -> None:
    floor, some = np.full(BLOCKS, 0.005), np.full(BLOCKS, 0.4)
    near = pinned(distances(-some, floor), [row | {"variant": "of=mean"} for row in distances(some, floor)])
    assert (near.holds, near.effect) == (True, pytest.approx(-0.4))
    assert "below chance in 6 blocks of 6" in near.text
    assert pinned(distances(some, floor)).holds is False
    assert pinned(distances(-some, np.full(BLOCKS, 0.3))).holds is None


def test_chance_seldom_pins_types() -> None:
    random, trials = np.random.default_rng(1), 300
    found = []
    for _ in range(trials):
        normal = np.sqrt(0.5) * random.normal() + np.sqrt(0.5) * random.normal(size=BLOCKS)
        p = (1 + np.floor(199 * 2 * stats.norm.sf(np.abs(normal)))) / 200
        found.append(pinned(distances(normal / 15, p)).holds)
    assert max(found.count(True), found.count(False)) <= stats.binom.isf(0.001, trials, 0.05)
    assert found.count(None) < trials


def test_the_last_checkpoint_counts_and_suspects_do_not() -> None:
    floor, one = np.full(BLOCKS, 0.005), np.full(BLOCKS, 1.0)
    early = rows(np.full(BLOCKS, 0.2), floor, 20 * one, floor, step=2, key="a")
    late = rows(np.full(BLOCKS, 0.0), 0.5 * one, one, 0.5 * one, step=8, key="b")
    assert judged(early, late)["tangent enrichment"].holds is None
    assert judged(early, [row | {"suspect": "copied"} for row in late])["tangent enrichment"].holds is True


def test_chance_seldom_passes_whether_or_not_blocks_depend_on_each_other() -> None:
    random, trials = np.random.default_rng(0), 400
    for shared in (0.0, 0.9):
        wrong = 0
        for _ in range(trials):
            normal = np.sqrt(shared) * random.normal() + np.sqrt(1 - shared) * random.normal(size=BLOCKS)
            # As a permutation test of 199 draws gives them.
            p = (1 + np.floor(199 * stats.norm.sf(normal))) / 200
            wrong += simes(p.tolist()) <= 0.05
        assert wrong <= stats.binom.isf(0.001, trials, 0.05)
