"""Places with their gradients, held against candidates together: what they share is made once, and rows come out."""

import itertools
import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from anisoscope.held import (
    BOTH_WAYS,
    WITH_MEAN,
    Candidate,
    Held,
    leading_shares,
    proxies_of,
)
from anisoscope.kernels.queues import aside, rejoin
from anisoscope.probed import ProbeRow
from anisoscope.tangent.anisotropy import LED_DRAWS, AnisotropyShare, Leading, anisotropy_shares
from anisoscope.tangent.clouds import stack_clouds
from anisoscope.tangent.controls import RandomSpaces
from anisoscope.tangent.energies import coupled_alignments, spaces_beside, uncoupled_alignments
from anisoscope.tangent.frequency import squares_by_frequency
from anisoscope.tangent.proxies import bases_of
from anisoscope.tangent.share_controls import ShareControls, permuted_shares, uncoupled_shares


def hold_against(
    held: Held,
    candidates: Sequence[Sequence[Candidate]],
    *,
    own: bool = False,
    shuffled: Held | None = None,
) -> list[list[ProbeRow]]:
    """Rows of each place for its candidates.

    Where these are its `own`, also what is left of anisotropy without those that are plain proxies, and their energies
    by token frequency. The gradients of `shuffled` targets are among the controls.
    """
    if not held.gradients:
        return [[] for _ in held.places]
    usable = [[one for one in mine if one[1].rank > 0] for mine in candidates]
    if not any(usable):
        return [[] for _ in held.places]
    plain = [[variant in BOTH_WAYS for _, _, variant in mine] for mine in usable]
    kept = [list(itertools.compress(mine, chosen)) for mine, chosen in zip(usable, plain, strict=True)]
    removal = own and held.of_removal and any(kept)
    led = plain if removal else [[False] * len(mine) for mine in plain]
    proxies, seed = proxies_of(usable), held.seed
    bases = bases_of(proxies)
    squares = held.project(bases)
    moments, leading, device = held.moments.flatten(0, 1), None, held.keep.device
    # A GPU is given windows and random spaces to look at, which takes it a while.
    with aside(device):
        seen = None if held.pairing is None else held.pairing.look_in(bases)
        spaces = spaces_beside(held.moments, proxies, seed=seed, keep=LED_DRAWS, led=led)
    rows: list[list[ProbeRow]] = [[] for _ in held.places]
    if own and squares is not None and held.of_frequency:
        split_by_frequency(held, usable, squares, rows)
    if removal:
        leading = held.leading_of(max(proxy.rank for mine in kept for _, proxy, _ in mine))
    # What gradients are by themselves is told with plain proxies only.
    shares = leading.shares if leading else leading_shares(moments) if any(kept) else [math.nan] * len(moments)
    rejoin(device)
    for number, gradient in enumerate(held.gradients):
        beside = [here[number] for here in spaces]
        if held.pairing is not None and gradient != "activation":
            others = None if shuffled is None else shuffled.pairing
            found = coupled_alignments(held.pairing, proxies, seed=seed, spaces=beside, seen=seen, shuffled=others)
        else:
            assert held.rows is not None
            found = uncoupled_alignments(
                held.rows,
                proxies,
                keep=held.keep,
                documents=held.shown.tokens.documents,
                moments=held.moments[:, number],
                squares=squares,
                spaces=beside,
                seed=seed,
                shuffled=None if shuffled is None else shuffled.rows,
                states=stack_clouds([place.here.values for place in held.places]),
            )
        for at, (mine, every) in enumerate(zip(usable, found, strict=True)):
            rows[at] += held.enrichment(at, gradient, mine, every, shares[at * len(held.gradients) + number])
    if removal and leading:
        beside = [
            [list(itertools.compress(here, chosen)) for here in mine]
            for mine, chosen in zip(spaces, plain, strict=True)
        ]
        rows = [[*mine, *more] for mine, more in zip(rows, take_out(held, kept, beside, leading), strict=True)]
    return rows


def take_out(
    held: Held,
    plain: Sequence[Sequence[Candidate]],
    spaces: Sequence[Sequence[Sequence[RandomSpaces | None]]],
    leading: Leading,
) -> list[list[ProbeRow]]:
    """Rows for what is left of each gradient's anisotropy without plain proxies; of `spaces` by place and gradient."""
    rows: list[list[ProbeRow]] = [[] for _ in held.places]
    cases, zeta = list(itertools.product(range(len(held.places)), range(len(held.gradients)))), held.zeta
    proxies = proxies_of(plain)
    every: list[dict[int, AnisotropyShare]] = [{} for _ in cases]
    for way in BOTH_WAYS:
        mine = [[place for place, (_, _, variant) in enumerate(here) if variant == way] for here in plain]
        found = anisotropy_shares(
            held.moments.flatten(0, 1),
            [[proxies[at][place] for place in mine[at]] for at, _ in cases],
            [[spaces[at][number][place] for place in mine[at]] for at, number in cases],
            leading=leading,
            search=way == WITH_MEAN,
            zeta=zeta,
        )
        for (at, _), known, shares in zip(cases, every, found, strict=True):
            known |= dict(zip(mine[at], shares, strict=True))
    for number, gradient in enumerate(held.gradients):
        shares = [[known[place] for place in sorted(known)] for known in every[number :: len(held.gradients)]]
        controls: list[list[ShareControls]] = [[{}] * len(mine) for mine in plain]
        if held.share_controls and held.pairing is not None and gradient != "activation":
            controls = permuted_shares(held.pairing, proxies, shares, zeta=zeta)
        elif held.share_controls:
            controls = uncoupled_shares(held.moments[:, number], proxies, shares, zeta=zeta, seed=held.seed)
        for at, found in enumerate(shares):
            rows[at] += held.removal(at, gradient, plain[at], found, controls[at])
    return rows


def split_by_frequency(
    held: Held, candidates: Sequence[Sequence[Candidate]], squares: Float[Tensor, "s n _"], rows: list[list[ProbeRow]]
) -> None:
    """Append rows by token frequency, for plain proxies; of places with the same tokens side by side."""
    for places, dealt in held.dealt:
        some = squares if len(places) == len(squares) else squares[places]
        shapes = [[(proxy.dim, proxy.rank) for _, proxy, _ in candidates[at]] for at in places]
        for at, found in zip(places, squares_by_frequency(some, shapes, dealt), strict=True):
            for candidate, one in zip(candidates[at], found, strict=True):
                if candidate[2] in BOTH_WAYS:
                    rows[at] += held.by_frequency(at, candidate, one)
