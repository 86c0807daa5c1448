"""How much of the gradients' anisotropy lies in a tangent space: what is left of their spectrum without it.

Notation: C the second moment of the gradient rows with eigenvalues l₁ ≥ l₂ ≥ ..., P = I - QQᵀ, l̄ = tr C / d.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import GramSums
from anisoscope.kernels.leading import leading_axes, leading_without
from anisoscope.metrics.spectrum import isoscore_star
from anisoscope.tangent.controls import DRAWS, RandomSpaces, random_spaces
from anisoscope.tangent.inference import permutation_ps
from anisoscope.tangent.proxies import Proxy

# Normal spaces whose spectrum is looked at, and the residual at which leading axes of C have settled for it.
LED_DRAWS, SETTLED_AXES = 20, 1e-4
# Shares of the energy outside a tangent space: below the first its leading axis is looked for in float64, below the
# second float32 gradients do not tell what is left (IsoScore* of it is within .01 of the truth there).
THIN, LEAST_LEFT = 1e-3, 1e-5


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A quantity for the tangent space, the mean over random normal spaces (N1) and for the next directions (N2)."""

    tangent: float
    normal: float
    following: float
    p: float
    """That random normal spaces reach the tangent space."""

    @property
    def difference(self) -> float:
        """Tangent less normal: the headline."""
        return self.tangent - self.normal


@dataclass(frozen=True, kw_only=True)
class AnisotropyShare:
    """`tangent_anisotropy_share`, in four ways."""

    isoscore_change: Removal
    """(a) IsoScore* without the subspace, in the d - r coordinates that are left, less IsoScore* of C."""
    leading_drop: Removal
    """(b) l₁/Σl of C, less that of PCP. N1 has LED_DRAWS draws at most here and in (c)."""
    spectral_share: Removal
    """(c) Σ_{j≤r} l_j ‖Qᵀv_j‖² / Σ_{j≤r} l_j: how much of the r leading axes lies in the subspace."""
    anisotropic_energy: Removal
    """(d) 1 - ‖P(C - l̄I)P‖² / ‖C - l̄I‖²."""
    note: str | None = None


def anisotropy_share(
    moment: Float[Tensor, "d d"], proxy: Proxy, *, draws: int = DRAWS, seed: int = 0, zeta: float = 0.25
) -> AnisotropyShare:
    """Of C (`controls.second_moment` of the rows, centred before where that is wanted), always with N1 and N2.

    Zero-padding what is left to d coordinates would lower its IsoScore*; so it is taken in the d - r that there are.
    """
    total = float(moment.diagonal().double().sum())
    usable = _why_not(proxy, total) is None
    keep = min(draws, LED_DRAWS)
    spaces = random_spaces(moment, proxy.basis, draws=draws, seed=seed, keep=keep) if usable else None
    return anisotropy_shares(moment[None], [[proxy]], [[spaces]], zeta=zeta)[0][0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Leading:
    """The leading axes of second moments, side by side."""

    values: Float[Tensor, "s k"]
    axes: Float[Tensor, "s d k"]
    shares: list[float]
    """l₁/Σl; NaN where a moment is zero."""
    rank: int
    """So many axes have settled, and there are some that are about the next ones."""


def find_leading(moments: Float[Tensor, "s d d"], rank: int) -> Leading:
    """As many axes as a tangent space has; shares are within 1e-7 of those from whole decompositions."""
    values, axes = leading_axes(moments, rank, settled=SETTLED_AXES)
    totals = moments.diagonal(dim1=1, dim2=2).double().sum(1)
    shares = torch.where(totals > 0, values[:, 0] / totals, math.nan).tolist()
    return Leading(values=values, axes=axes, shares=shares, rank=rank)


def anisotropy_shares(
    moments: Float[Tensor, "s d d"],
    proxies: Sequence[Sequence[Proxy]],
    spaces: Sequence[Sequence[RandomSpaces | None]],
    *,
    leading: Leading | None = None,
    search: bool = True,
    zeta: float = 0.25,
) -> list[list[AnisotropyShare]]:
    """Of several moments, each for proxies of its own, with one search for all leading eigenvalues.

    `spaces` are those of `energies.spaces_beside`, with at least LED_DRAWS bases for proxies that have a normal space;
    `leading` has at least as many axes as they have directions. Without a `search` for axes, (b) and (c) are unknown.
    """
    totals = moments.diagonal(dim1=1, dim2=2).double().sum(1)
    squares = torch.linalg.matrix_norm(moments.double()).square()
    notes = [[_why_not(one, total) for one in mine] for mine, total in zip(proxies, totals.tolist(), strict=True)]
    shares = [[_nothing(note) for note in mine] for mine in notes]
    usable = [(at, place) for at, mine in enumerate(notes) for place, note in enumerate(mine) if note is None]
    if not usable:
        return shares
    bases = _beside(moments, proxies, spaces, usable, LED_DRAWS if search else 0)
    rank = bases.shape[-1]
    leading = find_leading(moments, rank) if leading is None else leading
    values, axes = leading.values, leading.axes
    left_leading = torch.full(bases.shape[:3], math.nan, dtype=torch.float64)
    if search:
        # Random normal spaces leave the first axis about where it is; the tangent space leaves others.
        near = (axes.double() @ (values / values[:, :1]).nan_to_num().square()[..., None])[..., 0]
        left_leading = leading_without(moments, bases.flatten(1, 2), near=near).unflatten(1, bases.shape[1:3])
    left, rest = (one.unflatten(1, (-1, 2)) for one in left_without(moments, squares, bases[:, :, :2].flatten(1, 2)))
    along = (axes[:, None, None, :, :rank].mT @ bases).double().square().sum(4)
    along = along if search else torch.full_like(along, math.nan)
    left, rest, along, values, totals, squares = (one.cpu() for one in (left, rest, along, values, totals, squares))
    for at, place in (left[:, :, 0] < THIN * totals[:, None]).nonzero().tolist() if search else ():
        alone = orthonormal(bases[at : at + 1, place : place + 1, 0])
        left_leading[at, place, 0] = leading_without(moments[at : at + 1].double(), alone)[0, 0]
    nothing = (left[:, :, 0] < LEAST_LEFT * totals[:, None]).tolist()
    known = totals.new_tensor(leading.shares)
    for size in {proxies[at][place].rank for at, place in usable}:
        some = [(at, place) for at, place in usable if proxies[at][place].rank == size]
        index = torch.tensor(some).T.unbind()
        beside = [spaces[at][place] for at, place in some]
        normal = torch.stack([one.normal for one in beside if one is not None]).cpu()
        normal_squares = torch.stack([one.normal_squares for one in beside if one is not None]).cpu()
        total, first = totals[index[0], None], values[index[0], :size]
        without = Without(
            dim=moments.shape[1],
            rank=size,
            total=total,
            squares=squares[index[0], None],
            left=torch.cat([left[index], total * (1 - normal)], 1),
            left_squares=torch.cat([rest[index], normal_squares], 1),
        )
        drops = known[index[0], None] - left_leading[index] / without.told[:, : left_leading.shape[2]]
        spectral = (along[index][..., :size] @ (first / first.sum(1, keepdim=True))[..., None])[..., 0]
        # Those of as many random spaces together.
        changes, energies = _removals(torch.stack([without.isoscore_changes(zeta), without.anisotropic_energies()]))
        ways = changes, *_removals(torch.stack([drops, spectral])), energies
        for (at, place), change, drop, share, energy in zip(some, *ways, strict=True):
            shares[at][place] = AnisotropyShare(
                isoscore_change=change,
                leading_drop=drop,
                spectral_share=share,
                anisotropic_energy=energy,
                note=f"less than {LEAST_LEFT:g} of the gradients' energy is left without it"
                if nothing[at][place]
                else None,
            )
    return shares


@dataclass(frozen=True, kw_only=True, eq=False)
class Without:
    """Traces and squared norms of C and of PCP, for each of several subspaces of one rank; float64."""

    dim: int
    rank: int
    total: Float[Tensor, "*#s"]
    squares: Float[Tensor, "*#s"]
    left: Float[Tensor, "*s"]
    left_squares: Float[Tensor, "*s"]

    @property
    def told(self) -> Float[Tensor, "*s"]:
        """What is left, where it is enough for its spectrum to be known; NaN elsewhere."""
        return torch.where(self.left < LEAST_LEFT * self.total, math.nan, self.left)

    def isoscore_changes(self, zeta: float) -> Float[Tensor, "*s"]:
        """(a)."""
        whole = _isoscore(self.total, self.squares, self.dim, zeta)
        return _isoscore(self.told, self.left_squares.clamp_min(0), self.dim - self.rank, zeta) - whole

    def anisotropic_energies(self) -> Float[Tensor, "*s"]:
        """(d), by ‖P(C - l̄I)P‖² = ‖PCP‖² - 2l̄ tr PCP + l̄²(d - r)."""
        flat = self.total / self.dim
        uneven = self.squares - self.total * flat
        rest = self.left_squares.clamp_min(0) - 2 * flat * self.left + flat.square() * (self.dim - self.rank)
        return torch.where(uneven > 0, 1 - rest / uneven, math.nan)


def left_without(
    moments: Float[Tensor, "*s d d"], squares: Float[Tensor, "*s"], bases: Float[Tensor, "*s k d r"]
) -> tuple[Float[Tensor, "*s k"], Float[Tensor, "*s k"]]:
    """tr PCP and ‖PCP‖² without each of several subspaces, of C and ‖C‖². Columns of zeros do nothing.

    ‖PCP‖² = ‖C‖² - 2‖CQ‖² + ‖QᵀCQ‖², which for a C that lies in Q is a small difference of large numbers and asks for a
    basis that is orthonormal to more than float32 knows: all in float64.
    """
    bases, moments = orthonormal(bases), moments.double()
    images = (moments @ bases.transpose(-3, -2).flatten(-2)).unflatten(-1, (bases.shape[-3], -1)).transpose(-3, -2)
    inside = bases.mT @ images
    held = inside.diagonal(dim1=-2, dim2=-1).sum(-1)
    totals = moments.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    rest = inside.square().sum((-2, -1)) - 2 * images.square().sum((-2, -1))
    return totals - held, squares[..., None] + rest


def orthonormal(bases: Float[Tensor, "*s d r"]) -> Float[Tensor, "*s d r"]:
    """Bases that are orthonormal but for rounding, in float64: Q(3I - QᵀQ)/2, which squares what is missing."""
    exact = bases.double()
    return 1.5 * exact - 0.5 * exact @ (exact.mT @ exact)


def _beside(
    moments: Float[Tensor, "s d d"],
    proxies: Sequence[Sequence[Proxy]],
    spaces: Sequence[Sequence[RandomSpaces | None]],
    usable: Sequence[tuple[int, int]],
    draws: int,
) -> Float[Tensor, "s k m d r"]:
    """Tangent first, next second, then the random ones, for every moment and proxy; zeros where there is less."""
    every = []
    for at, place in usable:
        proxy, here = proxies[at][place], spaces[at][place]
        assert here is not None
        every.append((proxy.basis, proxy.following[:, : proxy.rank], here.normal_bases[:draws]))
    most = max(len(mine) for mine in proxies)
    if len(every) == len(moments) * most and len({one[2].shape for one in every}) == 1:
        tangent, following, normal = (torch.stack(part) for part in zip(*every, strict=True))
        stacked = torch.cat([tangent[:, None], following[:, None], normal], 1)
        return stacked.unflatten(0, (-1, most)).to(moments)
    rank, dim = max(basis.shape[1] for basis, *_ in every), moments.shape[1]
    draws = max(len(normal) for *_, normal in every)
    found = moments.new_zeros(len(moments), most, 2 + draws, dim, rank)
    for (at, place), parts in zip(usable, every, strict=True):
        mine = found[at, place, :, :, : parts[0].shape[1]]
        mine[0], mine[1], mine[2:] = parts
    return found


def _why_not(proxy: Proxy, total: float) -> str | None:
    if total == 0:
        return "the gradients are zero"
    if 2 * proxy.rank > proxy.dim or proxy.following.shape[1] < proxy.rank:
        return f"rank {proxy.rank} of {proxy.dim} coordinates leaves no normal space"
    return None


def _nothing(note: str | None) -> AnisotropyShare:
    unknown = Removal(tangent=math.nan, normal=math.nan, following=math.nan, p=math.nan)
    return AnisotropyShare(
        isoscore_change=unknown,
        leading_drop=unknown,
        spectral_share=unknown,
        anisotropic_energy=unknown,
        note=note,
    )


def _isoscore(total: Float[Tensor, "*s"], squares: Float[Tensor, "*s"], dim: int, zeta: float) -> Float[Tensor, "*s"]:
    return isoscore_star.function(GramSums(total=total, squares=squares, dim=dim), isoscore_zeta=zeta)


def _removals(values: Float[Tensor, "w p k"]) -> list[list[Removal]]:
    """Of the tangent space, the next one and random ones, for each of several, in several ways."""
    flat = values.flatten(0, 1)
    tangents, followings, normals = flat[:, 0], flat[:, 1], flat[:, 2:]
    every = tangents.tolist(), followings.tolist(), normals.mean(1).tolist(), permutation_ps(tangents, normals)
    found = [
        Removal(tangent=tangent, normal=normal, following=following, p=p)
        for tangent, following, normal, p in zip(*every, strict=True)
    ]
    return [found[start : start + values.shape[1]] for start in range(0, len(found), values.shape[1])]
