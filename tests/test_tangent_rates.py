"""What the tests of alignment call significant: no more than they may where there is no signal, and what is planted.

Signal-free states and gradients come in the four kinds that have fooled such tests; the proxy is always fitted on other
states. Rates are held against the binomial interval of their draws.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, kstest
from torch import Tensor

from anisoscope.gradients import mask_positions
from anisoscope.tangent.anisotropy import AnisotropyShare, anisotropy_share
from anisoscope.tangent.controls import second_moment
from anisoscope.tangent.energies import Alignment, coupled_alignment, uncoupled_alignment
from anisoscope.tangent.inference import permutation_p
from anisoscope.tangent.local import local_alignment
from anisoscope.tangent.proxies import fit_global, fit_local
from anisoscope.tangent.share_controls import ShareControls, permuted_shares, uncoupled_shares
from anisoscope.tangent.windows import pair_windows

DIM, RANK, WINDOWS, LENGTH = 64, 8, 32, 16
TOKENS = WINDOWS * LENGTH
# 500 draws of each, and of the cases that these leave out, are stored: see scripts/control_rates.py.
TRIALS, NOMINAL = 120, 0.05
DRAWS = 59
LABELS = torch.arange(WINDOWS).repeat_interleave(LENGTH)

Maker = Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor]]
"""States to fit on, states and gradients to test."""


def noise(chance: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=chance)


def axes(chance: torch.Generator) -> Tensor:
    return torch.linalg.qr(noise(chance, DIM, DIM)).Q


def varied(chance: torch.Generator, turn: Tensor) -> Tensor:
    """States whose variances fall like k^-1.2."""
    return noise(chance, TOKENS, DIM) * torch.arange(1, DIM + 1) ** -0.6 @ turn


def independent(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    turn = axes(chance)
    return varied(chance, turn), varied(chance, turn), varied(chance, axes(chance))


def serial(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours in a window resemble each other: in the gradients, and in the states the more the wider the axis."""
    turn, other = axes(chance), axes(chance)
    held = 0.95 * torch.arange(1, DIM + 1) ** -0.6
    fit, states = (_smoothed(varied(chance, torch.eye(DIM)), held) @ turn for _ in range(2))
    return fit, states, _smoothed(varied(chance, other), torch.full((DIM,), 0.95))


def _smoothed(rows: Tensor, held: Tensor) -> Tensor:
    """First-order autoregression along each window, of the same variance."""
    shaped = rows.view(WINDOWS, LENGTH, DIM)
    found = [shaped[:, 0]]
    for place in range(1, LENGTH):
        found.append(held * found[-1] + (1 - held.square()).sqrt() * shaped[:, place])
    return torch.stack(found, 1).reshape(TOKENS, DIM)


def rogue(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Six coordinates are large in the states and in the gradients."""
    large = torch.ones(DIM)
    large[torch.randperm(DIM, generator=chance)[:6]] = 8.0
    return tuple(noise(chance, TOKENS, DIM) * large for _ in range(3))  # type: ignore[return-value]


def common_mean(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A mean far from the origin, the same direction for states and gradients."""
    fit, states, gradients = independent(chance)
    mean = noise(chance, DIM)
    return fit + 3 * mean, states + 3 * mean, gradients + 3 * mean


NULLS: dict[str, Maker] = {
    "independent": independent,
    "serial": serial,
    "rogue": rogue,
    "common mean": common_mean,
}


def masked(alike: bool) -> Maker:
    """Masked states lie apart, and gradients are there for masked tokens alone and know nothing else of them.

    Masks stand at the same positions in every window, or at others in each.
    """

    def make(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        turn, away = axes(chance), 3 * noise(chance, DIM) / math.sqrt(DIM)

        def hidden() -> Tensor:
            special = torch.zeros(WINDOWS, LENGTH, dtype=torch.bool)
            if alike:
                return mask_positions(special, int(torch.randint(1 << 30, (), generator=chance))).view(-1, 1)
            return torch.rand(TOKENS, 1, generator=chance) < 0.15

        fit_hidden, here = hidden(), hidden()
        fit = varied(chance, turn) + fit_hidden * away
        # All masked tokens are taught something alike, as at the beginning of a training.
        taught = here * (noise(chance, DIM) + noise(chance, TOKENS, DIM)) + 0.1 * noise(chance, TOKENS, DIM)
        return fit, varied(chance, turn) + here * away, taught

    return make


def planted(inside: bool) -> Maker:
    """Gradients that follow the states along their second to fourth axes, or along three far outside the proxy."""

    def make(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        turn = axes(chance)
        fit, states = varied(chance, turn), varied(chance, turn)
        along = turn[1:4] if inside else turn[40:43]
        # As strong in either place.
        signal = states @ along.T / (states @ along.T).std() @ noise(chance, 3, DIM) / math.sqrt(3)
        return fit, states, noise(chance, TOKENS, DIM) + signal

    return make


def toward(inside: bool) -> Maker:
    """Gradients that are large along the tangent space, whatever the states, or along one far outside the proxy."""

    def make(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        turn = axes(chance)
        along = turn[:RANK] if inside else turn[40 : 40 + RANK]
        gradients = noise(chance, TOKENS, DIM) + 2 * noise(chance, TOKENS, RANK) @ along
        return varied(chance, turn), varied(chance, turn), gradients

    return make


def trial(make: Maker, seed: int, *, coupled: bool) -> Alignment:
    fit, states, gradients = make(torch.Generator().manual_seed(seed))
    proxy = fit_global(fit, rank=RANK)
    if coupled:
        pairing = pair_windows(states, gradients, LABELS, draws=DRAWS, seed=seed)
        return coupled_alignment(pairing, proxy, draws=19, seed=seed)
    return uncoupled_alignment(gradients, proxy, documents=LABELS, draws=DRAWS, seed=seed)


def at_most_nominal(flagged: int, trials: int) -> bool:
    """Whether the rate may be nominal: the interval of 99 % reaches down to it."""
    return binomtest(flagged, trials).proportion_ci(0.99).low <= NOMINAL


@pytest.mark.parametrize("kind", NULLS)
def test_signal_free_coupled_gradients_are_not_called_tangent(kind: str) -> None:
    found = [trial(NULLS[kind], seed, coupled=True) for seed in range(TRIALS)]
    assert at_most_nominal(sum(one.p <= NOMINAL for one in found), TRIALS)
    permuted = [one.controls["permuted"] for one in found]
    gains = np.array([one.energy.value / control.value for one, control in zip(found, permuted, strict=True)])
    assert abs(gains.mean() - 1) < 4 * gains.std() / math.sqrt(TRIALS)
    # The control that decides is never easier.
    assert all(one.p >= control.p for one, control in zip(found, permuted, strict=True))
    if kind == "independent":
        assert min(one.p for one in found) >= 1 / (DRAWS + 1)
        # p has steps of 1/60: spread out evenly within a step, it is uniform.
        steps = np.random.default_rng(0).uniform(size=TRIALS) / (DRAWS + 1)
        spread = np.array([control.p for control in permuted]) - steps
        assert kstest(spread, "uniform").pvalue > 0.001
    # The paper's control calls them so, nearly always.
    assert sum(one.normal_p <= NOMINAL for one in found) / TRIALS > 0.95


def test_gradients_that_know_of_nothing_but_masks_are_not_called_tangent() -> None:
    """As an encoder's are that has learned nothing: masks that differ from window to window would call them so."""
    found = [trial(masked(alike=True), seed, coupled=True) for seed in range(TRIALS)]
    assert at_most_nominal(sum(one.p <= NOMINAL for one in found), TRIALS)
    excess = np.array([one.energy.value - one.controls["permuted"].value for one in found])
    assert abs(excess.mean()) < 4 * excess.std() / math.sqrt(TRIALS)
    apart = [trial(masked(alike=False), seed, coupled=True) for seed in range(60)]
    assert sum(one.controls["permuted"].p <= NOMINAL for one in apart) > 40

    def follow(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and what is taught goes with the states along their second to fourth axes."""
        fit, states, gradients = masked(alike=True)(chance)
        along = states @ fit_global(fit, rank=4).basis[:, 1:]
        return fit, states, gradients + along / along.std() @ noise(chance, 3, DIM) / math.sqrt(3)

    # 43 of 50: what masks share is in every pairing, and a signal stands out less beside it.
    assert sum(trial(follow, seed, coupled=True).p <= NOMINAL for seed in range(50)) >= 40


SHARES = ("isoscore_change", "anisotropic_energy")


def share_trial(make: Maker, seed: int, *, coupled: bool) -> tuple[AnisotropyShare, ShareControls]:
    fit, states, gradients = make(torch.Generator().manual_seed(seed))
    proxy = fit_global(fit, rank=RANK)
    pairing = pair_windows(states, gradients, LABELS, draws=DRAWS, seed=seed)
    moment = pairing.moments[0] if coupled else second_moment(gradients)
    share = anisotropy_share(moment, proxy, draws=19, seed=seed)
    if coupled:
        ((null,),) = permuted_shares(pairing, [[proxy]], [[share]], zeta=0.25)
    else:
        ((null,),) = uncoupled_shares(moment[None], [[proxy]], [[share]], zeta=0.25, draws=DRAWS, seed=seed)
    return share, null


def flagged(trials: Sequence[tuple[AnisotropyShare, ShareControls]], way: str) -> int:
    """By every control with draws, and above the next directions where the gradients are uncoupled."""
    count = 0
    for share, null in trials:
        above = "permuted" in null[way] or getattr(share, way).tangent > getattr(share, way).following
        count += above and max(one.p for one in null[way].values()) <= NOMINAL
    return count


def test_gradients_that_know_of_nothing_but_masks_have_no_share_of_anisotropy_beyond_their_control() -> None:
    found = [share_trial(masked(alike=True), seed, coupled=True) for seed in range(TRIALS)]
    for way in SHARES:
        assert at_most_nominal(flagged(found, way), TRIALS)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("kind", NULLS)
def test_signal_free_gradients_have_no_share_of_anisotropy_beyond_its_controls(kind: str, coupled: bool) -> None:
    found = [share_trial(NULLS[kind], seed, coupled=coupled) for seed in range(TRIALS)]
    for way in SHARES:
        assert at_most_nominal(flagged(found, way), TRIALS)
        if coupled or kind == "rogue":
            # The paper's control calls them tangent, nearly always; of 19 draws p is .05 at least.
            assert sum(getattr(share, way).p <= 1 / 19 for share, _ in found) / TRIALS > 0.8


def test_a_planted_share_is_found_by_its_energy_and_hardly_by_its_isoscore() -> None:
    """A signal makes what is left of a gradient uneven too, with its own pairs and with others."""
    inside, outside = (
        [share_trial(planted(place), seed, coupled=True) for seed in range(50)] for place in (True, False)
    )
    assert flagged(inside, "anisotropic_energy") >= 48
    assert flagged(outside, "anisotropic_energy") <= 2
    assert flagged(inside, "isoscore_change") <= 2


def test_an_uncoupled_share_is_found_in_both_ways_and_not_outside() -> None:
    inside, outside = (
        [share_trial(toward(place), seed, coupled=False) for seed in range(50)] for place in (True, False)
    )
    for way in SHARES:
        assert flagged(inside, way) >= 48
        assert flagged(outside, way) == 0


@pytest.mark.parametrize("kind", NULLS)
def test_signal_free_uncoupled_gradients_are_not_called_tangent(kind: str) -> None:
    found = [trial(NULLS[kind], seed, coupled=False) for seed in range(TRIALS)]
    assert at_most_nominal(sum(one.p <= NOMINAL for one in found), TRIALS)
    if kind == "rogue":
        for name in ("haar", "normal"):
            assert sum(one.controls[name].p <= NOMINAL for one in found) / TRIALS > 0.95


def test_single_tokens_must_not_be_permuted() -> None:
    """Where neighbours resemble each other, permuting tokens calls signal-free gradients significant."""
    flagged = 0
    for seed in range(60):
        chance = torch.Generator().manual_seed(seed)
        fit, states, gradients = serial(chance)
        basis, states = fit_global(fit, rank=RANK).basis, states - states.mean(0)

        def energy(
            order: Tensor, gradients: Tensor = gradients, states: Tensor = states, basis: Tensor = basis
        ) -> float:
            whole = gradients[order].T @ states
            return float((whole @ basis).square().sum() / whole.square().sum())

        draws = torch.tensor([energy(torch.randperm(TOKENS, generator=chance)) for _ in range(19)])
        flagged += permutation_p(energy(torch.arange(TOKENS)), draws) <= NOMINAL
    assert flagged > 30


def test_a_planted_tangent_signal_is_found() -> None:
    found = [trial(planted(True), seed, coupled=True) for seed in range(100)]
    assert sum(one.p <= NOMINAL for one in found) >= 95
    assert all(one.gain > 1 for one in found)
    assert sum(one.normal_p <= NOMINAL for one in found) >= 95


def test_a_planted_normal_signal_is_not_called_tangent() -> None:
    found = [trial(planted(False), seed, coupled=True) for seed in range(100)]
    assert at_most_nominal(sum(one.p <= NOMINAL for one in found), 100)
    assert np.mean([one.excess for one in found]) < 0


def test_uncoupled_signals() -> None:
    tangent = [trial(toward(True), seed, coupled=False) for seed in range(100)]
    assert sum(one.p <= NOMINAL and one.excess > 0 for one in tangent) >= 95
    outside = [trial(toward(False), seed, coupled=False) for seed in range(100)]
    assert sum(one.p <= NOMINAL for one in outside) == 0
    assert all(one.excess < 0 for one in outside)


@pytest.mark.parametrize("kind", NULLS)
def test_halves_of_the_windows_do_not_agree_where_there_is_no_signal(kind: str) -> None:
    """The null of gradient_signal_to_noise is 0; where gradients follow the states it is above all of these."""

    def follow(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        fit, states, gradients = NULLS[kind](chance)
        return fit, states, gradients + states @ noise(chance, DIM, DIM)

    found = torch.tensor([trial(NULLS[kind], seed, coupled=True).signal_to_noise for seed in range(200)])
    assert abs(float(found.mean())) <= 4 * float(found.std()) / math.sqrt(len(found))
    assert min(trial(follow, seed, coupled=True).signal_to_noise for seed in range(20)) > float(found.max())


@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("kind", NULLS)
def test_signal_free_gradients_are_in_no_local_tangent_space(kind: str, share: float) -> None:
    """Nor where a population leaves windows of unequal lengths."""
    found = []
    for seed in range(100):
        chance = torch.Generator().manual_seed(seed)
        fit, states, gradients = NULLS[kind](chance)
        keep = torch.rand(len(states), generator=chance) <= share
        proxy = fit_local(fit, rank=3, neighbors=12)
        found.append(local_alignment(states, gradients, LABELS, proxy, keep=keep, draws=DRAWS, seed=seed))
    assert at_most_nominal(sum(one.p <= NOMINAL for one in found), 100)
    # On average the null is the energy.
    excess = torch.tensor([one.excess for one in found])
    assert abs(float(excess.mean())) <= 4 * float(excess.std()) / math.sqrt(len(excess))


def test_tokens_that_are_not_kept_count_for_nothing_in_local_tangent_spaces() -> None:
    chance = torch.Generator().manual_seed(0)
    fit, states, gradients = NULLS["independent"](chance)
    keep = torch.rand(len(states), generator=chance) < 0.7
    proxy = fit_local(fit, rank=3, neighbors=12)
    one = local_alignment(states, gradients, LABELS, proxy, keep=keep)
    for wrong in (math.inf, 1e6):
        spoiled = [torch.where(keep[:, None], rows, wrong) for rows in (states, gradients)]
        two = local_alignment(*spoiled, LABELS, proxy, keep=keep)
        assert (two.energy, two.p, two.controls["permuted"].value) == (
            one.energy,
            one.p,
            one.controls["permuted"].value,
        )
    inside = torch.cat([bases for _, bases in proxy.bases(states[keep])])
    rows = gradients[keep]
    share = (rows[:, None] @ inside).square().sum() / rows.square().sum()
    assert one.energy.value == pytest.approx(float(share), rel=1e-5)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_along_a_circle_are_in_its_local_tangent_spaces(inside: bool) -> None:
    """No global proxy could tell along from across: both fill the plane."""
    flagged = 0
    for seed in range(30):
        chance = torch.Generator().manual_seed(seed)
        angles = 2 * math.pi * torch.rand(2, TOKENS, generator=chance)
        plane = axes(chance)[:2]
        fit, states = torch.stack([angles.cos(), angles.sin()], 2) @ plane
        along = torch.stack([-angles[1].sin(), angles[1].cos()], 1) @ plane
        signal = (along if inside else states) * noise(chance, TOKENS, 1)
        gradients = noise(chance, TOKENS, DIM) + 2 * signal
        proxy = fit_local(fit, rank=1, neighbors=9)
        flagged += local_alignment(states, gradients, LABELS, proxy, draws=DRAWS, seed=seed).p <= NOMINAL
    assert flagged >= 28 if inside else flagged <= 4
