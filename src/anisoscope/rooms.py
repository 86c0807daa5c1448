"""Rooms: the states of a pool, kept in the order in which they were dealt, sites of equal width side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.cloud import Tokens
from anisoscope.records import Site


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Points of a pool that are measured together."""

    number: int
    start: int
    stop: int
    """Which of the pool's points, as they lie in the rooms."""
    tokens: dict[str | None, Tokens]
    """By stack of the model."""


@dataclass(kw_only=True)
class Room:
    """The states of a pool at sites of one width, dtype and device."""

    states: Tensor
    """One matrix a site."""
    sites: list[Site] = field(default_factory=list)
    coordinates: Tensor | None = None
    """Σ v_j² λ₁ over the batches that were stacked, one row a site."""

    def takes(self, state: Tensor) -> bool:
        """Whether such states belong here and there is place."""
        mine, other = ((it.dtype, it.device, it.shape[2]) for it in (self.states, state))
        return mine == other and len(self.sites) < len(self.states)

    def stack(self, clouds: Sequence[tuple[int, Batch]]) -> Tensor:
        """Clouds of equal size as one tensor: a view where they lie side by side."""
        size, flat = clouds[0][1].stop - clouds[0][1].start, self.states.flatten(0, 1)
        places = [slot * self.states.shape[1] + batch.start for slot, batch in clouds]
        first, past = places[0], places[0] + len(clouds) * size
        if places == list(range(first, past, size)):
            return flat[first:past].view(len(clouds), size, -1)
        return torch.stack([flat[place : place + size] for place in places])

    def weigh(self, slots: list[int], owned: Tensor) -> None:
        """Add up v_j² λ₁ of clouds, each at its site."""
        if self.coordinates is None:
            self.coordinates = owned.new_zeros(len(self.states), owned.shape[1])
        self.coordinates.index_add_(0, torch.tensor(slots, device=owned.device), owned)


class Rooms:
    """Room for the states of every site, made once: allocating it for each pool would fragment memory."""

    def __init__(self, sites: int, points: int) -> None:
        self.sites, self.points = sites, points
        self.rooms: list[Room] = []
        self.slots: dict[Site, tuple[Room, int]] = {}

    def keep(self, site: Site, state: Float[Tensor, "b t d"], rows: Int[Tensor, " m"]) -> None:
        """Copy the states of some windows to their rows."""
        if site not in self.slots:
            room = next((room for room in self.rooms if room.takes(state)), None)
            if room is None:
                # Most models have one width, so that all sites share a room.
                room = Room(states=state.new_empty(self.sites - len(self.slots), self.points, state.shape[2]))
                self.rooms.append(room)
            self.slots[site] = room, len(room.sites)
            room.sites.append(site)
        self.at(site).index_copy_(0, rows, state.flatten(0, 1))

    def at(self, site: Site) -> Float[Tensor, "n d"]:
        """The states at a site."""
        room, slot = self.slots[site]
        return room.states[slot]
