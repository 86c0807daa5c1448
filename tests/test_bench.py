"""What scripts/bench.py decides without a clock: what counts as worse and as met, how exponents are fitted."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    folder = Path(__file__).parent.parent / "scripts"
    # As `python scripts/bench.py` does: scripts find their neighbours.
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("bench", folder / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["bench"] = module
    spec.loader.exec_module(module)
    return module


def kept(median: float, spread: float = 0.0, better: str = "higher") -> dict[str, Any]:
    return {"median": median, "spread": spread, "better": better}


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (kept(40.0), kept(37.0), False),
        (kept(40.0), kept(35.0), True),
        (kept(40.0), kept(400.0), False),
        (kept(1.2, better="lower"), kept(1.3, better="lower"), False),
        (kept(1.2, better="lower"), kept(1.4, better="lower"), True),
        (kept(1.2, better="lower"), kept(0.4, better="lower"), False),
        (kept(40.0, spread=4.0), kept(30.0), False),
        (kept(40.0), kept(30.0, spread=4.0), False),
        (kept(40.0, spread=4.0), kept(27.0, spread=1.0), True),
    ],
)
def test_worse_is_beyond_a_tenth_and_beyond_the_spread_of_either_run(
    bench: ModuleType, before: dict[str, Any], after: dict[str, Any], worse: bool
) -> None:
    assert bench.regressed(before, after) is worse


def test_the_exponent_of_a_power_is_found(bench: ModuleType) -> None:
    sizes = [1024, 2048, 4096, 8192]
    assert bench.fit_exponent(sizes, [3e-9 * size**2 for size in sizes]) == pytest.approx(2.0)
    assert bench.fit_exponent(sizes, [0.5] * 4) == pytest.approx(0.0, abs=1e-12)


def test_a_ratio_is_taken_round_by_round(bench: ModuleType) -> None:
    """A machine that gets slower changes both sides, and not the ratio."""
    rounds = [
        {name: bench.Sample(wall=2 * slow * seconds, cpu=slow * seconds, value=value) for name, seconds, value in sides}
        for slow in (1.0, 7.0, 2.0)
        for sides in [(("ours", 0.5, 1.01), ("peer", 2.0, 1.1))]
    ]
    (found,) = bench.compare(rounds, "twonn", "cloud", "peer", reference=1.0, goal=3.0)
    assert (found.median, found.spread, found.other, found.repeats) == (4.0, 0.0, 4.0, 3)
    assert (found.our_error, found.their_error) == pytest.approx((0.01, 0.1))
    (slower,) = bench.compare(rounds, "twonn", "cloud", "peer", better="lower", scale=4.0)
    assert slower.median == 1 / 16
    assert bench.compare(rounds, "twonn", "cloud", "absent") == []


def test_faster_and_wrong_meets_no_goal(bench: ModuleType) -> None:
    fields = {
        "section": "twonn",
        "case": "",
        "against": "",
        "spread": 0.0,
        "repeats": 3,
        "better": "higher",
        "by": "cpu",
    }
    for median, our_error, met in ((2.0, 1e-7, True), (2.0, 0.2, False), (0.5, 1e-7, False)):
        result = bench.Result(median=median, goal=1.0, our_error=our_error, their_error=0.1, **fields)
        assert result.met is met
    nan = float("nan")
    assert not bench.Result(median=2.0, goal=1.0, our_error=0.2, their_error=nan, **fields).met
    assert bench.relative_error(nan, 7.0) == 1.0
    assert bench.Result(median=2.0, goal=1.0, our_error=bench.relative_error(7.0, nan), **fields).met


def test_what_is_kept_is_json_and_makes_the_page(bench: ModuleType) -> None:
    fields = {"section": "memory", "against": "64 k", "spread": 0.0, "repeats": 1, "better": "lower", "by": "bytes"}
    result = bench.Result(case="1 M", median=1.5, goal=1.1, **fields)
    entry = json.loads(json.dumps(result.entry(), allow_nan=False))
    page = bench.make_page({"machines": {"a CPU": "torch 2"}, "results": {result.key: entry}})
    assert "| memory: 1 M | 64 k | ≤ 1.1 | 1.50 | **not met** |" in page
