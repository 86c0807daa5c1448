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
from anisoscope.tangent.controls import (
    DRAWS,
    RandomSpaces,
    energies_of,
    random_spaces_beside,
    second_moment,
    sign_energies,
)
from anisoscope.tangent.inference import (
    Interval,
    draw_permutations,
    jackknife_ratio,
    permutation_p,
    ratio_of_sums,
    ratios_of_sums,
    sum_groups,
)
from anisoscope.tangent.proxies import LocalProxy, Proxy
from anisoscope.tangent.windows import LEAST_WINDOWS, Pairing, place_in_windows, signal_to_noise, stack_windows

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
    return coupled_alignments(pairing, [proxy], draws=draws, seed=seed, untrained=untrained)[0]


def coupled_alignments(
    pairing: Pairing,
    proxies: Sequence[Proxy],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    untrained: Proxy | None = None,
    spaces: Sequence[RandomSpaces | None] | None = None,
) -> list[Alignment]:
    """Of one gradient for several proxies, which costs little more than for one.

    `spaces` are those of `spaces_beside` for the pairing's moment, where they are known.
    """
    for proxy in proxies:
        _check(proxy, pairing.dim)
    seen = pairing.look_in([proxy.basis for proxy in proxies]) if proxies else []
    whole = pairing.products.cpu()
    energies = [jackknife_ratio(one.products, whole) for one in seen]
    known = _normals(pairing.moment, proxies, [one.value for one in energies], draws, seed, untrained, spaces)
    found = []
    for proxy, one, energy, controls in zip(proxies, seen, energies, known, strict=True):
        controls["permuted"] = _drawn(energy.value, one.permuted)
        chance = controls["permuted"].value
        found.append(
            Alignment(
                energy=energy,
                gain=energy.value / chance if chance else math.nan,
                excess=energy.value - chance,
                control="permuted",
                p=controls["permuted"].p,
                normal_ratio=_over(energy.value, controls.get("normal")),
                normal_p=controls["normal"].p if "normal" in controls else math.nan,
                variance_gain=energy.value / one.variance_share if one.variance_share > 0 else math.nan,
                signal_to_noise=signal_to_noise(one.products),
                controls=controls,
                rank=proxy.rank,
                dim=proxy.dim,
                note=_note(pairing.note, energy.value, proxy),
            )
        )
    return found


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
    settings = {"states": states, "controls": controls, "draws": draws, "seed": seed, "untrained": untrained}
    return uncoupled_alignments(rows, [proxy], documents=documents, **settings)[0]


def uncoupled_alignments(
    rows: Float[Tensor, "n d"],
    proxies: Sequence[Proxy],
    *,
    documents: Int[Tensor, " n"] | None = None,
    states: Float[Tensor, "m d"] | None = None,
    controls: Sequence[str] = UNCOUPLED_CONTROLS,
    draws: int = DRAWS,
    seed: int = 0,
    untrained: Proxy | None = None,
    moment: Float[Tensor, "d d"] | None = None,
    squares: Float[Tensor, "n k"] | None = None,
    spaces: Sequence[RandomSpaces | None] | None = None,
) -> list[Alignment]:
    """Of the same rows for several proxies, which costs little more than for one.

    `moment` is their `second_moment`, `squares` are `row_squares` of them and `spaces` those of `spaces_beside`, where
    they are known.
    """
    for proxy in proxies:
        _check(proxy, rows.shape[1])
    if "permuted" in controls:
        raise SpecError(
            "an uncoupled energy does not depend on which gradient goes with which state: permuted, it is the same "
            f"number. Its controls are {', '.join(UNCOUPLED_CONTROLS)}; for a permuted null ask for a coupled gradient"
        )
    if unknown := set(controls) - set(UNCOUPLED_CONTROLS):
        raise SpecError(f"controls are among {', '.join(UNCOUPLED_CONTROLS)}; came {', '.join(sorted(unknown))}")
    moment = second_moment(rows) if moment is None else moment
    squares = row_squares(rows, [proxy.basis for proxy in proxies]) if squares is None else squares
    sums = squares if documents is None else sum_groups(squares, documents.cpu())
    energies = ratios_of_sums(sums[:, :-1], sums[:, -1:].expand(-1, len(proxies)), seed=seed)
    every = _normals(moment, proxies, [one.value for one in energies], draws, seed, untrained, spaces)
    if float(moment.diagonal().sum()) > 0:
        signs = sign_energies(moment, [proxy.basis for proxy in proxies], draws=draws, seed=seed)
        for known, energy, drawn in zip(every, energies, signs, strict=True):
            known["signs"] = _drawn(energy.value, drawn)
    found = []
    for proxy, energy, known in zip(proxies, energies, every, strict=True):
        asked = {name: known[name] for name in controls if name in known and not math.isnan(known[name].value)}
        binding = max(asked, key=lambda name: asked[name].value, default="")
        tested = [asked[name].p for name in ("haar", "signs") if name in asked]
        found.append(
            Alignment(
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
        )
    return found


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
    shaped = stack_windows([raw], windows)[0]
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
    sums = sum_groups(row_squares(rows, [basis]), groups.cpu())
    return sums[:, 0], sums[:, 1]


def row_squares(rows: Float[Tensor, "n d"], bases: Sequence[Tensor]) -> Float[Tensor, "n k"]:
    """‖Qᵀa‖² of every row for each basis and, last, ‖a‖²; float64, on the CPU: what follows is small."""
    raw = rows.to(working_dtype(rows.dtype))
    inside = raw @ torch.cat([one.to(raw) for one in bases], 1)
    parts = [*inside.split([one.shape[1] for one in bases], 1), raw]
    return torch.stack([torch.linalg.vector_norm(one, dim=1) for one in parts], 1).double().square().cpu()


def variance_share(states: Float[Tensor, "n d"], basis: Float[Tensor, "d r"]) -> float:
    """Share of the states' variance in a subspace; NaN where they do not vary."""
    around = center(states)
    inside = torch.linalg.vector_norm(around.points @ basis.to(around.points), dim=1).double().square().sum()
    total = float(around.squares.sum())
    return float(inside) / total if total > 0 and float(inside) > 0 else math.nan


def spaces_beside(
    moments: Sequence[Sequence[Float[Tensor, "d d"]]],
    proxies: Sequence[Sequence[Proxy]],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    keep: int = 0,
    led: Sequence[Sequence[bool]] | None = None,
) -> list[list[list[RandomSpaces | None]]]:
    """N5 and N1 for each moment and proxy of several places, with `keep` bases and squares where it is `led`.

    None where a proxy leaves no normal space.
    """
    usable = [[place for place, one in enumerate(mine) if 2 * one.rank <= one.dim] for mine in proxies]
    bases = [[mine[place].basis for place in kept] for mine, kept in zip(proxies, usable, strict=True)]
    ahead = None if led is None else [[one[place] for place in kept] for one, kept in zip(led, usable, strict=True)]
    every = random_spaces_beside(moments, bases, draws=draws, seed=seed, keep=keep, led=ahead)
    found = []
    for here, mine, kept in zip(every, proxies, usable, strict=True):
        known = [dict(zip(kept, spaces, strict=True)) for spaces in here]
        found.append([[one.get(place) for place in range(len(mine))] for one in known])
    return found


def _normals(
    moment: Float[Tensor, "d d"],
    proxies: Sequence[Proxy],
    energies: Sequence[float],
    draws: int,
    seed: int,
    untrained: Proxy | None,
    spaces: Sequence[RandomSpaces | None] | None,
) -> list[dict[str, Control]]:
    """N1, N2, N3, N5 and N7, those that exist, for each proxy."""
    if not proxies or math.isnan(energies[0]):
        return [{} for _ in proxies]
    if spaces is None:
        spaces = spaces_beside([[moment]], [proxies], draws=draws, seed=seed, led=[[False] * len(proxies)])[0][0]
    others: dict[tuple[int, str], Tensor] = {}
    for place, proxy in enumerate(proxies):
        beside = {"next": proxy.following, "last": proxy.last}
        others |= {(place, name): basis for name, basis in beside.items() if basis.shape[1] == proxy.rank}
        if untrained is not None:
            _check(untrained, proxy.dim)
            others[place, "untrained"] = untrained.basis
    values = dict(zip(others, energies_of(moment, list(others.values())), strict=True))
    found = []
    for place, (energy, here) in enumerate(zip(energies, spaces, strict=True)):
        drawn = {} if here is None else {"haar": _drawn(energy, here.haar), "normal": _drawn(energy, here.normal)}
        fixed = {name: Control(value=values[at, name]) for at, name in others if at == place}
        found.append(drawn | fixed)
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
