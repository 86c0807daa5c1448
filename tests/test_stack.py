"""Many clouds at once on a GPU: the same numbers as one cloud at a time. docs/log.md says when it last ran on one."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from anisoscope import stack
from anisoscope.cloud import Cloud, select_typical
from anisoscope.estimates import apply
from anisoscope.metrics import all_metrics, find_metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

SETTINGS = {"discard_fraction": 0.1, "isoscore_zeta": 0.25}
SPECTRAL, DIMENSIONAL = ("all", "typical"), ("all", "types", "matched")
# Relative errors against float64, cloud by cloud.
TOLERANCE = {"moments": 1e-5, "neighbors": 1e-5, "gram_sums": 5e-5, "directions": 1e-6}
# Σλ² is of products of float16 rows, whose errors average out, added up by tensor cores, which cut off: a participation
# ratio is exact to 5e-5. An IsoScore is (PR - 1) / (d - 1): its error is relative to PR, not to itself.


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def changed(points: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    points = points.clone()
    change(points)
    return points


def decaying(n: int = 2048, d: int = 320, power: float = -0.5) -> Tensor:
    return normal(n, d) * torch.arange(1, d + 1) ** power


def repeat_some(points: Tensor) -> None:
    points[500:530] = points[:30]
    points[600:640] = points[7]


def enlarge_some(points: Tensor) -> None:
    points[::250] *= 1e3


def bring_near(points: Tensor) -> None:
    points[500:700] = points[:200] + 1e-3 * normal(200, points.shape[1], seed=3)


CLOUDS = {
    "steep": lambda: decaying(power=-1.0),
    "slow decay": lambda: decaying(power=-0.3),
    "isotropic": lambda: normal(2048, 320),
    "n < d": lambda: normal(300, 700),
    "mean offset 100": lambda: decaying() + 100,
    "repeats": lambda: changed(decaying(), repeat_some),
    "sink tokens": lambda: changed(decaying(), enlarge_some),
    "near duplicates": lambda: changed(decaying(), bring_near),
    "a rogue coordinate": lambda: decaying() * torch.tensor([300.0] + [1.0] * 319),
    "two equal leading axes": lambda: normal(2048, 320) * torch.tensor([9.0, 9.0] + [1.0] * 318),
    "odd sizes": lambda: decaying(777, 301),
    "scale 1e-4": lambda: decaying() * 1e-4,
}


@contextlib.contextmanager
def no_clock(part: str) -> Iterator[None]:
    yield


def members_of(count: int, n: int) -> dict[str, Tensor]:
    content = torch.ones(count, n, dtype=torch.bool)
    content[:, ::100] = False
    generator = torch.Generator().manual_seed(5)
    some, others = torch.rand(2, count, n, generator=generator) < 0.35
    masks = {"all": torch.ones_like(content), "content": content, "types": some & content, "matched": others}
    return {name: mask.cuda() for name, mask in masks.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CLOUDS)
def test_a_stack_gives_what_single_clouds_give_in_float64(name: str, dtype: torch.dtype) -> None:
    points = torch.stack([CLOUDS[name](), CLOUDS[name]().roll(3, 0).flip(1)]).to(dtype).cuda()
    members = members_of(*points.shape[:2])
    found = stack.survey(points, members, SPECTRAL, DIMENSIONAL, 6.0, no_clock)
    for place, cloud in enumerate(points):
        if found.doubtful[place]:
            assert name in ("near duplicates", "mean offset 100"), "only what is hard may be left to the slow path"
            continue
        for metric in (item for item in all_metrics().values() if item.stacked):
            for population in DIMENSIONAL if metric.needs == "neighbors" else SPECTRAL:
                if population == "typical":
                    content = torch.nonzero(members["content"][place]).flatten()
                    index = select_typical(cloud, content, 6.0)
                else:
                    index = torch.nonzero(members[population][place]).flatten()
                single = Cloud(points=cloud[index].double())
                expected = float(apply(metric, getattr(single, metric.needs), SETTINGS))
                value = float(apply(metric, found.views[metric.needs][population], SETTINGS)[place])
                size = 1 if metric.name.startswith("isoscore") else abs(expected)
                near = pytest.approx(expected, rel=0, abs=TOLERANCE[metric.needs] * size + 1e-9)
                assert value == near, (metric.name, population, place)
                assert int(found.points[population][place]) == len(index)
                if metric.needs == "neighbors":
                    assert int(found.distinct[population][place]) == len(single.unique.index)


def test_squares_are_exact_at_the_size_of_real_layers() -> None:
    points = (decaying(4096, 2048, -0.3) + 0.3).bfloat16().cuda()[None]
    found = stack.survey(points, members_of(1, 4096), SPECTRAL, DIMENSIONAL, 6.0, no_clock)
    (metric,) = find_metrics(["participation_ratio"])
    expected = float(apply(metric, Cloud(points=points[0].double()).gram_sums, SETTINGS))
    assert float(apply(metric, found.views["gram_sums"]["all"], SETTINGS)[0]) == pytest.approx(expected, rel=5e-5)


def test_what_cannot_be_proven_is_named() -> None:
    points = normal(2, 600, 300).cuda()
    points[1] *= 1e25
    found = stack.survey(points, members_of(2, 600), SPECTRAL, DIMENSIONAL, 6.0, no_clock)
    assert found.doubtful.tolist() == [False, True]
