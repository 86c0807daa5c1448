"""Concepts against planted ones: found, matched, followed, and not found where there are none."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.seminmf import encode, semi_nmf
from anisoscope.tangent.concepts import (
    describe_concepts,
    fit_concepts,
    fit_halves,
    hoyer_sparsity,
    permuted_cosines,
    sharpen,
    top_tokens,
)
from anisoscope.tracks import (
    Concepts,
    cosines_between,
    follow_concepts,
    match_directions,
    match_threshold,
    random_cosines,
    render_context,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def planted(n: int, d: int, rank: int, *, seed: int = 0, active: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy states, their codes (most of them zero) and their directions."""
    directions = unit(normal(rank, d, seed=seed))
    generator = torch.Generator().manual_seed(seed + 1)
    codes = 2 * torch.rand(n, rank, generator=generator, dtype=torch.float64)
    codes = codes * (torch.rand(n, rank, generator=generator) < active)
    return codes @ directions + 0.05 * normal(n, d, seed=seed + 2), codes, directions


def turned(directions: np.ndarray, angle: float, *, seed: int = 1) -> np.ndarray:
    """Every direction turned by this angle, each its own way."""
    other = normal(*directions.shape, seed=1000 + seed).numpy()
    other -= (other * directions).sum(1, keepdims=True) * directions
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    return math.cos(angle) * directions + math.sin(angle) * other


@pytest.mark.parametrize(("rank", "active"), [(6, 0.2), (8, 0.3), (16, 0.1)])
def test_planted_concepts_are_found_and_the_bare_factorisation_does_not_find_them(rank: int, active: float) -> None:
    states, _, directions = planted(1500, 48, rank, active=active)
    bare = semi_nmf(states, rank, seed=3)
    sharp = sharpen(states, bare)
    assert sharp.converged
    truth = directions.numpy()
    assert match_directions(truth, sharp.directions.numpy()).cosines.min() > 0.95
    # A wider cone fits the noise as well, so the smaller error goes with the wrong directions.
    assert match_directions(truth, bare.directions.numpy()).cosines.min() < 0.95
    error = float((states - encode(states, directions) @ directions).norm() / states.norm())
    assert float(bare.errors[-1]) < error
    assert float(sharp.errors[-1]) == pytest.approx(error, rel=0.02)
    assert float(sharp.codes.min()) >= 0


def test_sharpening_keeps_the_span_the_units_and_unused_directions() -> None:
    states, _, _ = planted(400, 20, 4)
    bare = semi_nmf(states, 4, seed=0)
    sharp, scaled = sharpen(states, bare), fit_concepts(1000 * states, 4, seed=0)
    basis = torch.linalg.qr(bare.directions.T).Q
    assert torch.allclose(sharp.directions @ basis @ basis.T, sharp.directions, atol=1e-9)
    assert torch.allclose(scaled.directions, sharp.directions, atol=1e-6)
    assert torch.allclose(scaled.codes, 1000 * sharp.codes, rtol=1e-4, atol=1e-2)
    nothing = fit_concepts(torch.zeros(30, 5), 2, seed=0)
    assert float(nothing.directions.abs().max()) == 0
    assert float(nothing.codes.abs().max()) == 0
    with pytest.raises(SpecError, match="penalty"):
        sharpen(states, bare, penalty=0.0)


def test_planted_concepts_come_back_from_seeds_and_halves_and_noise_only_from_seeds() -> None:
    def repeated(states: Tensor) -> tuple[np.ndarray, np.ndarray]:
        fits = [fit_concepts(states, 8, seed=seed).directions for seed in range(3)]
        halves = [fit_halves(states, 8, seed=seed) for seed in range(2)]
        table = describe_concepts(fit_concepts(states, 8, seed=5), states, refits=fits, halves=halves)
        return table.stability, table.replication

    stability, replication = repeated(planted(1500, 48, 8)[0])
    assert stability.min() > 0.99
    assert replication.min() > 0.99
    stability, replication = repeated(normal(1500, 48))
    assert stability.mean() < 0.9
    assert replication.mean() < 0.35
    assert replication.max() < 0.6


def test_halves_share_no_document() -> None:
    """Each document has a direction of its own: halves that share none cannot find the same ones."""
    documents = torch.arange(8).repeat_interleave(60)
    states = torch.eye(8, dtype=torch.float64)[documents] * (1 + normal(480, 1).abs())
    one, other = fit_halves(states, 4, seed=0, groups=documents)
    assert np.abs(match_directions(one.numpy(), other.numpy()).cosines).max() < 1e-6
    with pytest.raises(SpecError, match="two groups"):
        fit_halves(states, 4, seed=0, groups=torch.zeros(480, dtype=torch.int64))


def test_the_table_says_what_was_planted() -> None:
    n, d, rank = 1500, 48, 6
    states, codes, directions = planted(n, d, rank)
    fit = fit_concepts(states, rank, seed=0)
    # Gradients along the second planted direction, as large as its code, and some in any direction.
    gradients = codes[:, 1:2] * directions[1] + 0.02 * normal(n, d, seed=8)
    refits = [fit_concepts(states, rank, seed=seed).directions for seed in (1, 2)]
    types = torch.arange(n) % 100
    table = describe_concepts(fit, states, gradients=gradients, refits=refits, types=types)
    matching = match_directions(directions.numpy(), table.directions)
    concept = int(matching.second[1])
    assert table.code_share.sum() == pytest.approx(1)
    assert (np.diff(table.code_share) <= 0).all()
    assert table.gradient_share.argmax() == concept
    assert table.gradient_share[concept] > 0.9
    assert table.coupled_share.argmax() == concept
    assert table.coupled_share[concept] > 3 * table.variance_share[concept]
    centred = (states - states.mean(0)).numpy()
    wanted = ((centred @ table.directions[concept]) ** 2).sum() / (centred**2).sum()
    assert table.variance_share[concept] == pytest.approx(wanted, rel=1e-5)
    assert table.stability.min() > 0.99
    # The points it lists are the ones with the largest planted codes, one of each type.
    assert codes[table.tokens[concept], 1].min() > np.quantile(codes[:, 1], 0.97)
    assert len(set(types[table.tokens[concept]].tolist())) == 10
    assert (np.diff(table.strengths[concept]) <= 0).all()
    planted_sparsity = hoyer_sparsity(codes)[1]
    assert table.sparsity[concept] == pytest.approx(planted_sparsity, abs=0.05)
    bare = describe_concepts(fit, states)
    assert np.isnan(np.concatenate([bare.gradient_share, bare.coupled_share, bare.stability, bare.replication])).all()
    with pytest.raises(SpecError, match="same tokens"):
        describe_concepts(fit, states, gradients=gradients[:5])


def test_independent_gradients_share_what_chance_gives() -> None:
    states, _, _ = planted(1500, 48, 6)
    table = describe_concepts(fit_concepts(states, 6, seed=0), states, gradients=normal(1500, 48, seed=9))
    assert table.gradient_share == pytest.approx(np.full(6, 1 / 48), rel=0.25)
    assert table.coupled_share == pytest.approx(table.variance_share, rel=0.5)


def test_a_table_goes_through_json_and_attachments() -> None:
    states, _, _ = planted(300, 12, 3)
    table = describe_concepts(fit_concepts(states, 3, seed=0), states, listed=2)
    arrays = table.attach("concepts/block.1")
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    again = Concepts.from_attachments({**arrays, "other": np.zeros(1)}, "concepts/block.1")
    assert again.rows() == table.rows()
    rows = json.loads(json.dumps(table.rows([["a"], ["b"], ["c"]]), allow_nan=False))
    assert [row["contexts"] for row in rows] == [["a"], ["b"], ["c"]]
    assert rows[0]["stability"] is None
    assert rows[0]["tokens"] == table.tokens[0].tolist()
    assert "contexts" not in table.rows()[0]


def test_sparsity_has_its_ends() -> None:
    codes = torch.zeros(100, 3, dtype=torch.float64)
    codes[:, 0], codes[7, 1] = 2.0, 5.0
    even, single, empty = hoyer_sparsity(codes)
    assert even == pytest.approx(0, abs=1e-12)
    assert single == pytest.approx(1)
    assert math.isnan(empty)


def test_top_tokens_are_the_strongest_and_run_out() -> None:
    codes = torch.tensor([[0.0, 3.0], [5.0, 1.0], [4.0, 2.0], [0.0, 2.5]])
    tokens, strengths = top_tokens(codes, 3)
    assert tokens.tolist() == [[1, 2, -1], [0, 3, 2]]
    assert strengths[1].tolist() == [3.0, 2.5, 2.0]
    assert math.isnan(strengths[0, 2])
    by_type, _ = top_tokens(codes, 3, torch.tensor([0, 1, 1, 0]))
    assert by_type.tolist() == [[1, -1, -1], [0, 2, -1]]


def test_a_context_is_the_window_around_the_token() -> None:
    texts = ["the", " cat", " sat", " on", "other", " window"]
    windows, positions = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 2, 3, 0, 1])
    assert render_context(texts, windows, positions, 1, radius=1) == "the⟦ cat⟧ sat"
    assert render_context(texts, windows, positions, 3, radius=9) == "the cat sat⟦ on⟧"
    # Rows may come in any order.
    order = np.array([3, 0, 5, 1, 4, 2])
    shuffled = [texts[row] for row in order]
    assert render_context(shuffled, windows[order], positions[order], 3, radius=1) == "the⟦ cat⟧ sat"


def test_permuted_and_turned_copies_are_matched() -> None:
    directions = unit(normal(12, 40)).numpy()
    order = np.random.default_rng(0).permutation(12)
    matching = match_directions(directions, turned(directions, 0.2)[order])
    assert (order[matching.second] == matching.first).all()
    assert matching.cosines == pytest.approx(np.full(12, math.cos(0.2)))
    # A direction is not its opposite.
    assert match_directions(directions, -directions, threshold=0.5).first.size == 0
    assert cosines_between(np.zeros((1, 3)), np.ones((1, 3))).tolist() == [[0.0]]
    with pytest.raises(SpecError, match="one space"):
        match_directions(np.ones((2, 3)), np.ones((2, 4)))


def test_random_directions_match_no_more_often_than_said() -> None:
    rank, d, trials = 12, 40, 100
    one = unit(normal(rank, d)).numpy()
    threshold = match_threshold(random_cosines(one, rank, draws=399, seed=0))
    assert threshold.shape == (rank,)
    false = 0
    for seed in range(trials):
        matching = match_directions(one, unit(normal(rank, d, seed=50 + seed)).numpy())
        false += int((matching.cosines >= threshold[matching.first]).sum())
    assert stats.binom.ppf(0.001, trials * rank, 0.05) <= false <= stats.binom.ppf(0.999, trials * rank, 0.05)
    with pytest.raises(SpecError, match="null"):
        match_threshold(np.zeros((0, 3)))


def test_concepts_of_unrelated_states_match_no_more_often_than_said() -> None:
    """Both nulls hold their level on fits to states that share nothing; the same concepts in new states all match."""
    rank, d, false = 6, 32, {"permuted": 0, "mixed": 0}
    pairs = 5
    for pair in range(pairs):
        first, other = (planted(500, d, rank, seed=1000 * pair + part)[0] for part in (0, 500))
        one = fit_concepts(first, rank, seed=0).directions.numpy()
        found = match_directions(one, fit_concepts(other, rank, seed=1).directions.numpy())
        nulls = {
            "permuted": permuted_cosines(one, other, rank, seeds=range(19)),
            "mixed": random_cosines(one, rank, draws=199, seed=pair, states=other.numpy()),
        }
        for name, null in nulls.items():
            false[name] += int((found.cosines >= match_threshold(null)[found.first]).sum())
    assert max(false.values()) <= stats.binom.ppf(0.99, pairs * rank, 0.05)


def test_a_common_mean_is_no_match() -> None:
    """Around one large mean, unrelated concepts share one: the mean. A null that keeps the mean knows that."""
    rank, d, mean = 7, 32, 1.2 * normal(1, 32, seed=77)
    first, other = (planted(800, d, rank - 1, seed=seed)[0] + mean for seed in (0, 100))
    one = fit_concepts(first, rank, seed=0).directions.numpy()
    found = match_directions(one, fit_concepts(other, rank, seed=0).directions.numpy())
    common = int(found.first[found.cosines.argmax()])
    assert found.cosines.max() > 0.99
    anywhere = match_threshold(random_cosines(one, rank, draws=199, seed=0))
    permuted = match_threshold(permuted_cosines(one, other, rank, seeds=range(19)))
    assert anywhere[common] < 0.5
    assert permuted[common] > 0.99
    # The others keep thresholds of their own, and those that the mean has not swallowed are matched in new states.
    _, _, directions = planted(800, d, rank - 1)
    codes = planted(800, d, rank - 1, seed=300)[1]
    again = fit_concepts(codes @ directions + 0.05 * normal(800, d, seed=5) + mean, rank, seed=1)
    matched = match_directions(one, again.directions.numpy(), threshold=permuted)
    apart = np.flatnonzero(cosines_between(mean.numpy(), one)[0] < 0.9)
    assert len(apart) >= rank - 2
    assert set(matched.first.tolist()) >= set(apart.tolist())


def test_births_drift_and_deaths_are_found_where_they_were_planted() -> None:
    pool = unit(normal(8, 64)).numpy()
    alive = [[0, 1, 2], [2, 0, 1], [3, 0, 2], [2, 3, 4, 0], [4, 3, 0]]
    steps, angle = [0, 10, 100, 1000, 10000], 0.1
    sets, now = [], pool
    for number, members in enumerate(alive):
        now = now if number == 0 else turned(now, angle, seed=number)
        sets.append(now[members])
    limits = [match_threshold(random_cosines(one, 4, draws=199, seed=0), false_matches=0.005) for one in sets[:-1]]
    tracks = follow_concepts(sets, steps, threshold=limits)
    lives = {
        alive[int((row >= 0).argmax())][row[row >= 0][0]]: (int(birth), int(death))
        for row, birth, death in zip(tracks.members, tracks.births, tracks.deaths, strict=True)
    }
    assert lives == {0: (0, -1), 1: (0, 100), 2: (0, 10000), 3: (100, -1), 4: (1000, -1)}
    assert tracks.angles[~np.isnan(tracks.angles)] == pytest.approx(np.full(11, angle))
    zero = tracks.members[tracks.members[:, 0] == 0][0]
    assert zero.tolist() == [0, 1, 1, 3, 2]
    rows = json.loads(json.dumps(tracks.rows(), allow_nan=False))
    assert [row["death"] for row in rows] == [None, 100, 10000, None, None]
    assert rows[1]["angles"] == [pytest.approx(angle), None, None, None]
    assert set(tracks.attach("tracks")) == {"tracks.steps", "tracks.members", "tracks.angles"}


def test_a_concept_of_length_zero_does_not_live() -> None:
    directions = np.eye(3)
    directions[1] = 0
    tracks = follow_concepts([directions, np.eye(3)], [0, 1], threshold=[0.5])
    assert tracks.members.tolist() == [[0, 0], [2, 2], [-1, 1]]
    single = follow_concepts([np.eye(2)], [7], threshold=0.5)
    assert single.births.tolist() == [7, 7]
    assert single.deaths.tolist() == [-1, -1]
    assert single.angles.shape == (2, 0)


@pytest.mark.parametrize(
    ("steps", "threshold", "message"),
    [([0], 0.5, "rising step"), ([1, 0], 0.5, "rising step"), ([0, 1], 0.0, "thresholds"), ([0, 1], [0.5, 0.5], "one")],
)
def test_bad_requests_are_refused(steps: list[int], threshold: float | list[float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        follow_concepts([np.eye(2), np.eye(2)], steps, threshold=threshold)
