"""How much of a gradient lies in a tangent space, and over which control that counts.

Coupled gradients, where the pairing of state and gradient matters, are held against paired windows (N6). Uncoupled ones
(activation gradients, embedding rows, updates) do not depend on the pairing: they are held against the hardest of Haar
(N5), coordinate signs (N9) and the next principal directions (N2). The paper's random normals (N1) are shown beside it
as `normal_ratio`: on coupled gradients they call everything significant, because a weight gradient lies where states
vary whether there is a signal or not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.gram import center, for_products, power_of_two_scale, working_dtype
from anisoscope.tangent.controls import DRAWS, energy_of, random_spaces, second_moment, sign_energies
from anisoscope.tangent.inference import (
    Interval,
    draw_permutations,
    jackknife_ratio,
    permutation_p,
    ratio_of_sums,
    sum_groups,
)
from anisoscope.tangent.proxies import LocalProxy, Proxy
from anisoscope.tangent.windows import LEAST_WINDOWS, Pairing, place_in_windows, stack_windows

UNCOUPLED_CONTROLS = ("haar", "signs", "next")


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """What a control gives: the mean of its draws, or the one value where nothing is drawn (p is NaN then)."""

    value: float
    p: float = math.nan
    draws: Float[Tensor, " m"] = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """The share of a gradient's energy in a tangent space, and what chance would give."""

    energy: Interval
    """`tangent_energy`, E(Q). The interval is over documents (uncoupled) or windows (coupled)."""
    gain: float
    """`tangent_gain`: E over the mean of N6 where it is coupled, over r/d where it is not."""
    excess: float
    """`tangent_excess`, the headline: E less the binding control."""
    control: str
    """The name of the binding control."""
    p: float
    normal_ratio: float
    """E over the mean of N1: the paper's measure."""
    normal_p: float
    variance_gain: float
    """E over the share of the test states' variance in the same subspace; NaN where no states were given."""
    signal_to_noise: float
    """⟨G₁Q, G₂Q⟩ / ‖(G₁ - G₂)Q‖² over halves of the windows; NaN for uncoupled gradients."""
    controls: Mapping[str, Control]
    rank: int
    dim: int
    note: str | None = None

    @property
    def control_value(self) -> float:
        """Of the binding control."""
        return self.controls[self.control].value if self.control in self.controls else math.nan


def coupled_alignment(
    pairing: Pairing,
    proxy: Proxy,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    untrained: Proxy | None = None,
) -> Alignment:
    """Of a weight gradient, virtual or a linear module's: E = ‖GQ‖² / ‖G‖², excess over N6.

    `draws` are those of N1; those of N6 were drawn with the pairing.
    """
    _check(proxy, pairing.dim)
    basis = proxy.basis.to(pairing.values)
    inside = pairing.products_in(basis)
    energy = jackknife_ratio(inside, pairing.products)
    moment = second_moment(pairing.gradient)
    controls = _normals(moment, proxy, energy.value, draws, seed, untrained)
    permuted = pairing.permuted_energies(basis) if pairing.note is None else torch.empty(0, dtype=torch.float64)
    controls["permuted"] = _drawn(energy.value, permuted)
    chance = controls["permuted"].value
    flat = pairing.values.flatten(0, 1)
    return Alignment(
        energy=energy,
        gain=energy.value / chance if chance else math.nan,
        excess=energy.value - chance,
        control="permuted",
        p=controls["permuted"].p,
        normal_ratio=_over(energy.value, controls.get("normal")),
        normal_p=controls["normal"].p if "normal" in controls else math.nan,
        variance_gain=energy.value / variance_share(flat, basis),
        signal_to_noise=pairing.split_halves(basis),
        controls=controls,
        rank=proxy.rank,
        dim=proxy.dim,
        note=_note(pairing.note, energy.value, proxy),
    )


def uncoupled_alignment(
    rows: Float[Tensor, "n d"],
    proxy: Proxy,
    *,
    documents: Int[Tensor, " n"] | None = None,
    states: Float[Tensor, "m d"] | None = None,
    controls: Sequence[str] = UNCOUPLED_CONTROLS,
    draws: int = DRAWS,
    seed: int = 0,
    untrained: Proxy | None = None,
) -> Alignment:
    """Of activation gradients, embedding gradient rows or updates: E = ‖AQ‖² / ‖A‖², excess over the hardest control.

    p is the larger of those of N5 and N9. `documents` are resampled whole for the interval (rows, where none are
    given); `states` are those of the same tokens.
    """
    _check(proxy, rows.shape[1])
    if "permuted" in controls:
        raise SpecError(
            "an uncoupled energy does not depend on which gradient goes with which state: permuted, it is the same "
            f"number. Its controls are {', '.join(UNCOUPLED_CONTROLS)}; for a permuted null ask for a coupled gradient"
        )
    if unknown := set(controls) - set(UNCOUPLED_CONTROLS):
        raise SpecError(f"controls are among {', '.join(UNCOUPLED_CONTROLS)}; came {', '.join(sorted(unknown))}")
    moment = second_moment(rows)
    groups = torch.arange(len(rows), device=rows.device) if documents is None else documents
    energy = ratio_of_sums(*energy_sums(rows, proxy.basis, groups), seed=seed)
    known = _normals(moment, proxy, energy.value, draws, seed, untrained)
    if float(moment.diagonal().sum()) > 0:
        known["signs"] = _drawn(energy.value, sign_energies(moment, proxy.basis, draws=draws, seed=seed))
    asked = {name: known[name] for name in controls if name in known and not math.isnan(known[name].value)}
    binding = max(asked, key=lambda name: asked[name].value, default="")
    tested = [asked[name].p for name in ("haar", "signs") if name in asked]
    return Alignment(
        energy=energy,
        gain=energy.value / (proxy.rank / proxy.dim),
        excess=energy.value - asked[binding].value if binding else math.nan,
        control=binding,
        p=max(tested, default=math.nan),
        normal_ratio=_over(energy.value, known.get("normal")),
        normal_p=known["normal"].p if "normal" in known else math.nan,
        variance_gain=math.nan if states is None else energy.value / variance_share(states, proxy.basis),
        signal_to_noise=math.nan,
        controls=known,
        rank=proxy.rank,
        dim=proxy.dim,
        note=_note(None, energy.value, proxy),
    )


def local_alignment(
    states: Float[Tensor, "n d"],
    gradients: Float[Tensor, "n d"],
    windows: Int[Tensor, " n"],
    proxy: LocalProxy,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Alignment:
    """E = Σ ‖Qᵢᵀaᵢ‖² / Σ ‖aᵢ‖², against gradients permuted between windows: another token's tangent space.

    Permutations add up a table of windows by windows: the energy of the gradients of one in the spaces of another.
    """
    if proxy.dim != states.shape[1]:
        raise SpecError(f"a proxy of {proxy.dim} coordinates cannot hold states of {states.shape[1]}")
    raw = gradients.to(working_dtype(gradients.dtype))
    raw = for_products(raw / power_of_two_scale(raw).to(raw.dtype))
    shaped = stack_windows(raw, windows)
    count = len(shaped)
    window, position = place_in_windows(windows)
    table = torch.zeros(count, count, dtype=torch.float64, device=raw.device)
    for part, bases in proxy.bases(states):
        # Of all windows the gradient at the token's position, in the token's space.
        inside = shaped[:, position[part]].transpose(0, 1) @ bases.to(raw)
        table.index_add_(0, window[part], inside.double().square().sum(2))
    below = shaped.double().square().sum((1, 2))
    energy = ratio_of_sums(table.diagonal(), below, seed=seed)
    enough = count >= LEAST_WINDOWS and float(below.sum()) > 0
    permutations = draw_permutations(draws if enough else 0, count, seed).orders.to(raw.device)
    permuted = (table[torch.arange(count, device=raw.device), permutations].sum(1) / below.sum()).cpu()
    control = _drawn(energy.value, permuted)
    chance = control.value
    few = f"{count} windows; a permuted null needs at least {LEAST_WINDOWS}" if count < LEAST_WINDOWS else None
    return Alignment(
        energy=energy,
        gain=energy.value / chance if chance else math.nan,
        excess=energy.value - chance,
        control="permuted",
        p=control.p,
        normal_ratio=math.nan,
        normal_p=math.nan,
        variance_gain=math.nan,
        signal_to_noise=math.nan,
        controls={"permuted": control},
        rank=proxy.rank,
        dim=proxy.dim,
        note="the gradients are zero" if math.isnan(energy.value) else few,
    )


def energy_sums(
    rows: Float[Tensor, "n d"], basis: Float[Tensor, "d r"], groups: Int[Tensor, " n"]
) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
    """Σ ‖Qᵀa‖² and Σ ‖a‖² over the rows of each group, in float64."""
    raw = rows.to(working_dtype(rows.dtype))
    squares = [torch.linalg.vector_norm(one, dim=1).double().square() for one in (raw @ basis.to(raw), raw)]
    sums = sum_groups(torch.stack(squares, 1), groups)
    return sums[:, 0], sums[:, 1]


def variance_share(states: Float[Tensor, "n d"], basis: Float[Tensor, "d r"]) -> float:
    """Share of the states' variance in a subspace; NaN where they do not vary."""
    around = center(states)
    inside = torch.linalg.vector_norm(around.points @ basis.to(around.points), dim=1).double().square().sum()
    total = float(around.squares.sum())
    return float(inside) / total if total > 0 and float(inside) > 0 else math.nan


def _normals(
    moment: Float[Tensor, "d d"], proxy: Proxy, energy: float, draws: int, seed: int, untrained: Proxy | None
) -> dict[str, Control]:
    """N1, N2, N3, N5 and N7, those that exist."""
    found: dict[str, Control] = {}
    if math.isnan(energy):
        return found
    if 2 * proxy.rank <= proxy.dim:
        spaces = random_spaces(moment, proxy.basis, draws=draws, seed=seed)
        found |= {"haar": _drawn(energy, spaces.haar), "normal": _drawn(energy, spaces.normal)}
    for name, basis in (("next", proxy.following), ("last", proxy.last)):
        if basis.shape[1] == proxy.rank:
            found[name] = Control(value=energy_of(moment, basis))
    if untrained is not None:
        _check(untrained, proxy.dim)
        found["untrained"] = Control(value=energy_of(moment, untrained.basis))
    return found


def _drawn(energy: float, draws: Float[Tensor, " m"]) -> Control:
    return Control(value=float(draws.mean()) if len(draws) else math.nan, p=permutation_p(energy, draws), draws=draws)


def _over(energy: float, control: Control | None) -> float:
    return energy / control.value if control is not None and control.value > 0 else math.nan


def _note(note: str | None, energy: float, proxy: Proxy) -> str | None:
    notes = [] if note is None else [note]
    if math.isnan(energy):
        notes.append("the gradients are zero")
    if 2 * proxy.rank > proxy.dim:
        notes.append(f"rank {proxy.rank} of {proxy.dim} coordinates leaves no normal space of the same rank")
    return "; ".join(notes) or None


def _check(proxy: Proxy, dim: int) -> None:
    if proxy.dim != dim:
        raise SpecError(f"a proxy of {proxy.dim} coordinates cannot hold gradients of {dim}: fit it at the same site")
    if proxy.rank == 0:
        raise SpecError("the proxy has no direction left: ask for a higher rank")
