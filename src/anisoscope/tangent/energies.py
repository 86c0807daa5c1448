"""How much of a gradient lies in a tangent space, compared with what controls put there.

Each control is the null of one hypothesis under which there is no signal, with a p of its own:

    coupled      permuted               gradients are independent of the states (N6)
                 permuted_directions    directions of gradients are; their sizes may depend on the states
                 flipped                given the states, a window's gradients are as likely as their negatives
    uncoupled    haar                   the proxy is a random subspace (N5)
                 signs                  the proxy has random signs of its coordinates (N9)
                 span                   all r directions in the span of proxy and next directions are alike
                 next                   the gradients have as much energy in r of the next principal directions (N2)
    both         shuffled               gradients of shuffled targets have as much energy in the proxy (N10)

The control with the largest p decides, and gives `control`, its value, the excess and p. A gradient that follows any
one of the hypotheses is then called tangent at most at the nominal rate, because p is at least that one's (an
intersection-union test; no correction for the number of controls is needed). The paper's random normals (N1) are
reported as `normal_ratio`: every coupled gradient passes them, because a weight gradient lies where states vary whether
there is a signal or not.
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
from anisoscope.kernels.leading import small_eigh
from anisoscope.tangent.clouds import center_clouds
from anisoscope.tangent.controls import (
    DRAWS,
    PAPER_DRAWS,
    RandomSpaces,
    energies_of,
    random_spaces_beside,
    second_moments,
    sign_energies,
    uniform_spaces,
)
from anisoscope.tangent.inference import (
    LEAST_DOCUMENTS,
    Interval,
    bootstrap_leads,
    jackknife_leads,
    jackknife_ratios,
    permutation_ps,
    ratios_of_sums,
    sum_groups,
)
from anisoscope.tangent.proxies import Proxy, bases_of, stack_bases
from anisoscope.tangent.windows import (
    PairedIn,
    Pairing,
    flipped_energies,
    signal_to_noise,
)

COUPLED_CONTROLS = ("permuted", "permuted_directions", "flipped")
UNCOUPLED_CONTROLS = ("haar", "signs", "span", "next")
# Of the next directions, the part at most that is taken for lost where nothing in them can be found again.
MOST_LOST = 0.9
NO_DRAWS = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """What a control gives: the mean of its draws, or the one value where nothing is drawn.

    p is NaN where the control is shown and decides nothing, or where it cannot be known.
    """

    value: float
    p: float = math.nan
    draws: Float[Tensor, " m"] = NO_DRAWS


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """The share of a gradient's energy in a tangent space, and what is expected without a signal."""

    energy: Interval
    """`tangent_energy`, E(Q). The interval is over documents (uncoupled) or windows (coupled)."""
    gain: float
    """`tangent_gain`: E over the binding control where it is coupled, over r/d where it is not."""
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
    """Of a weight gradient, virtual or a linear module's: E = ‖GQ‖² / ‖G‖², excess over the hardest control.

    `draws` are those of N1; those of the controls that decide were drawn with the pairing.
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
    shuffled: Pairing | None = None,
) -> list[list[Alignment]]:
    """Of the places of a pairing, each for several proxies of its own, which costs little more than for one.

    `spaces` are those of `spaces_beside` for the pairing's moments, `seen` is what `look_in` the proxies' bases gave,
    where they are known. `shuffled` has the same states with the gradients of shuffled targets, which then decide too.
    """
    cases = _cases(proxies, pairing.dim)
    if not cases:
        return [[] for _ in proxies]
    bases = bases_of(proxies)
    seen, index = pairing.look_in(bases) if seen is None else seen, _index(cases)
    products, whole = seen.products.cpu()[index], pairing.products.cpu()[index[0]]
    energies = jackknife_ratios(products, whole)
    every = _normals(pairing.moments, proxies, energies, draws, seed, untrained, spaces)
    drawn = {
        "permuted": seen.permuted.cpu()[index],
        "permuted_directions": seen.permuted_directions.cpu()[index],
        "flipped": flipped_energies(products, whole, pairing.signs),
    }
    for name, values in drawn.items():
        for controls, one in zip(every, drawn_controls(energies, values), strict=True):
            controls[name] = one
    if shuffled is not None:
        others = shuffled.products_in(bases).cpu()[index], shuffled.products.cpu()[index[0]]
        leads = jackknife_leads(products, whole, *others) if len(pairing.permutations) else [math.nan] * len(cases)
        for controls, energy, p in zip(every, jackknife_ratios(*others), leads, strict=True):
            controls["shuffled"] = Control(value=energy.value, p=p)
    noise, shares = signal_to_noise(products).tolist(), seen.variance_shares.cpu()[index].tolist()
    found: list[list[Alignment]] = [[] for _ in proxies]
    for (at, place), energy, controls, share, ratio in zip(cases, energies, every, shares, noise, strict=True):
        proxy, binding = proxies[at][place], hardest(controls, (*COUPLED_CONTROLS, "shuffled"))
        expected, p = (controls[binding].value, controls[binding].p) if binding else (math.nan, math.nan)
        found[at].append(
            Alignment(
                energy=energy,
                gain=energy.value / expected if expected else math.nan,
                excess=energy.value - expected,
                # What would decide, where too few windows leave nothing that does.
                control=binding or "permuted",
                p=p,
                normal_ratio=_over(energy.value, controls.get("normal")),
                normal_p=controls["normal"].p if "normal" in controls else math.nan,
                variance_gain=energy.value / share if share > 0 else math.nan,
                signal_to_noise=ratio,
                controls=controls,
                rank=proxy.rank,
                dim=proxy.dim,
                note=_note(pairing.note, energy.value, proxy),
            )
        )
    return found


def hardest(controls: Mapping[str, Control], deciding: Sequence[str]) -> str:
    """The name of the control that decides: that of the largest p, and of equal ones the one of the largest value.

    A control with a value whose p is not known is harder than any other: what it would say cannot be left out.
    """
    known = [name for name in deciding if name in controls and not math.isnan(controls[name].value)]

    def rank(name: str) -> tuple[float, float]:
        p = controls[name].p
        return (2.0 if math.isnan(p) else p, controls[name].value)

    return max(known, key=rank, default="")


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

    `documents` are resampled whole for the interval and for p against the next directions (rows, where none are
    given); `states` are those of the same tokens.
    """
    settings = {"documents": documents, "controls": controls, "draws": draws, "seed": seed, "untrained": untrained}
    stacked = states[None] if states is not None and states.shape == rows.shape else None
    found = uncoupled_alignments(rows[None], [[proxy]], states=stacked, **settings)[0][0]
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
    shuffled: Float[Tensor, "s n d"] | None = None,
    states: Float[Tensor, "s n d"] | None = None,
) -> list[list[Alignment]]:
    """Of several places, each for several proxies of its own; rows that are not kept are zero.

    `states` are those of the same rows: they show how exactly the next principal directions are known. `moments` are
    the rows' `second_moments`, `squares` are `row_squares` of them and `spaces` those of `spaces_beside`, where they
    are known. `shuffled` are the gradients of shuffled targets, which then decide too.
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
    # Of each place and basis: energies in it, and in what it is compared with, over the documents of the place.
    compared = {"next": next_squares(rows, proxies, states, keep)}
    if shuffled is not None:
        compared["shuffled"] = row_squares(shuffled, bases)
    several = squares.shape[2]
    sums = _document_sums(torch.cat([squares, *compared.values()], 2), keep, documents)
    of_places = _energies([one[..., :several] for one in sums], seed)
    energies = [of_places[at][place] for at, place in cases]
    every = _normals(moments, proxies, energies, draws, seed, untrained, spaces)
    signs = drawn_controls(energies, sign_energies(moments, bases, draws=draws, seed=seed)[_index(cases)])
    within = span_energies(moments, proxies, draws=draws, seed=seed)
    for known, control in zip(every, drawn_controls(energies, within[_index(cases)]), strict=True):
        if "next" in known:
            known["span"] = control
    for number, name in enumerate(compared, 1):
        leads = _leads(sums, several, number, seed)
        for (at, place), known in zip(cases, every, strict=True):
            # Where the space ends before there are as many next directions, there is no such control.
            if name in known or name == "shuffled":
                above, below = (
                    sums[at][:, several * number + place].sum(),
                    sums[at][:, several * (number + 1) - 1].sum(),
                )
                known[name] = Control(value=float(above / below), p=leads[at][place])
    deciding = [*controls, *(["shuffled"] if shuffled is not None else [])]
    found: list[list[Alignment]] = [[] for _ in proxies]
    for (at, place), energy, normals, flipped in zip(cases, energies, every, signs, strict=True):
        proxy, known = proxies[at][place], normals if math.isnan(energy.value) else normals | {"signs": flipped}
        binding = hardest(known, deciding)
        note = None
        if binding and math.isnan(known[binding].p):
            note = f"{len(sums[at])} documents; p against {binding} needs at least {LEAST_DOCUMENTS}"
        found[at].append(
            Alignment(
                energy=energy,
                gain=energy.value / (proxy.rank / proxy.dim),
                excess=energy.value - known[binding].value if binding else math.nan,
                control=binding,
                p=known[binding].p if binding else math.nan,
                normal_ratio=_over(energy.value, known.get("normal")),
                normal_p=known["normal"].p if "normal" in known else math.nan,
                variance_gain=math.nan,
                signal_to_noise=math.nan,
                controls=known,
                rank=proxy.rank,
                dim=proxy.dim,
                note=_note(note, energy.value, proxy),
            )
        )
    return found


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


def _document_sums(
    squares: Float[Tensor, "s n k"], keep: Bool[Tensor, "s n"] | None, documents: Int[Tensor, " n"] | None
) -> list[Float[Tensor, "_ k"]]:
    """Sums over the documents of each place, in ascending order, on the CPU; documents without a kept row are left out.

    A GPU is waited for once: the sums of all places are few numbers.
    """
    several, count, last = squares.shape
    groups = torch.arange(count) if documents is None else documents.cpu()
    kept = torch.ones(several, count) if keep is None else keep.cpu()
    sums = sum_groups(squares.transpose(0, 1).flatten(1), groups).unflatten(1, (several, last)).cpu()
    present = sum_groups(kept.T.double(), groups) > 0
    return [sums[present[:, at], at] for at in range(several)]


def _energies(sums: Sequence[Float[Tensor, "_ k"]], seed: int) -> list[list[Interval]]:
    """E of each place and basis, with the interval over documents; of places with as many documents side by side."""
    parts = [torch.cat([one[:, :-1], one[:, -1:].expand(-1, one.shape[1] - 1)], 1) for one in sums]
    found: dict[int, list[Interval]] = {}
    for places in _of_one_size(sums):
        some = torch.stack([parts[at] for at in places], 1)
        above, below = some.chunk(2, 2)
        every = iter(ratios_of_sums(above.flatten(1), below.flatten(1), seed=seed))
        found |= {at: list(itertools.islice(every, above.shape[2])) for at in places}
    return [found[at] for at in range(len(sums))]


def _leads(sums: Sequence[Float[Tensor, "_ k"]], several: int, number: int, seed: int) -> list[list[float]]:
    """p that each place's energies exceed those in what stands in the same column of a later part; k columns a part."""
    found: dict[int, list[float]] = {}
    for places in _of_one_size(sums):
        some = torch.stack([sums[at] for at in places], 1)
        one, other = (some[..., several * part : several * (part + 1)] for part in (0, number))
        pairs = [each for part in (one, other) for each in (part[..., :-1], part[..., -1:].expand_as(part[..., :-1]))]
        every = iter(bootstrap_leads(torch.stack(pairs, 3).flatten(1, 2), seed=seed))
        found |= {at: list(itertools.islice(every, several - 1)) for at in places}
    return [found[at] for at in range(len(sums))]


def _of_one_size(sums: Sequence[Tensor]) -> list[list[int]]:
    """The places with as many documents, whose resamples are the same."""
    sizes = torch.tensor([len(one) for one in sums])
    return [(sizes == size).nonzero().flatten().tolist() for size in sizes.unique()]


def row_squares(rows: Float[Tensor, "s n d"], bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s n _"]:
    """‖Qᵀa‖² of every row for each basis and, last, ‖a‖²; float64."""
    raw = rows.to(working_dtype(rows.dtype))
    inside = (raw @ bases.to(raw).transpose(1, 2).flatten(2)).unflatten(2, (bases.shape[1], -1))
    parts = [torch.linalg.vector_norm(inside, dim=3), torch.linalg.vector_norm(raw, dim=2, keepdim=True)]
    return torch.cat(parts, 2).double().square()


def span_energies(
    moments: Float[Tensor, "s d d"], proxies: Sequence[Sequence[Proxy]], *, draws: int = DRAWS, seed: int = 0
) -> Float[Tensor, "s k m"]:
    """E of random subspaces in the span of a proxy and of as many next directions; float64, on the CPU.

    A few gradient directions that all tokens share, a mean above all, lie in one of the two by chance. Every document
    has the same share of them there, so that no bootstrap over documents tells.
    """
    both = stack_bases([[torch.cat([one.basis, one.following[:, : one.rank]], 1) for one in mine] for mine in proxies])
    both = both.to(moments)
    inside = (both.mT @ (moments[:, None] @ both)).double().cpu()
    total = moments.diagonal(dim1=1, dim2=2).double().sum(1).cpu()
    found = inside.new_full((*inside.shape[:2], draws), math.nan)
    for at, mine in enumerate(proxies):
        for place, one in enumerate(mine):
            wide = one.rank + min(one.following.shape[1], one.rank)
            spaces = uniform_spaces(draws, one.rank, wide, seed, inside.dtype, inside.device)
            energies = ((spaces @ inside[at, place, :wide, :wide]) * spaces).sum((1, 2))
            found[at, place] = energies / total[at] if total[at] > 0 else math.nan
    return found


def next_squares(
    rows: Float[Tensor, "s n d"],
    proxies: Sequence[Sequence[Proxy]],
    states: Float[Tensor, "s n d"] | None = None,
    keep: Bool[Tensor, "s n"] | None = None,
) -> Float[Tensor, "s n _"]:
    """‖Nᵀa‖² of every row for the next r principal directions N of each proxy and, last, ‖a‖²; of one row inexact.

        (‖Nᵀa‖² - l ‖Fᵀa‖²) / (1 - l),   l = 1 - o

    N is known less exactly than the proxy: a part l of it lies in the directions F after it, so that a gradient with
    equal energy in the first 2r principal directions, and less outside, has less in N than in the proxy. o is how much
    of N the states of the same tokens have in common with it: ‖NᵀM‖² / r, M their own r leading directions in the span
    of N and F. This takes l for too large rather than too small: where both samples are smeared alike over a border,
    w(k) = 1 / (1 + eᵏ), the part lost is ∫₀ w = log 2 of what they do not have in common, ∫ (w - w²) = 1.
    Without states nothing is corrected.
    """
    nothing = rows.new_zeros(rows.shape[2], 0)
    further = [[nothing if one.further is None else one.further for one in mine] for mine in proxies]
    window = [
        [torch.cat([one.following, more], 1) for one, more in zip(mine, others, strict=True)]
        for mine, others in zip(proxies, further, strict=True)
    ]
    stacked = stack_bases(window)
    ranks = torch.tensor([[one.rank for one in mine] + [0] * (stacked.shape[1] - len(mine)) for mine in proxies])
    wide = stacked.shape[3]
    raw = rows.to(working_dtype(rows.dtype))

    def inside(points: Float[Tensor, "s n d"]) -> Float[Tensor, "s k n q"]:
        found = points @ stacked.to(points).transpose(1, 2).flatten(2)
        return found.view(*points.shape[:2], *stacked.shape[1:4:2]).transpose(1, 2)

    place, ranks = torch.arange(wide, device=raw.device), ranks.to(raw.device)[..., None]
    first, second = place < ranks, (place >= ranks) & (place < 2 * ranks)
    leak = raw.new_zeros(ranks.shape, dtype=torch.float64)
    if states is not None:
        kept = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if keep is None else keep
        seen = inside(center_clouds(states, kept).points)
        axes = small_eigh((seen.mT @ seen).double())[1].flip(-1)
        common = torch.where(first[..., None] & first[:, :, None], axes, 0).square().sum((2, 3))[..., None]
        enough = (2 * ranks <= wide) & (ranks > 0)
        leak = torch.where(enough, 1 - common / ranks.clamp_min(1), 0).clamp(0, MOST_LOST)
    squares = inside(raw).double().square()
    near, far = ((squares * one[:, :, None]).sum(3) for one in (first, second))
    whole = torch.linalg.vector_norm(raw, dim=2, keepdim=True).double().square()
    return torch.cat([((near - leak * far) / (1 - leak)).transpose(1, 2), whole], 2)


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
