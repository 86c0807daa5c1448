"""Cones: the span of the directions of a semi-NMF, for several places side by side, on a GPU beside other work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.leading import small_eigh
from anisoscope.kernels.queues import aside
from anisoscope.kernels.seminmf import Factorised, Factorising

# Error at which a semi-NMF for a proxy has settled: the span is then within .985 of that at 1e-6 (mean squared cosine);
# the spans of two seeds agree to .95.
CONE_TOLERANCE = 1e-3
# A direction with less of the largest singular value does not exist.
SMALLEST = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Cones:
    """Semi-NMFs of some places, all of one rank: a GPU is at work on them, a CPU will be."""

    places: list[int]
    rank: int
    dtype: torch.dtype
    finish: Callable[[], Factorised]

    def bases(self) -> list[Float[Tensor, "d r"]]:
        """Leading right singular vectors of ZD, which span what D spans where it has no more directions than that.

        Not of D with each direction weighted by its own codes: codes of directions that cancel each other are largest.
        """
        found = self.finish()
        return _right_vectors(found.codes.double(), found.directions.double(), self.rank, self.dtype)


def start_cones(
    points: Float[Tensor, "s n d"],
    axes: Float[Tensor, "s d k"],
    ranks: Sequence[int],
    *,
    concepts: int | None,
    seed: int,
) -> list[Cones]:
    """Of all places, each with its leading axes and its rank.

    A GPU hardly needs longer for many than for one; a CPU would only run out of its caches.
    """
    started: list[Cones] = []
    for rank in dict.fromkeys(ranks):
        if concepts is not None and concepts < rank:
            raise SpecError(f"{concepts} concepts do not span {rank} directions: ask for at least {rank}")
        here = [place for place, one in enumerate(ranks) if one == rank]
        size = len(here) if points.is_cuda else 1
        for start in range(0, len(here), size):
            some = here[start : start + size]
            # Not by an index, which a GPU would have to be sent.
            mine, known = (one if len(some) == len(points) else one[some] for one in (points, axes))
            settings = {"seed": seed, "tolerance": CONE_TOLERANCE, "axes": known}
            if points.is_cuda:
                with aside(points.device):
                    finish = Factorising(mine, concepts or rank, **settings).finish
            else:
                finish = partial(_factorise, mine, concepts or rank, **settings)
            started.append(Cones(places=some, rank=rank, dtype=points.dtype, finish=finish))
    return started


def _factorise(*given: Any, **settings: Any) -> Factorised:
    return Factorising(*given, **settings).finish()


def _right_vectors(
    codes: Float[Tensor, "s n r"], directions: Float[Tensor, "s r d"], rank: int, dtype: torch.dtype
) -> list[Float[Tensor, "d q"]]:
    """The leading right singular vectors of each ZD, from products of r x r numbers."""
    squares, turn = small_eigh(codes.mT @ codes)
    # (ZᵀZ)^½ D has the same singular values and right vectors.
    root = squares.clamp_min(0).sqrt()[..., None] * turn.mT
    lengths, turn = small_eigh(root @ (directions @ directions.mT) @ root.mT)
    lengths, turn = lengths.flip(1)[:, :rank], turn.flip(2)[:, :, :rank]
    kept = lengths > SMALLEST**2 * lengths[:, :1]
    mixed = (turn * torch.where(kept, lengths.clamp_min(0).rsqrt(), 0)[:, None]).mT @ root
    found = (mixed @ directions).to(dtype)
    return [one[:size].T for one, size in zip(found, kept.sum(1).tolist(), strict=True)]
