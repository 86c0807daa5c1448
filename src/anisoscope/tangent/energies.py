"""How much of a gradient lies in a tangent space, and over which control that counts.

Coupled gradients, where the pairing of state and gradient matters, are held against paired windows (N6). Uncoupled ones
(activation gradients, embedding rows, updates) do not depend on the pairing: they are held against the hardest of Haar
(N5), coordinate signs (N9) and the next principal directions (N2). The paper's random normals (N1) are shown beside it
as `normal_ratio`: on coupled gradients they call everything significant, because a weight gradient lies where states
vary whether there is a signal or not.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.gram import center, working_dtype
from anisoscope.tangent.controls import (
    DRAWS,
    PAPER_DRAWS,
    RandomSpaces,
    energies_of,
    random_spaces_beside,
    second_moments,
    sign_energies,
)
from anisoscope.tangent.inference import (
    Interval,
    jackknife_ratios,
    permutation_ps,
    ratios_of_sums,
    same_rows,
    sum_groups,
)
from anisoscope.tangent.proxies import Proxy, bases_of, stack_bases
from anisoscope.tangent.windows import (
    PairedIn,
    Pairing,
    signal_to_noise,
)

UNCOUPLED_CONTROLS = ("haar", "signs", "next")
NO_DRAWS = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """What a control gives: the mean of its draws, or the one value where nothing is drawn (p is NaN then)."""

    value: float
    p: float = math.nan
    draws: Float[Tensor, " m"] = NO_DRAWS


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
    return coupled_alignments(pairing, [[proxy]], draws=draws, seed=seed, untrained=untrained)[0][0]


def coupled_alignments(
    pairing: Pairing,
    proxies: Sequence[Sequence[Proxy]],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    untrained: Proxy | None = None,
    spaces: Sequence[Sequence[RandomSpaces | None]] | None = None,
    seen: PairedIn | None = None,
) -> list[list[Alignment]]:
    """Of the places of a pairing, each for several proxies of its own, which costs little more than for one.

    `spaces` are those of `spaces_beside` for the pairing's moments, `seen` is what `look_in` the proxies' bases gave,
    where they are known.
    """
    cases = _cases(proxies, pairing.dim)
    if not cases:
        return [[] for _ in proxies]
    seen, index = pairing.look_in(bases_of(proxies)) if seen is None else seen, _index(cases)
    products, permuted = seen.products.cpu()[index], seen.permuted.cpu()[index]
    energies = jackknife_ratios(products, pairing.products.cpu()[index[0]])
    every = _normals(pairing.moments, proxies, energies, draws, seed, untrained, spaces)
    noise, shares = signal_to_noise(products).tolist(), seen.variance_shares.cpu()[index].tolist()
    found: list[list[Alignment]] = [[] for _ in proxies]
    for (at, place), energy, controls, drawn, share, ratio in zip(
        cases, energies, every, drawn_controls(energies, permuted), shares, noise, strict=True
    ):
        proxy, chance = proxies[at][place], drawn.value
        found[at].append(
            Alignment(
                energy=energy,
                gain=energy.value / chance if chance else math.nan,
                excess=energy.value - chance,
                control="permuted",
                p=drawn.p,
                normal_ratio=_over(energy.value, controls.get("normal")),
                normal_p=controls["normal"].p if "normal" in controls else math.nan,
                variance_gain=energy.value / share if share > 0 else math.nan,
                signal_to_noise=ratio,
                controls=controls | {"permuted": drawn},
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
    settings = {"documents": documents, "controls": controls, "draws": draws, "seed": seed, "untrained": untrained}
    found = uncoupled_alignments(rows[None], [[proxy]], **settings)[0][0]
    if states is None:
        return found
    return replace(found, variance_gain=found.energy.value / variance_share(states, proxy.basis))


def uncoupled_alignments(
    rows: Float[Tensor, "s n d"],
    proxies: Sequence[Sequence[Proxy]],
    *,
    keep: Bool[Tensor, "s n"] | None = None,
    documents: Int[Tensor, " n"] | None = None,
    controls: Sequence[str] = UNCOUPLED_CONTROLS,
    draws: int = DRAWS,
    seed: int = 0,
    untrained: Proxy | None = None,
    moments: Float[Tensor, "s d d"] | None = None,
    squares: Float[Tensor, "s n k"] | None = None,
    spaces: Sequence[Sequence[RandomSpaces | None]] | None = None,
) -> list[list[Alignment]]:
    """Of several places, each for several proxies of its own; rows that are not kept are zero.

    `moments` are their `second_moments`, `squares` are `row_squares` of them and `spaces` those of `spaces_beside`,
    where they are known.
    """
    cases = _cases(proxies, rows.shape[2])
    if "permuted" in controls:
        raise SpecError(
            "an uncoupled energy does not depend on which gradient goes with which state: permuted, it is the same "
            f"number. Its controls are {', '.join(UNCOUPLED_CONTROLS)}; for a permuted null ask for a coupled gradient"
        )
    if unknown := set(controls) - set(UNCOUPLED_CONTROLS):
        raise SpecError(f"controls are among {', '.join(UNCOUPLED_CONTROLS)}; came {', '.join(sorted(unknown))}")
    if not cases:
        return [[] for _ in proxies]
    moments = second_moments(rows) if moments is None else moments
    bases = bases_of(proxies)
    squares = row_squares(rows, bases) if squares is None else squares
    of_places = _energies(squares, keep, documents, seed)
    energies = [of_places[at][place] for at, place in cases]
    every = _normals(moments, proxies, energies, draws, seed, untrained, spaces)
    signs = drawn_controls(energies, sign_energies(moments, bases, draws=draws, seed=seed)[_index(cases)])
    found: list[list[Alignment]] = [[] for _ in proxies]
    for (at, place), energy, normals, flipped in zip(cases, energies, every, signs, strict=True):
        proxy, known = proxies[at][place], normals if math.isnan(energy.value) else normals | {"signs": flipped}
        asked = {name: known[name] for name in controls if name in known and not math.isnan(known[name].value)}
        binding = max(asked, key=lambda name: asked[name].value, default="")
        tested = [asked[name].p for name in ("haar", "signs") if name in asked]
        found[at].append(
            Alignment(
                energy=energy,
                gain=energy.value / (proxy.rank / proxy.dim),
                excess=energy.value - asked[binding].value if binding else math.nan,
                control=binding,
                p=max(tested, default=math.nan),
                normal_ratio=_over(energy.value, known.get("normal")),
                normal_p=known["normal"].p if "normal" in known else math.nan,
                variance_gain=math.nan,
                signal_to_noise=math.nan,
                controls=known,
                rank=proxy.rank,
                dim=proxy.dim,
                note=_note(None, energy.value, proxy),
            )
        )
    return found


def beside_shuffled(found: Sequence[Sequence[Alignment]], energies: Float[Tensor, "s k"]) -> list[list[Alignment]]:
    """The same with N10, which is shown and decides nothing; a place with fewer proxies has fewer of the energies."""
    return [
        [
            replace(one, controls={**one.controls, "shuffled": Control(value=energy)})
            for one, energy in zip(mine, here[: len(mine)], strict=True)
        ]
        for mine, here in zip(found, energies.tolist(), strict=True)
    ]


def with_few_normals(found: Alignment, draws: int = PAPER_DRAWS) -> Alignment:
    """The same with as many random normals as the source has."""
    normal = found.controls.get("normal", Control(value=math.nan))
    (few,) = drawn_controls([found.energy], normal.draws[None, :draws])
    ratio = _over(found.energy.value, few)
    return replace(found, normal_ratio=ratio, normal_p=few.p, controls={**found.controls, "normal": few})


def _cases(proxies: Sequence[Sequence[Proxy]], dim: int) -> list[tuple[int, int]]:
    """Place and number of every proxy; refused where one does not fit the gradients."""
    for proxy in itertools.chain.from_iterable(proxies):
        _check(proxy, dim)
    return [(at, place) for at, mine in enumerate(proxies) for place in range(len(mine))]


def _index(cases: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    at, place = torch.tensor(cases).T
    return at, place


def _energies(
    squares: Float[Tensor, "s n k"], keep: Bool[Tensor, "s n"] | None, documents: Int[Tensor, " n"] | None, seed: int
) -> list[list[Interval]]:
    """E of each place and basis, with the interval over documents; of places with the same documents side by side."""
    several, count, last = squares.shape
    groups = torch.arange(count) if documents is None else documents.cpu()
    kept = torch.ones(several, count) if keep is None else keep.cpu()
    sums = sum_groups(squares.transpose(0, 1).flatten(1), groups).unflatten(1, (several, last))
    present = sum_groups(kept.T.double(), groups).T > 0
    found: dict[int, list[Interval]] = {}
    for here in same_rows(present):
        some = sums[present[here[0]]][:, here]
        above, below = some[..., :-1].flatten(1), some[..., -1:].expand(-1, -1, last - 1).flatten(1)
        every = iter(ratios_of_sums(above, below, seed=seed))
        found |= {at: list(itertools.islice(every, last - 1)) for at in here}
    return [found[at] for at in range(several)]


def row_squares(rows: Float[Tensor, "s n d"], bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s n _"]:
    """‖Qᵀa‖² of every row for each basis and, last, ‖a‖²; float64."""
    raw = rows.to(working_dtype(rows.dtype))
    inside = (raw @ bases.to(raw).transpose(1, 2).flatten(2)).unflatten(2, (bases.shape[1], -1))
    parts = [torch.linalg.vector_norm(inside, dim=3), torch.linalg.vector_norm(raw, dim=2, keepdim=True)]
    return torch.cat(parts, 2).double().square()


def variance_share(states: Float[Tensor, "n d"], basis: Float[Tensor, "d r"]) -> float:
    """Share of the states' variance in a subspace; NaN where they do not vary."""
    around = center(states)
    inside = torch.linalg.vector_norm(around.points @ basis.to(around.points), dim=1).double().square().sum()
    total = float(around.squares.sum())
    return float(inside) / total if total > 0 and float(inside) > 0 else math.nan


def spaces_beside(
    moments: Float[Tensor, "s g d d"],
    proxies: Sequence[Sequence[Proxy]],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    keep: int = 0,
    led: Sequence[Sequence[bool]] | None = None,
) -> list[list[list[RandomSpaces | None]]]:
    """N5 and N1 for each of the g moments and each proxy of several places; None where it leaves no normal space.

    With `keep` bases, and squares, of those that are `led`.
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
    moments: Float[Tensor, "s d d"],
    proxies: Sequence[Sequence[Proxy]],
    energies: Sequence[Interval],
    draws: int,
    seed: int,
    untrained: Proxy | None,
    spaces: Sequence[Sequence[RandomSpaces | None]] | None,
) -> list[dict[str, Control]]:
    """N1, N2, N3, N5 and N7, those that exist, for each proxy of each place; none where the gradients are zero."""
    if spaces is None:
        led = [[False] * len(mine) for mine in proxies]
        spaces = [here[0] for here in spaces_beside(moments[:, None], proxies, draws=draws, seed=seed, led=led)]
    cases = [(at, place) for at, mine in enumerate(proxies) for place in range(len(mine))]
    known = [place for place, energy in enumerate(energies) if not math.isnan(energy.value)]
    found: list[dict[str, Control]] = [{} for _ in cases]
    some = [(number, one) for number in known if (one := spaces[cases[number][0]][cases[number][1]]) is not None]
    if some:
        draws_of_each = torch.stack([one.haar for _, one in some] + [one.normal for _, one in some]).cpu()
        drawn = iter(drawn_controls([energies[number] for number, _ in some] * 2, draws_of_each))
        for name, (number, _) in itertools.product(("haar", "normal"), some):
            found[number][name] = next(drawn)
    others = {"next": [[one.following for one in mine] for mine in proxies]}
    others["last"] = [[one.last for one in mine] for mine in proxies]
    if untrained is not None:
        _check(untrained, moments.shape[1])
        others["untrained"] = [[untrained.basis for _ in mine] for mine in proxies]
    for name, bases in others.items():
        sizes = [(bases[at][place].shape[1], proxies[at][place].rank) for at, place in cases]
        same = [number for number in known if sizes[number][0] == sizes[number][1] or name == "untrained"]
        values = energies_of(moments, stack_bases(bases))[_index(cases)].tolist() if same else []
        for number in same:
            found[number][name] = Control(value=values[number])
    return found


def drawn_controls(energies: Sequence[Interval], draws: Float[Tensor, "k m"]) -> list[Control]:
    """Of each energy its control, from draws of its own."""
    values = torch.tensor([one.value for one in energies], dtype=torch.float64)
    means = draws.mean(1).tolist() if draws.shape[1] else [math.nan] * len(draws)
    ps = permutation_ps(values, draws)
    return [Control(value=mean, p=p, draws=one) for mean, p, one in zip(means, ps, draws, strict=True)]


def _over(energy: float, control: Control | None) -> float:
    return energy / control.value if control is not None and control.value > 0 else math.nan


def _note(note: str | None, energy: float, proxy: Proxy) -> str | None:
    notes = [] if note is None else [note]
    notes += [one for one in proxy.notes if one.startswith("rank ")]
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
