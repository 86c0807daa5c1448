"""Which tokens make up a population: by hand, by seed, and on a cloud with sinks planted in it."""

import pytest
import torch
from torch import Tensor

from anisoscope.cloud import Cloud, Tokens, row_norms, select_population, typical_limit
from anisoscope.errors import SpecError
from anisoscope.estimates import evaluate
from anisoscope.metrics import all_metrics
from anisoscope.records import POPULATIONS


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(ids: list[int], positions: list[int], special: list[int] | None = None) -> Tokens:
    return Tokens(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        documents=torch.zeros(len(ids), dtype=torch.int64),
        special=torch.tensor(special or [0] * len(ids)).bool(),
    )


def select(name: str, points: Tensor, tokens: Tokens, *, k: float = 6.0, seed: int = 0) -> list[int]:
    return select_population(name, points, tokens, typical_k=k, seed=seed).tolist()


# Two windows of six tokens: a special token at the end of each, position 0 first, ids that repeat.
TOKENS = tokens_of(
    ids=[9, 1, 2, 1, 3, 8, 9, 2, 2, 4, 1, 8],
    positions=[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
    special=[0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1],
)
CONTENT = [1, 2, 3, 4, 7, 8, 9, 10]
# Of norms 1, 2, ... 12.
POINTS = torch.arange(1.0, 13).reshape(-1, 1) * torch.tensor([[0.6, 0.8]])


def test_all_is_every_token() -> None:
    assert select("all", POINTS, TOKENS) == list(range(12))


def test_content_leaves_out_special_tokens_and_first_positions() -> None:
    assert select("content", POINTS, TOKENS) == CONTENT


def test_content_leaves_out_special_tokens_anywhere_in_a_window() -> None:
    tokens = tokens_of(ids=[1, 2, 3, 4], positions=[3, 1, 0, 2], special=[1, 0, 0, 1])
    assert select("content", POINTS[:4], tokens) == [1]


def test_the_typical_limit_by_hand_where_the_deviation_decides() -> None:
    # Norms 1, 2, 3, 4, 10: median 3, deviations 2, 1, 0, 1, 7 with median 1.
    norms = torch.tensor([4.0, 1.0, 10.0, 3.0, 2.0], dtype=torch.float64)
    assert float(typical_limit(norms, 6.0)) == pytest.approx(3 + 6 * 1.4826 * 1)
    assert float(typical_limit(norms, 3.0)) == pytest.approx(3 + 3 * 1.4826 * 1)


def test_the_typical_limit_by_hand_where_twice_the_median_decides() -> None:
    # Nearly constant norms: by the deviation alone, 3 + 6 · 1.4826 · 0.01, a norm of 3.1 would be an outlier.
    norms = torch.tensor([2.98, 2.99, 3.0, 3.01, 3.02], dtype=torch.float64)
    assert float(typical_limit(norms, 6.0)) == pytest.approx(6)
    assert float(typical_limit(torch.full((7,), 3.0, dtype=torch.float64), 6.0)) == 6


def line_of_norms(*norms: float) -> Tensor:
    return torch.tensor(norms).reshape(-1, 1) * torch.tensor([[0.6, 0.8]])


def test_typical_leaves_out_content_above_the_limit_and_keeps_what_lies_on_it() -> None:
    # Norms of all six tokens: median (the lower one) 3, so that twice the median, 6, is the limit at k = 0.
    points = line_of_norms(3, 3, 6, 6.001, 2, 40)
    tokens = tokens_of(ids=[1] * 6, positions=[0, 1, 2, 3, 4, 5])
    assert select("typical", points, tokens, k=0.0) == [1, 2, 4]


def test_the_typical_limit_is_that_of_the_whole_batch_and_large_first_positions_do_not_return() -> None:
    # Were the median taken over content alone it would be 1, and 2.5 would be left out.
    points = line_of_norms(2, 2, 2, 2, 1, 1, 2.5)
    tokens = tokens_of(ids=[1] * 7, positions=[0, 0, 0, 0, 1, 2, 3])
    assert select("typical", points, tokens, k=0.0) == [4, 5, 6]


def test_norms_are_taken_in_float64_whatever_holds_the_points() -> None:
    # The norm is beyond float16, the square of the norm beyond float32.
    for value, dtype in ((4e4, torch.float16), (1e30, torch.float32), (1e30, torch.bfloat16)):
        points = torch.full((2, 4), value, dtype=dtype)
        assert row_norms(points).tolist() == pytest.approx([2 * float(points[0, 0])] * 2)
        assert row_norms(points).dtype == torch.float64


def test_types_are_one_content_token_for_each_id() -> None:
    chosen = select("types", POINTS, TOKENS)
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(CONTENT)
    assert sorted(TOKENS.ids[chosen].tolist()) == [1, 2, 3, 4]


def test_types_draw_every_occurrence_by_seed_about_equally_often() -> None:
    drawn = [set(select("types", POINTS, TOKENS, seed=seed)) for seed in range(300)]
    # Id 1 occurs at 1, 3 and 10; id 2 at 2, 7 and 8.
    for place in (1, 3, 10, 2, 7, 8):
        assert 65 < sum(place in chosen for chosen in drawn) < 135
    assert all({4, 9} <= chosen for chosen in drawn)


def test_types_and_matched_depend_on_ids_and_seed_only_so_that_every_site_has_the_same_tokens() -> None:
    ids = torch.randint(0, 40, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = tokens_of(ids, [place % 30 for place in range(300)])
    for name in ("types", "matched"):
        first = select(name, normal(300, 8), tokens, seed=5)
        assert select(name, 1e3 * normal(300, 64, seed=2).double(), tokens, seed=5) == first
        assert select(name, normal(300, 8), tokens, seed=6) != first


def test_types_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    select("types", POINTS, TOKENS)
    select("matched", POINTS, TOKENS)
    assert torch.equal(before, torch.random.get_rng_state())


def test_matched_is_a_random_part_of_content_with_as_many_points_as_types() -> None:
    drawn = [select("matched", POINTS, TOKENS, seed=seed) for seed in range(300)]
    for chosen in drawn:
        assert len(set(chosen)) == len(chosen) == 4
        assert chosen == sorted(chosen)
        # What it is compared with has neither special tokens nor first positions.
        assert set(chosen) <= set(CONTENT)
    # Each about as often as four of them all are.
    for place in CONTENT:
        assert abs(sum(place in chosen for chosen in drawn) - 300 * 4 / len(CONTENT)) < 45


def test_an_unknown_population_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SpecError, match="unknown population 'words'; there are all, content, typical, types, matched"):
        select("words", POINTS, TOKENS)


@pytest.mark.parametrize("name", POPULATIONS)
def test_windows_without_content_have_empty_populations_but_for_all(name: str) -> None:
    tokens = tokens_of(ids=[1, 2, 3], positions=[0, 1, 2], special=[0, 1, 1])
    assert select(name, POINTS[:3], tokens) == ([0, 1, 2] if name == "all" else [])


@pytest.mark.parametrize("name", POPULATIONS)
def test_taking_a_population_takes_everything_known_of_its_tokens(name: str) -> None:
    tokens = Tokens(
        ids=TOKENS.ids,
        positions=TOKENS.positions,
        documents=torch.arange(12),
        special=TOKENS.special,
        losses=torch.arange(12.0),
    )
    cloud = Cloud(points=POINTS, tokens=tokens, previous=POINTS + 1, neighbor_count=7)
    index = select_population(name, POINTS, tokens, typical_k=6.0, seed=0)
    part = cloud.take(index)
    assert part.tokens is not None
    assert part.tokens.documents.tolist() == part.tokens.losses.tolist() == index.tolist()  # pyright: ignore
    assert torch.equal(part.points, POINTS[index])
    assert torch.equal(part.previous, POINTS[index] + 1)  # pyright: ignore
    assert torch.equal(part.tokens.ids, TOKENS.ids[index])
    assert part.neighbor_count == 7
    assert len(part) == len(index)


def test_tokens_without_losses_have_none_after_taking() -> None:
    assert TOKENS.take(torch.tensor([0, 3])).losses is None


# Sinks: 16 of 8,192 tokens, at the first positions of 16 windows, of norm 23,700 where the others have 150.


@pytest.fixture(scope="module")
def sinks() -> Cloud:
    windows, length, d = 16, 512, 64
    points = normal(windows * length, d) * 150 / d**0.5
    direction = normal(d, seed=1)
    points[::length] = 23_700 * direction / direction.norm() + normal(windows, d, seed=2)
    positions = torch.arange(length).repeat(windows)
    ids = torch.randint(0, 1000, (windows * length,), generator=torch.Generator().manual_seed(3))
    return Cloud(
        points=points,
        tokens=Tokens(
            ids=ids,
            positions=positions,
            documents=torch.arange(windows).repeat_interleave(length),
            special=torch.zeros(windows * length, dtype=torch.bool),
        ),
    )


def leading_variance(cloud: Cloud) -> float:
    return float(evaluate(cloud, all_metrics()["leading_variance"], {}).value)


def population_of(cloud: Cloud, name: str) -> Cloud:
    assert cloud.tokens is not None
    return cloud.take(select_population(name, cloud.points, cloud.tokens, typical_k=6.0, seed=0))


def test_a_few_sink_tokens_own_the_leading_variance_of_all_and_not_of_typical(sinks: Cloud) -> None:
    every, content, typical = (population_of(sinks, name) for name in ("all", "content", "typical"))
    assert [len(sinks) - len(part) for part in (every, content, typical)] == [0, 16, 16]
    assert leading_variance(every) > 0.97
    assert leading_variance(content) < 0.03
    assert leading_variance(typical) < 0.03


def test_sinks_away_from_first_positions_are_left_out_of_typical_alone(sinks: Cloud) -> None:
    assert sinks.tokens is not None
    moved = Cloud(points=sinks.points.roll(5, 0), tokens=sinks.tokens)
    content, typical = population_of(moved, "content"), population_of(moved, "typical")
    assert [len(moved) - len(part) for part in (content, typical)] == [16, 32]
    assert leading_variance(content) > 0.97
    assert leading_variance(typical) < 0.03


def test_the_counts_left_out_of_types_and_matched_are_equal(sinks: Cloud) -> None:
    assert sinks.tokens is not None
    content = sinks.tokens.ids[sinks.tokens.positions > 0]
    types, matched = population_of(sinks, "types"), population_of(sinks, "matched")
    assert len(types) == len(matched) == len(content.unique())
    assert types.tokens is not None
    assert len(types.tokens.ids.unique()) == len(types)
