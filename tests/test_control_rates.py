"""Controls of gradient alignment: the stored rates, a few draws that agree with them, and the controls themselves."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from anisoscope.tangent.controls import energy_of, second_moment
from anisoscope.tangent.energies import Alignment, Control, coupled_alignment, hardest, uncoupled_alignment
from anisoscope.tangent.inference import bootstrap_leads, jackknife_leads
from anisoscope.tangent.proxies import fit_global
from anisoscope.tangent.windows import choose_windows, flipped_energies, pair_windows

ROOT = Path(__file__).parent.parent
SHORT = 10


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("control_rates", ROOT / "scripts" / "control_rates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["control_rates"] = module
    spec.loader.exec_module(module)
    return module


script = _script()
STORED: dict[str, Any] = json.loads(script.STORED.read_text("utf-8"))
CASES = {(case.what, case.coupled): case for case in script.CASES}


def stored(what: str, *, coupled: bool) -> dict[str, Any]:
    (found,) = [one for one in STORED["cases"] if (one["case"], one["gradient"] == "coupled") == (what, coupled)]
    return found


def at_most_nominal(rate: float, draws: int) -> bool:
    """Whether the rate may be nominal: the interval of 99 % reaches down to it."""
    return binomtest(round(rate * draws), draws).proportion_ci(0.99).low <= script.NOMINAL


def test_the_stored_rates_are_those_of_all_cases_and_stand_in_the_documentation() -> None:
    assert [(one["case"], one["gradient"] == "coupled", tuple(one["holds"])) for one in STORED["cases"]] == [
        (case.what, case.coupled, case.holds) for case in script.CASES
    ]
    assert script.table(STORED) in script.PAGE.read_text("utf-8")


@pytest.mark.parametrize("key", CASES, ids=str)
def test_of_500_draws_without_a_signal_at_most_the_nominal_share_is_flagged(key: tuple[str, bool]) -> None:
    case, found = CASES[key], stored(key[0], coupled=key[1])
    assert found["draws"] >= 500
    if case.signal:
        assert found["rates"]["hardest"] >= 0.95
        return
    for name in (*case.holds, "hardest"):
        assert at_most_nominal(found["rates"][name], found["draws"]), name


def test_every_mended_fault_was_one() -> None:
    for what, coupled in (
        ("document means, windows of each: 4", True),
        ("sizes by class of state", True),
        ("equal energy in directions 1 to 2r", False),
    ):
        assert stored(what, coupled=coupled)["rates"]["before"] > 0.4
    for one in STORED["models"]:
        assert at_most_nominal(one["rates"]["hardest"], one["draws"])
        assert one["rates"]["before"] > 0.3


@pytest.mark.parametrize("key", CASES, ids=str)
def test_a_few_draws_agree_with_the_stored_rates(key: tuple[str, bool]) -> None:
    found, known = script.rates(CASES[key], SHORT), stored(key[0], coupled=key[1])
    for name in ("hardest", *CASES[key].holds):
        # In one of ten thousand series of as many draws a count is farther from the stored rate.
        count = round(found["rates"][name] * SHORT)
        assert binomtest(count, SHORT, min(max(known["rates"][name], 0.01), 0.99)).pvalue > 1e-4, name


def test_windows_that_share_a_document_are_used_once() -> None:
    windows = torch.arange(40).repeat_interleave(4)
    assert choose_windows(windows, windows)[1] is None
    # Window 1 reaches into the documents of both of its neighbours.
    documents = windows.clone()
    documents[4], documents[7] = 0, 2
    chosen, note = choose_windows(windows, documents)
    assert chosen is not None
    assert chosen.tolist() == [0, *range(2, 40)]
    assert note == "one window of each document: 39 of 40"
    chosen, note = choose_windows(windows, windows // 2)
    assert chosen is None
    assert note == "40 windows, 20 without a document in common; a permuted null needs at least 32 from documents apart"


def test_of_windows_of_one_document_the_others_change_nothing() -> None:
    chance = torch.Generator().manual_seed(0)
    states, gradients = (torch.randn(64 * 4, 12, generator=chance) for _ in range(2))
    windows, proxy = torch.arange(64).repeat_interleave(4), fit_global(states, rank=3)
    documents, first = windows // 2, windows % 2 == 0
    found = coupled_alignment(pair_windows(states, gradients, windows, documents=documents), proxy)
    alone = coupled_alignment(pair_windows(states[first], gradients[first], windows[first]), proxy)
    assert found.energy == alone.energy
    assert found.p == alone.p
    assert (found.note, alone.note) == ("one window of each document: 32 of 64", None)


def aligned(seed: int = 0, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    states = torch.randn(33 * 5, 12, generator=chance, dtype=torch.float64) * torch.arange(1, 13) ** -0.5 + 1
    gradients = torch.randn(33 * 5, 9, generator=chance, dtype=torch.float64) + 0.5
    gradients[torch.rand(33 * 5, generator=chance) < 0.3] *= 3
    return states, gradients, torch.arange(33).repeat_interleave(5)


def test_directions_are_permuted_and_sizes_stay() -> None:
    states, gradients, windows = aligned()
    keep = torch.rand(len(states), generator=torch.Generator().manual_seed(1)) < 0.8
    pairing = pair_windows(states, gradients, windows, keep=keep, draws=20)
    basis = torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).Q
    seen = pairing.look_in(basis[None, None])
    around = torch.where(keep[:, None], states - states[keep].mean(0), 0)
    sizes = gradients.norm(dim=1, keepdim=True)
    directions, scaled = torch.where(keep[:, None], gradients / sizes, 0), sizes * around

    def energy(order: list[int]) -> float:
        rows = torch.cat([torch.arange(5) + 5 * window for window in order])
        whole = directions[rows].T @ scaled
        return float((whole @ basis).square().sum() / whole.square().sum())

    expected = [energy(order) for order in pairing.permutations.orders.tolist()]
    torch.testing.assert_close(seen.permuted_directions[0, 0], torch.tensor(expected, dtype=torch.float64))
    # In their own order they make the gradient itself.
    own = float(seen.products.sum() / pairing.products.sum())
    assert own == pytest.approx(energy(list(range(33))), rel=1e-10)


def test_window_signs_are_those_of_sums_over_windows() -> None:
    states, gradients, windows = aligned()
    pairing = pair_windows(states, gradients, windows, draws=20)
    basis = torch.eye(12, 3, dtype=torch.float64)
    seen = pairing.look_in(basis[None, None])
    parts = (pairing.gradients.mT @ pairing.values)[0]
    found = flipped_energies(seen.products[0], pairing.products, pairing.signs)[0]
    for energy, signs in zip(found.tolist(), pairing.signs, strict=True):
        whole = (signs[:, None, None] * parts).sum(0)
        assert energy == pytest.approx(float((whole @ basis).square().sum() / whole.square().sum()), rel=1e-9)
    assert set(pairing.signs.unique().tolist()) == {-1, 1}


def test_the_control_of_the_largest_p_decides() -> None:
    controls = {
        "one": Control(value=0.5, p=0.01),
        "other": Control(value=0.3, p=0.2),
        "shown": Control(value=0.9, p=0.9),
        "equal": Control(value=0.4, p=0.2),
    }
    assert hardest(controls, ("one", "other")) == "other"
    assert hardest(controls, ("one", "other", "equal")) == "equal"
    assert hardest(controls | {"one": Control(value=0.1)}, ("one", "other")) == "one"
    assert hardest({}, ("one",)) == ""


def follows(found: Alignment) -> bool:
    binding = found.controls[found.control]
    return (found.control_value, found.p) == (binding.value, binding.p)


def test_excess_and_p_are_about_the_same_control() -> None:
    """Before, the excess was over the next directions, and p that of another control."""
    one = script.level()(torch.Generator().manual_seed(1))
    proxy = fit_global(one.fit, rank=script.RANK)
    found = uncoupled_alignment(one.gradients, proxy, documents=one.documents, states=one.states)
    assert found.control == "next"
    assert follows(found)
    assert found.excess == found.energy.value - found.control_value
    assert found.p == max(found.controls[name].p for name in ("haar", "signs", "span", "next")) > 0.05
    # Without states the next directions are taken as they are.
    plain = uncoupled_alignment(one.gradients, proxy, documents=one.documents).controls["next"].value
    assert plain == pytest.approx(energy_of(second_moment(one.gradients), proxy.following), rel=1e-5)
    assert found.controls["next"].value > plain
    few = uncoupled_alignment(one.gradients, proxy, documents=one.documents // 2)
    assert few.note == "16 documents; p against next needs at least 32"
    assert few.p != few.p


def test_leads_are_one_sided_and_of_pairs() -> None:
    chance = torch.Generator().manual_seed(0)
    shared = torch.rand(40, 1, generator=chance, dtype=torch.float64) + 0.5
    a, c = shared + 0.1, shared + 0.01 * torch.randn(40, 1, generator=chance, dtype=torch.float64)
    below = torch.ones(40, 1, dtype=torch.float64)
    sums = torch.stack([torch.cat(pair, 1) for pair in ((a, c, a), (below,) * 3, (c, a, a), (below,) * 3)], 2)
    ahead, behind, same = bootstrap_leads(sums, seed=0)
    # Small beside what documents differ by, which both share.
    assert ahead == pytest.approx(1 / 1000)
    assert behind > 0.99
    assert same == 1
    for scale in (1e-200, 1e150):
        assert bootstrap_leads(sums * scale, seed=0) == pytest.approx([ahead, behind, same], abs=2e-3)


def test_leads_over_shuffled_targets_leave_out_windows_of_both() -> None:
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 6, generator=chance, dtype=torch.float64) + 1
    inside = rows[:, :3]
    one, whole = inside @ inside.T, rows @ rows.T
    other = torch.randn(20, 6, generator=chance, dtype=torch.float64) + 1
    (p,) = jackknife_leads(one[None], whole[None], (other[:, :3] @ other[:, :3].T)[None], (other @ other.T)[None])
    from scipy.stats import t

    def difference(left: torch.Tensor) -> float:
        parts = [some[left].sum(0).square() for some in (rows, other)]
        return float(parts[0][:3].sum() / parts[0].sum() - parts[1][:3].sum() / parts[1].sum())

    every = torch.ones(20, dtype=torch.bool)
    left = torch.tensor([difference(every & (torch.arange(20) != out)) for out in range(20)])
    error = float((19 * left.var(correction=0)).sqrt())
    assert p == pytest.approx(t.sf(difference(every) / error, 19), rel=1e-3)
    assert jackknife_leads(one[None], whole[None], one[None], whole[None]) == [0.5]
