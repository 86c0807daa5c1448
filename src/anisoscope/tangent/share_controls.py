"""What shares of gradient anisotropy are held against beyond random normals: the controls that decide for energies.

    coupled gradients      N6: the share with whole windows paired anew
    uncoupled gradients    N5 and N9: uniform subspaces, and Q with random signs of its coordinates

Of those shares that tr PCP and ‖PCP‖ give without a search for axes. Notation as in anisotropy.py.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import limit_on
from anisoscope.tangent.anisotropy import AnisotropyShare, Without, left_without
from anisoscope.tangent.controls import DRAWS, random_signs, uniform_spaces
from anisoscope.tangent.energies import Control
from anisoscope.tangent.inference import permutation_p
from anisoscope.tangent.proxies import Proxy, bases_of
from anisoscope.tangent.turns import TABLE_ELEMENTS
from anisoscope.tangent.windows import Pairing

ShareControls = Mapping[str, Mapping[str, Control]]
"""By field of `AnisotropyShare`, then by control."""


def permuted_shares(
    pairing: Pairing, proxies: Sequence[Sequence[Proxy]], found: Sequence[Sequence[AnisotropyShare]], *, zeta: float
) -> list[list[ShareControls]]:
    """N6 of the proxies of each place, beside what was `found`; unknown where there are too few windows.

    Forms the gradient of every permutation: several times the price of all else.
    """
    parts = [_permuted(pairing, proxies, some) for some in _some_places(pairing)]
    squares, left, rest = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return [
        [
            _beside("permuted", squares[at], left[at, :, place], rest[at, :, place], one, found[at][place], zeta)
            for place, one in enumerate(mine)
        ]
        for at, mine in enumerate(proxies)
    ]


def _some_places(pairing: Pairing) -> Iterator[slice]:
    several, count, _, dim = pairing.values.shape
    size = max(1, limit_on(TABLE_ELEMENTS, pairing.values) // (count * dim**2))
    for start in range(0, several, size):
        yield slice(start, min(start + size, several))


def _permuted(
    pairing: Pairing, proxies: Sequence[Sequence[Proxy]], some: slice
) -> tuple[Float[Tensor, "s m"], Float[Tensor, "s m k"], Float[Tensor, "s m k"]]:
    """‖C‖², and tr PCP and ‖PCP‖² for each proxy, of every permutation."""
    bases = bases_of(proxies)[some, None].to(pairing.values)
    seen = []
    for moments in pairing.permuted_moments(some):
        squares = torch.linalg.matrix_norm(moments.double()).square()
        seen.append((squares, *left_without(moments, squares, bases.expand(-1, moments.shape[1], -1, -1, -1))))
    squares, left, rest = (torch.cat(part, 1)[:, pairing.permutations.chosen] for part in zip(*seen, strict=True))
    return squares, left, rest


def uncoupled_shares(
    moments: Float[Tensor, "s d d"],
    proxies: Sequence[Sequence[Proxy]],
    found: Sequence[Sequence[AnisotropyShare]],
    *,
    zeta: float,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[list[ShareControls]]:
    """N5 and N9 of the proxies of each place, beside what was `found`."""
    squares, dim = torch.linalg.matrix_norm(moments.double()).square(), moments.shape[1]
    signs = random_signs(draws, dim, seed, moments.dtype, moments.device)

    def controls(at: int, place: int) -> ShareControls:
        proxy = proxies[at][place]
        uniform = uniform_spaces(draws, proxy.rank, dim, seed, moments.dtype, moments.device).mT
        spaces = {"haar": uniform, "signs": signs[:, :, None] * proxy.basis.to(moments)}
        every = []
        for name, bases in spaces.items():
            left, rest = (one.cpu() for one in left_without(moments[at], squares[at], bases))
            every.append(_beside(name, squares[at].cpu(), left, rest, proxy, found[at][place], zeta))
        return {way: {name: control for one in every for name, control in one[way].items()} for way in every[0]}

    return [[controls(at, place) for place in range(len(mine))] for at, mine in enumerate(proxies)]


def _beside(
    name: str,
    squares: Float[Tensor, "*m"],
    left: Float[Tensor, " m"],
    rest: Float[Tensor, " m"],
    proxy: Proxy,
    found: AnisotropyShare,
    zeta: float,
) -> ShareControls:
    """One control, from ‖C‖², tr PCP and ‖PCP‖² of its draws. Moments have a trace of one."""
    total = torch.ones_like(squares)
    seen = Without(dim=proxy.dim, rank=proxy.rank, total=total, squares=squares, left=left, left_squares=rest)
    drawn = {"isoscore_change": seen.isoscore_changes(zeta), "anisotropic_energy": seen.anisotropic_energies()}
    return {
        way: {
            name: Control(
                value=float(values.mean()), p=permutation_p(getattr(found, way).tangent, values), draws=values
            )
        }
        for way, values in drawn.items()
    }
