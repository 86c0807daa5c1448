"""Cloud: points, what is known of them, and the views that metrics share, each computed once."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels import gram
from anisoscope.kernels.gram import Centred, Directions, GramSums, Moments, Pair, row_norms
from anisoscope.kernels.groups import Explained, GroupSums, Passages, explain, sum_groups, sum_passages
from anisoscope.kernels.neighbors import (
    Neighbors,
    Products,
    Unique,
    drop_duplicates,
    multiply,
    nearest_neighbors,
    squares_of_part,
)
from anisoscope.records import POPULATIONS

# Consistency factor of the median absolute deviation with the standard deviation of a normal law.
MAD_TO_STD = 1.4826
# Types with fewer occurrences are left out where variance among them is explained: two points always lie on a line.
LEAST_OCCURRENCES = 5


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What is known of each point besides its coordinates."""

    ids: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    documents: Int[Tensor, " n"]
    special: Bool[Tensor, " n"]
    sentences: Int[Tensor, " n"] | None = None
    losses: Float[Tensor, " n"] | None = None

    def take(self, index: Int[Tensor, " m"]) -> "Tokens":
        """The same facts for some of the points."""
        return self._each(lambda values: values[index])

    def facts(self, rows: list[int]) -> list[tuple[int, int, int]]:
        """Id, position and document of some of the points."""
        columns = (values.cpu().numpy()[rows].tolist() for values in (self.ids, self.positions, self.documents))
        return list(zip(*columns, strict=True))

    def to(self, device: torch.device) -> "Tokens":
        """The same facts on another device."""
        return self._each(lambda values: values.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        held = {item.name: getattr(self, item.name) for item in fields(self)}
        changed: Any = {name: None if values is None else change(values) for name, values in held.items()}
        return Tokens(**changed)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A cloud of points with lazily computed, shared views: a metric names the one it needs."""

    points: Float[Tensor, "n d"]
    tokens: Tokens | None = None
    previous: Float[Tensor, "n e"] | None = None
    """The same tokens one site earlier, for metrics that compare neighbouring sites."""
    neighbor_count: int = 2
    """How many neighbours the most demanding metric wants."""
    scratch: Float[Tensor, " m"] | None = None
    """Memory for the products of all points, not used by anyone else while this cloud is."""
    whole: "Cloud | None" = None
    index: Int[Tensor, " n"] | None = None
    """Where this cloud is a part of another: which points of it. Views read what the whole has computed already."""

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.points.shape[1]

    def __len__(self) -> int:
        return self.points.shape[0]

    def take(self, index: Int[Tensor, " m"]) -> "Cloud":
        """The cloud of some of its points."""
        return Cloud(
            points=self.points[index],
            tokens=None if self.tokens is None else self.tokens.take(index),
            previous=None if self.previous is None else self.previous[index],
            neighbor_count=self.neighbor_count,
            whole=self,
            index=index,
        )

    @cached_property
    def centred(self) -> Centred:
        """The points without their mean."""
        return gram.center(self.points)

    @cached_property
    def products(self) -> Products:
        """All products of two centred points; those of a part are around the mean of the whole."""
        if self.whole is not None and self.index is not None:
            return self.whole.products.take(self.index)
        return multiply(self.centred, self.scratch)

    @cached_property
    def moments(self) -> Moments:
        """Total variance, its leading part, the leading axis."""
        return gram.moments(self.centred, self.gram_sums.squares if self.neighbor_count else None)

    @cached_property
    def gram_sums(self) -> GramSums:
        """Σλ and Σλ², from the products that the neighbours need anyway, where they do."""
        squares = None
        if self.neighbor_count and self.whole is not None and self.index is not None:
            products = self.whole.products
            squares = squares_of_part(products, self.index)
            if squares is not None:
                # The part may have been scaled by another power of two than the whole.
                squares = squares * (products.scale / self.centred.scale) ** 4
        elif self.neighbor_count:
            squares = self.products.row_squares.sum()
        return gram.gram_sums(self.centred, squares)

    @cached_property
    def directions(self) -> Directions:
        """The sum of the unit vectors along the points."""
        return gram.sum_directions(self.points, self.centred)

    @cached_property
    def spectrum(self) -> Float[Tensor, " r"]:
        """All eigenvalues of the covariance, ascending."""
        return gram.eigenvalues(self.centred)

    @cached_property
    def unique(self) -> Unique:
        """Which points are left when exact repeats are removed."""
        return drop_duplicates(self.points)

    @cached_property
    def neighbors(self) -> Neighbors:
        """Nearest neighbours among the distinct points; as many as were asked for and as there are."""
        kept = torch.zeros(len(self), dtype=torch.bool, device=self.points.device)
        kept[self.unique.index] = True
        without = torch.nonzero(~kept).flatten() if self.unique.dropped else None
        return nearest_neighbors(
            self.points, min(self.neighbor_count, len(self.unique.index) - 1), self.products, without
        )

    @cached_property
    def pair(self) -> Pair:
        """This site's points and the previous site's."""
        if self.previous is None:
            raise SpecError("this metric compares a site with the one before it, and no earlier site was given")
        source, target = gram.center(self.previous.double()), gram.center(self.points.double())
        return Pair(source=source.points, target=target.points)

    @cached_property
    def types(self) -> GroupSums:
        """Sums over the occurrences of each type."""
        return sum_groups(self.points, self._labels.ids)

    @cached_property
    def explained(self) -> Explained:
        """How much of the variance among the occurrences of a type lies along one axis."""
        return explain(self.points, self._labels.ids, LEAST_OCCURRENCES)

    @cached_property
    def passages(self) -> Passages:
        """Sums over the points of each sentence."""
        if self._labels.sentences is None:
            raise SpecError("this metric compares tokens of one sentence, and it is not known where sentences begin")
        return sum_passages(self.points, self._labels.sentences)

    @property
    def _labels(self) -> Tokens:
        if self.tokens is None:
            raise SpecError("this metric compares occurrences of tokens, and it is not known which token a point is")
        return self.tokens

    @cached_property
    def losses(self) -> Float[Tensor, " m"]:
        """Losses of the tokens that have one."""
        if self.tokens is None or self.tokens.losses is None:
            raise SpecError("this metric needs the model's loss at each token")
        return self.tokens.losses[~self.tokens.losses.isnan()]


def select_population(
    name: str, points: Float[Tensor, "n d"], tokens: Tokens, *, typical_k: float, seed: int
) -> Int[Tensor, " m"]:
    """Which points of a batch make up a population.

    `all`: every token. `content`: no special tokens, no first position of a window. `typical`: `content` without tokens
    whose norm at this site exceeds max(median + k · 1.4826 · MAD, 2 · median) over the batch. `types`: one seeded
    random occurrence of each token id among `content`. `matched`: a seeded random subset of `content` with as many
    points as `types`: the two differ in repeats alone, not in sample size, special tokens or first positions.
    """
    if name == "typical":
        return select_typical(points, select_members("content", tokens, seed=seed), typical_k)
    return select_members(name, tokens, seed=seed)


def select_members(name: str, tokens: Tokens, *, seed: int) -> Int[Tensor, " m"]:
    """The populations that depend on the tokens alone, the same at every site: all but `typical`."""
    n, device = len(tokens.ids), tokens.ids.device
    if name == "all":
        return torch.arange(n, device=device)
    content = np.flatnonzero((~tokens.special & (tokens.positions > 0)).cpu().numpy())
    if name == "content":
        return torch.from_numpy(content).to(device)
    generator = torch.Generator().manual_seed(seed)
    shuffled = content[torch.randperm(len(content), generator=generator).numpy()]
    types = shuffled[np.unique(tokens.ids.cpu().numpy()[shuffled], return_index=True)[1]]
    if name == "types":
        return torch.from_numpy(np.sort(types)).to(device)
    if name == "matched":
        drawn = torch.randperm(len(content), generator=generator).numpy()[: len(types)]
        return torch.from_numpy(content[np.sort(drawn)]).to(device)
    raise SpecError(f"unknown population {name!r}; there are {', '.join(POPULATIONS)}")


def select_typical(points: Float[Tensor, "n d"], content: Int[Tensor, " m"], k: float) -> Int[Tensor, " t"]:
    """The content whose norm is not far above the batch's median."""
    norms = row_norms(points)
    return content[norms[content] <= typical_limit(norms, k)]


def typical_limit(norms: Float[Tensor, "*s n"], k: float) -> Float[Tensor, "*s"]:
    """The norm above which a token is no longer typical of its batch.

    Where norms are nearly constant the MAD alone would call a token 6 % above the median an outlier: hence 2 · median.
    """
    median = norms.median(-1).values
    spread = MAD_TO_STD * (norms - median[..., None]).abs().median(-1).values
    return torch.maximum(median + k * spread, 2 * median)
