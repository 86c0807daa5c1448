"""Gauge: every metric on every population of every batch at every site; results are kept until the unit is made."""

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope import stack
from anisoscope.cloud import Cloud, select_members, select_typical
from anisoscope.estimates import Evaluated, apply, check_finite, evaluate, judge, neighbors_wanted
from anisoscope.kernels.neighbors import KEPT_POINTS
from anisoscope.metrics import Metric
from anisoscope.norms import Norm
from anisoscope.owners import LISTED, AxisOwners
from anisoscope.progress import Advance
from anisoscope.records import Site, Spec
from anisoscope.rooms import Batch, Room, Rooms

# Clouds with fewer numbers than this (points times coordinates) are measured by one thread.
PARALLEL_NUMBERS = 1 << 20


def seed_for(*parts: int) -> int:
    """A seed that depends on every part."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])


@contextlib.contextmanager
def _threads_for(numbers: int) -> Iterator[None]:
    """One thread for small clouds: threads that wait for each other at every small product cost more than they do.

    Where other programs want the cores too, two threads took twenty times as long as one (docs/log.md).
    """
    before = torch.get_num_threads()
    if numbers >= PARALLEL_NUMBERS or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Clock:
    """Seconds by part: by the wall, or, where a GPU works while the program goes on, by the GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu, self.seconds = on_gpu, defaultdict[str, float](float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what is inside as a part."""
        if not self.on_gpu:
            start = time.perf_counter()
            yield
            self.seconds[part] += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((part, begin, end))

    def settle(self) -> None:
        """Read the GPU's clocks."""
        for part, begin, end in self._events:
            end.synchronize()
            self.seconds[part] += begin.elapsed_time(end) / 1000
        self._events.clear()


class Gauge:
    """What is accumulated while the pools go by."""

    def __init__(
        self,
        spec: Spec,
        metrics: list[Metric],
        sites: Sequence[Site],
        settings: dict[str, Any],
        clock: Clock,
        norms: Mapping[str | None, Norm | str],
    ) -> None:
        self.spec, self.settings, self.clock, self.norms = spec, settings, clock, norms
        self.metrics = [metric for metric in metrics if metric.needs != "norm"]
        self.of_norms = [metric for metric in metrics if metric.needs == "norm"]
        self.results: dict[tuple[Site, str, Metric], dict[int, Evaluated]] = defaultdict(dict)
        """Site, population, metric -> number of the batch -> its result."""
        self.excluded: dict[tuple[Site, str], dict[int, int]] = defaultdict(dict)
        self.owners: dict[Site, AxisOwners] = defaultdict(AxisOwners)
        self.dims: dict[Site, int] = {}
        self.seconds: dict[Site, float] = defaultdict(float)
        # Which measured site comes before a site in its stack: what metrics of neighbouring sites compare with.
        # The final norm is compared with the last block, whether or not its inside is measured too.
        main = [site for site in sites if not site.name.startswith("final_norm.")]
        pairs = itertools.chain(itertools.pairwise(sites), itertools.pairwise(main))
        self.sources = {site: before for before, site in pairs if before.stack == site.stack}
        self.stacked = [metric for metric in self.metrics if metric.stacked and metric.needs in stack.VIEWS]
        if len(self._stacked_populations("moments", "gram_sums", "directions")) > 2:
            self.stacked = []
        self._scratch: Tensor | None = None
        self._members: dict[tuple[str | None, int, str], Tensor] = {}

    def measure(self, rooms: Rooms, batches: list[Batch], advance: Advance) -> None:
        """Measure a pool at every site."""
        for room in rooms.rooms:
            with _threads_for((batches[0].stop - batches[0].start) * room.states.shape[-1]):
                self._measure_room(room, rooms, batches, advance)
        for name, norm in self.norms.items():
            if self.of_norms and isinstance(norm, Norm):
                self._measure_norm(norm, Site(name="final_norm", stack=name), rooms, batches)
        self._members.clear()
        self.clock.settle()

    def _measure_room(self, room: Room, rooms: Rooms, batches: list[Batch], advance: Advance) -> None:
        """The states of a pool at sites of equal width: all at once where a GPU can, else one by one."""
        todo = {(slot, batch.number): self.metrics for slot in range(len(room.sites)) for batch in batches}
        if self.stacked and stack.fits(room.states):
            todo = self._measure_stacks(room, batches)
        for slot, site in enumerate(room.sites):
            clock = time.time()
            states, before = room.states[slot], self.sources.get(site)
            self.dims[site] = states.shape[1]
            if any(todo[slot, batch.number] for batch in batches):
                check_finite(site.name, states[: batches[-1].stop])
            for batch in batches:
                metrics = todo[slot, batch.number]
                if metrics:
                    source = None if before is None else rooms.at(before)[batch.start : batch.stop]
                    cloud = Cloud(
                        points=states[batch.start : batch.stop],
                        tokens=batch.tokens[site.stack].to(states.device),
                        previous=None if source is None else source.to(states.device),
                        neighbor_count=neighbors_wanted(metrics, self.settings),
                        scratch=self._scratch_for(batch, states),
                    )
                    self._measure_cloud(site, cloud, batch, metrics)
                advance(1)
            self.seconds[site] += time.time() - clock

    def _scratch_for(self, batch: Batch, states: Tensor) -> Tensor | None:
        """Memory for products, used by one cloud after the other; GPUs keep theirs at hand anyway."""
        size = (batch.stop - batch.start) ** 2
        if states.is_cuda or batch.stop - batch.start > KEPT_POINTS:
            return None
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = torch.empty(size)
        return self._scratch

    def _measure_cloud(self, site: Site, cloud: Cloud, batch: Batch, metrics: list[Metric]) -> None:
        views = {"all": cloud}
        if cloud.neighbor_count:
            with self.clock("neighbours"):
                _ = cloud.products
        for metric in metrics:
            for name in self.populations(metric):
                if name not in views:
                    views[name] = cloud.take(self._part(name, site, cloud, batch))
                    self.excluded[site, name][batch.number] = len(cloud) - len(views[name])
                if metric.needs == "pair" and cloud.previous is None:
                    note = "there is no earlier site to compare with"
                    result = Evaluated(value=math.nan, points=len(views[name]), dropped=0, note=note)
                else:
                    with self.clock("neighbours" if metric.needs == "neighbors" else "spectrum"):
                        result = evaluate(views[name], metric, self.settings)
                self.results[site, name, metric][batch.number] = result
        if any(metric.name == "leading_variance" for metric in metrics):
            self.owners[site].add(cloud)

    def _measure_norm(self, norm: Norm, site: Site, rooms: Rooms, batches: list[Batch]) -> None:
        """What a final norm does to the mean of its states; populations are those of what it returns."""
        states, normed = rooms.at(site), rooms.at(replace(site, name="final_norm.normed"))
        for batch in batches:
            here = slice(batch.start, batch.stop)
            for name in dict.fromkeys(name for metric in self.of_norms for name in self.populations(metric)):
                part = self._part(name, site, Cloud(points=states[here]), batch)
                view = norm.view(normed[here][part])
                self.excluded[site, name][batch.number] = len(normed[here]) - len(part)
                for metric in (metric for metric in self.of_norms if name in self.populations(metric)):
                    value = apply(metric, view, self.settings)
                    result = judge(metric, value, len(part), 0, states.shape[1], self.settings)
                    self.results[site, name, metric][batch.number] = result

    def populations(self, metric: Metric) -> tuple[str, ...]:
        """The populations a metric is measured on."""
        return self.spec.populations or metric.populations

    def _measure_stacks(self, room: Room, batches: list[Batch]) -> dict[tuple[int, int], list[Metric]]:
        """Measure what can be measured for many clouds at once; which metrics are left for each cloud."""
        rest = [metric for metric in self.metrics if metric not in self.stacked]
        todo = {(slot, batch.number): rest for slot in range(len(room.sites)) for batch in batches}
        # Batches of a pool may differ by a point; a stack is of one size.
        for size in sorted({batch.stop - batch.start for batch in batches}):
            equal = [batch for batch in batches if batch.stop - batch.start == size]
            clouds = [(slot, batch) for slot in range(len(room.sites)) for batch in equal]
            pieces = math.ceil(len(clouds) / stack.most_clouds(size, room.states))
            for piece in range(pieces):
                part = clouds[piece * len(clouds) // pieces : (piece + 1) * len(clouds) // pieces]
                for slot, batch in self._measure_stack(room, part):
                    todo[slot, batch.number] = self.metrics
        return todo

    def _measure_stack(self, room: Room, clouds: list[tuple[int, Batch]]) -> list[tuple[int, Batch]]:
        """One stack: its results, and the clouds that have to be measured one by one."""
        points = room.stack(clouds)
        spectral = self._stacked_populations("moments", "gram_sums", "directions") or ("all",)
        dimensional = self._stacked_populations("neighbors")
        masks = self._masks([(room.sites[slot].stack, batch) for slot, batch in clouds], points.device)
        found = stack.survey(points, masks, spectral, dimensional, self.spec.typical_k, self.clock)
        asked = [(metric, name) for metric in self.stacked for name in self.populations(metric)]
        answers: dict[Any, Tensor] = {"doubtful": found.doubtful}
        answers |= {
            (metric, name): apply(metric, found.views[metric.needs][name], self.settings) for metric, name in asked
        }
        answers |= {("points", name): count for name, count in found.points.items()}
        answers |= {("distinct", name): count for name, count in found.distinct.items()}
        leading = found.views["moments"].get("all") if spectral[0] == "all" else None
        if leading is not None:
            top = found.shares.topk(min(LISTED, points.shape[1]))
            answers |= {"shares": top.values, "rows": top.indices, "leading": leading.leading}
            answers["first"] = (found.shares * masks["first"]).sum(-1)
            sure = torch.where(found.doubtful, 0.0, leading.leading)
            room.weigh([slot for slot, _ in clouds], leading.axis.square() * sure[:, None])
        known = {key: values.tolist() for key, values in stack.to_host(answers).items()}
        left = []
        for place, (slot, batch) in enumerate(clouds):
            if known["doubtful"][place]:
                left.append((slot, batch))
                continue
            site = room.sites[slot]
            for metric, name in asked:
                whole = used = int(known["points", name][place])
                if metric.needs == "neighbors":
                    used = int(known["distinct", name][place])
                self.excluded[site, name][batch.number] = points.shape[1] - whole
                value = known[metric, name][place]
                result = judge(metric, value, used, whole - used, points.shape[2], self.settings)
                self.results[site, name, metric][batch.number] = result
            if leading is not None and known["leading"][place] > 0:
                rows = [int(row) for row in known["rows"][place]]
                facts = batch.tokens[site.stack].facts(rows)
                self.owners[site].take(known["shares"][place], facts, known["first"][place], known["leading"][place])
        return left

    def _stacked_populations(self, *needs: str) -> tuple[str, ...]:
        names = [self.populations(metric) for metric in self.stacked if metric.needs in needs]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(names)))

    def _masks(self, owners: list[tuple[str | None, Batch]], device: torch.device) -> dict[str, Tensor]:
        """Who belongs to each population that depends on the tokens alone, cloud by cloud; and the first positions."""
        asked = (name for metric in self.stacked for name in self.populations(metric))
        names = [name for name in dict.fromkeys(("all", "content", *asked)) if name != "typical"]
        different = list(dict.fromkeys((part, batch.number) for part, batch in owners))
        batches = {(part, batch.number): batch for part, batch in owners}
        table = np.zeros((len(names) + 1, len(different), owners[0][1].stop - owners[0][1].start), dtype=bool)
        for row, (part, number) in enumerate(different):
            for place, name in enumerate(names):
                table[place, row, self._members_of(name, part, batches[part, number]).numpy()] = True
            table[-1, row] = batches[part, number].tokens[part].positions.numpy() == 0
        rows = torch.tensor([different.index((part, batch.number)) for part, batch in owners])
        masks = torch.from_numpy(table).to(device)[:, rows.to(device)]
        return dict(zip([*names, "first"], masks, strict=True))

    def _members_of(self, name: str, part: str | None, batch: Batch) -> Tensor:
        key = part, batch.number, name
        if key not in self._members:
            seed = seed_for(self.spec.seed, batch.number, 1)
            self._members[key] = select_members(name, batch.tokens[part], seed=seed)
        return self._members[key]

    def _part(self, name: str, site: Site, cloud: Cloud, batch: Batch) -> Tensor:
        """Which points of a cloud a population has."""
        members = self._members_of("content" if name == "typical" else name, site.stack, batch).to(cloud.points.device)
        return select_typical(cloud.points, members, self.spec.typical_k) if name == "typical" else members

    def collect_owners(self, rooms: Rooms) -> dict[Site, AxisOwners]:
        """Who owns the leading axes, with what the rooms gathered on a GPU."""
        for room in rooms.rooms:
            for site, coordinates in zip(
                room.sites, [] if room.coordinates is None else room.coordinates, strict=False
            ):
                self.owners[site].weigh(coordinates.cpu())
        return self.owners
