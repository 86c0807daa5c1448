"""The walk: documents -> token windows -> states at sites -> Clouds -> views -> metrics -> Records -> a Unit."""

import contextlib
import ctypes
import itertools
import math
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anisoscope
from anisoscope import stack
from anisoscope.capture import capture, token_losses
from anisoscope.cloud import Cloud, Tokens, select_members, select_typical
from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.estimates import (
    Evaluated,
    apply,
    check_finite,
    check_settings,
    deal,
    evaluate,
    judge,
    neighbors_wanted,
    summarize,
)
from anisoscope.layout import select_sites
from anisoscope.metrics import Metric, find_metrics
from anisoscope.models import Model, adopt_model, hash_weights, load_model
from anisoscope.owners import LISTED, AxisOwners
from anisoscope.progress import Advance, show_progress
from anisoscope.records import POPULATIONS, Estimate, Record, Site, Spec, Unit, step_of
from anisoscope.text import POOLED_BATCHES, Pool, Windows, draw_windows, plan_pools

# Tokens in one forward pass where the batch size is left to us.
FORWARD_TOKENS = 4096


def _seed_for(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])


def resolve(spec: Spec, *, corpus: Corpus | None = None, model: Model | None = None) -> Spec:
    """The Spec with everything filled in that its key needs: metric versions, hashes of weights and corpus.

    Computable before a run, without loading a model, so that a stored unit is recognised.
    """
    if min(spec.tokens, spec.seq_len) < 1:
        raise SpecError(f"tokens and seq_len must be positive; came {spec.tokens} and {spec.seq_len}")
    check_settings(batch_points=spec.batch_points, **_settings(spec))
    for name in spec.populations:
        if name not in POPULATIONS:
            raise SpecError(f"unknown population {name!r}; there are {', '.join(POPULATIONS)}")
    metrics = find_metrics(
        [item if isinstance(item, str) else item[0] for item in spec.metrics], gride_scales=spec.gride_scales
    )
    asked = dict(item for item in spec.metrics if not isinstance(item, str))
    for metric in metrics:
        if asked.get(metric.name, metric.version) != metric.version:
            raise SpecError(
                f"the Spec asks for version {asked[metric.name]} of {metric.name}; this anisoscope computes version "
                f"{metric.version} (CHANGELOG.md says what changed)"
            )
    corpus = corpus or load_corpus(spec.corpus)
    weights = model.weights if model else hash_weights(spec.model, revision=spec.revision)
    for what, named, found in (("weights", spec.weights, weights), ("corpus", spec.corpus_hash, corpus.hash)):
        if named not in (None, found):
            raise SpecError(f"the Spec is about {what} with hash {named}, and what is here has {found}")
    return replace(
        spec,
        weights=weights,
        step=spec.step if spec.step is not None else step_of(spec.revision),
        corpus=corpus.name,
        corpus_hash=corpus.hash,
        metrics=tuple((metric.name, metric.version) for metric in metrics),
    )


def _settings(spec: Spec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("discard_fraction", "gride_scales", "neighbors", "isoscore_zeta")}


def measure(
    spec: Spec,
    *,
    model: Any = None,
    tokenizer: Any = None,
    corpus: Corpus | None = None,
    device: str = "auto",
    device_map: Any = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
) -> Unit:
    """Run a model over text and measure its states at every site.

    `model` and `tokenizer` hand in a module of your own (or a `models.Model`); otherwise `spec.model` is loaded.
    `batch_size` is the number of windows in a forward pass; when memory runs out it is halved, and the unit says so.
    """
    corpus = corpus or load_corpus(spec.corpus)
    if model is None:
        spec = resolve(spec, corpus=corpus)
        loaded = load_model(
            spec.model,
            revision=spec.revision,
            dtype=spec.dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            blocks=spec.blocks,
            final_norm=spec.final_norm,
        )
    else:
        loaded = (
            model
            if isinstance(model, Model)
            else adopt_model(model, tokenizer, name=spec.model, blocks=spec.blocks, final_norm=spec.final_norm)
        )
        spec = resolve(spec, corpus=corpus, model=loaded)
    windows = draw_windows(
        corpus,
        loaded.tokenizer,
        seq_len=_fitting_length(spec, loaded),
        count=math.ceil(spec.tokens / spec.seq_len),
        seed=spec.seed,
        special_tokens=spec.special_tokens,
    )
    return _Walk(spec, loaded, corpus, windows, batch_size).run(progress)


def _fitting_length(spec: Spec, model: Model) -> int:
    positions = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    limit = min(positions or spec.seq_len, getattr(model.tokenizer, "model_max_length", None) or spec.seq_len)
    if spec.seq_len > limit:
        raise SpecError(f"seq_len is {spec.seq_len}, and {spec.model} has {limit} positions; ask for at most that")
    return spec.seq_len


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
class _Room:
    """The states of a pool at sites of one width, dtype and device."""

    states: Tensor
    """One matrix a site."""
    sites: list[Site] = field(default_factory=list)
    coordinates: Tensor | None = None
    """Σ v_j² λ₁ over the batches that were stacked, one row a site."""

    def takes(self, state: Tensor) -> bool:
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
        if self.coordinates is None:
            self.coordinates = owned.new_zeros(len(self.states), owned.shape[1])
        self.coordinates.index_add_(0, torch.tensor(slots, device=owned.device), owned)


class _Walk:
    """One run of `measure`: what is accumulated while the pools go by."""

    def __init__(self, spec: Spec, model: Model, corpus: Corpus, windows: Windows, batch_size: int | None) -> None:
        self.spec, self.model, self.corpus, self.windows = spec, model, corpus, windows
        self.key = spec.key
        self.settings = _settings(spec)
        metrics = find_metrics([name for name, _ in spec.metrics if isinstance(name, str)])
        self.loss = next((metric for metric in metrics if metric.needs == "losses"), None)
        self.metrics = [metric for metric in metrics if metric.needs != "losses"]
        self.sites = select_sites(model.layout, spec.sites)
        self.batch_size = batch_size or max(1, FORWARD_TOKENS // spec.seq_len)
        self.notes = [*corpus.notes, *windows.notes, *model.notes]
        self.results: dict[tuple[Site, str, Metric], dict[int, Evaluated]] = defaultdict(dict)
        """Site, population, metric -> number of the batch -> its result."""
        self.excluded: dict[tuple[Site, str], dict[int, int]] = defaultdict(dict)
        self.owners: dict[Site, AxisOwners] = defaultdict(AxisOwners)
        self.dims: dict[Site, int] = {}
        self.seconds: dict[Site, float] = defaultdict(float)
        self.cost: dict[str, float] = defaultdict(float)
        self.losses: list[Evaluated] = []
        self.rooms: list[_Room] = []
        self.slots: dict[Site, tuple[_Room, int]] = {}
        self.members: dict[tuple[str | None, int, str], Tensor] = {}
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.on_gpu = any(parameter.is_cuda for parameter in model.module.parameters())
        self.stacked = [metric for metric in self.metrics if metric.stacked and metric.needs in stack.VIEWS]
        if len(self._stacked_populations("moments", "gram_sums", "directions")) > 2:
            self.stacked = []
        # Which measured site comes before a site in its stack: what metrics of neighbouring sites compare with.
        self.sources = {site: before for before, site in itertools.pairwise(self.sites) if before.stack == site.stack}
        count, length = windows.token_ids.shape
        self.pools = plan_pools(count, length, spec.batch_points)

    def run(self, progress: bool) -> Unit:
        count, length = self.windows.token_ids.shape
        batches = sum(pool.batches for pool in self.pools)
        if count * length < self.spec.batch_points:
            self.notes.append(f"{count * length} points in all, fewer than batch_points = {self.spec.batch_points}")
        elif batches < POOLED_BATCHES:
            self.notes.append(f"{batches} batches in all: pooled and dealt, but from fewer than {POOLED_BATCHES}")
        start = time.time()
        with show_progress(self.spec.model, total=count + batches * len(self.sites), shown=progress) as advance:
            for pool in self.pools:
                self._measure_pool(pool, advance)
                self.members.clear()
                self._settle_clocks()
                if not self.on_gpu:
                    _return_free_memory()
        for room in self.rooms:
            for site, coordinates in zip(
                room.sites, [] if room.coordinates is None else room.coordinates, strict=False
            ):
                self.owners[site].weigh(coordinates.cpu())
        return self._unit(time.time() - start)

    def _measure_pool(self, pool: Pool, advance: Advance) -> None:
        points = (pool.stop - pool.start) * self.windows.token_ids.shape[1]
        hands = deal(points, pool.batches, _seed_for(self.spec.seed, pool.first))
        with self._clock("forward"):
            losses = self._run_model(pool, torch.cat(hands), advance)
        starts = np.cumsum([0, *map(len, hands)]).tolist()
        batches = [
            Batch(
                number=pool.first + place,
                start=starts[place],
                stop=starts[place + 1],
                tokens={part.name: self._tokens(pool, part.name, hand.numpy()) for part in self.model.layout.stacks},
            )
            for place, hand in enumerate(hands)
        ]
        for room in self.rooms:
            self._measure_room(room, batches, advance)
        if self.loss is not None and losses is not None:
            known = losses.cpu().numpy()
            for batch, hand in zip(batches, hands, strict=True):
                mine = torch.from_numpy(known[hand.numpy()])
                here = replace(batch.tokens[self.model.layout.stacks[-1].name], losses=mine)
                cloud = Cloud(points=torch.zeros(len(hand), 1), tokens=here)
                self.losses.append(evaluate(cloud, self.loss, self.settings))

    def _measure_room(self, room: "_Room", batches: list["Batch"], advance: Advance) -> None:
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
                    source = None if before is None else self._states(before)[batch.start : batch.stop]
                    cloud = Cloud(
                        points=states[batch.start : batch.stop],
                        tokens=batch.tokens[site.stack].to(states.device),
                        previous=None if source is None else source.to(states.device),
                        neighbor_count=neighbors_wanted(metrics, self.settings),
                    )
                    self._measure_cloud(site, cloud, batch, metrics)
                advance(1)
            self.seconds[site] += time.time() - clock

    def _measure_cloud(self, site: Site, cloud: Cloud, batch: "Batch", metrics: list[Metric]) -> None:
        views = {"all": cloud}
        if cloud.neighbor_count:
            with self._clock("neighbours"):
                _ = cloud.products
        for metric in metrics:
            for name in self._populations(metric):
                if name not in views:
                    views[name] = cloud.take(self._part(name, site, cloud, batch))
                    self.excluded[site, name][batch.number] = len(cloud) - len(views[name])
                if metric.needs == "pair" and cloud.previous is None:
                    note = "there is no earlier site to compare with"
                    result = Evaluated(value=math.nan, points=len(views[name]), dropped=0, note=note)
                else:
                    with self._clock("neighbours" if metric.needs == "neighbors" else "spectrum"):
                        result = evaluate(views[name], metric, self.settings)
                self.results[site, name, metric][batch.number] = result
        if any(metric.name == "leading_variance" for metric in metrics):
            self.owners[site].add(cloud)

    def _populations(self, metric: Metric) -> tuple[str, ...]:
        return self.spec.populations or metric.populations

    def _measure_stacks(self, room: "_Room", batches: list["Batch"]) -> dict[tuple[int, int], list[Metric]]:
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

    def _measure_stack(self, room: "_Room", clouds: list[tuple[int, "Batch"]]) -> list[tuple[int, "Batch"]]:
        """One stack: its results, and the clouds that have to be measured one by one."""
        points = room.stack(clouds)
        spectral = self._stacked_populations("moments", "gram_sums", "directions") or ("all",)
        dimensional = self._stacked_populations("neighbors")
        masks = self._masks([(room.sites[slot].stack, batch) for slot, batch in clouds], points.device)
        found = stack.survey(points, masks, spectral, dimensional, self.spec.typical_k, self._clock)
        asked = [(metric, name) for metric in self.stacked for name in self._populations(metric)]
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
        names = [self._populations(metric) for metric in self.stacked if metric.needs in needs]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(names)))

    def _masks(self, owners: list[tuple[str | None, "Batch"]], device: torch.device) -> dict[str, Tensor]:
        """Who belongs to each population that depends on the tokens alone, cloud by cloud; and the first positions."""
        asked = (name for metric in self.stacked for name in self._populations(metric))
        names = [name for name in dict.fromkeys(("all", "content", *asked)) if name != "typical"]
        different = list(dict.fromkeys((part, batch.number) for part, batch in owners))
        batches = {(part, batch.number): batch for part, batch in owners}
        table = np.zeros((len(names) + 1, len(different), owners[0][1].stop - owners[0][1].start), dtype=bool)
        for row, (part, number) in enumerate(different):
            for place, name in enumerate(names):
                table[place, row, self._members(name, part, batches[part, number]).numpy()] = True
            table[-1, row] = batches[part, number].tokens[part].positions.numpy() == 0
        rows = torch.tensor([different.index((part, batch.number)) for part, batch in owners])
        masks = torch.from_numpy(table).to(device)[:, rows.to(device)]
        return dict(zip([*names, "first"], masks, strict=True))

    def _members(self, name: str, part: str | None, batch: "Batch") -> Tensor:
        key = part, batch.number, name
        if key not in self.members:
            seed = _seed_for(self.spec.seed, batch.number, 1)
            self.members[key] = select_members(name, batch.tokens[part], seed=seed)
        return self.members[key]

    def _part(self, name: str, site: Site, cloud: Cloud, batch: "Batch") -> Tensor:
        """Which points of a cloud a population has."""
        members = self._members("content" if name == "typical" else name, site.stack, batch).to(cloud.points.device)
        return select_typical(cloud.points, members, self.spec.typical_k) if name == "typical" else members

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        """Time a part: by the wall, or, where a GPU works while the program goes on, by the GPU."""
        if not self.on_gpu:
            start = time.perf_counter()
            yield
            self.cost[part] += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self.events.append((part, begin, end))

    def _settle_clocks(self) -> None:
        for part, begin, end in self.events:
            end.synchronize()
            self.cost[part] += begin.elapsed_time(end) / 1000
        self.events.clear()

    def _run_model(self, pool: Pool, order: Tensor, advance: Advance) -> Tensor | None:
        """States of every site into the rooms, in the order given; losses (tokens) of a pool, in window order."""
        losses: list[Tensor] = []
        start, length = pool.start, self.windows.token_ids.shape[1]
        place = torch.from_numpy(np.argsort(order.numpy()))
        places: dict[torch.device, Tensor] = {}
        while start < pool.stop:
            stop = min(start + self.batch_size, pool.stop)
            ids = torch.from_numpy(self.windows.token_ids[start:stop])
            rows = slice((start - pool.start) * length, (stop - pool.start) * length)

            def keep(site: Site, state: Tensor, rows: slice = rows) -> None:
                if state.device not in places:
                    places[state.device] = place.to(state.device)
                self._states(site, state).index_copy_(0, places[state.device][rows], state.flatten(0, 1))

            try:
                captured = capture(self.model, ids, self.sites, keep)
                loss = None
                if self.loss is not None:
                    seeds = [_seed_for(self.spec.seed, window, 2) for window in range(start, stop)]
                    loss = token_losses(self.model, ids, captured, seeds)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._halve_batch(error)
                continue
            if loss is not None:
                losses.append(loss.flatten())
            del captured
            advance(stop - start)
            start = stop
        return torch.cat(losses) if losses else None

    def _states(self, site: Site, like: Tensor | None = None) -> Tensor:
        """Room for the states of a pool at a site, made once: allocating it for each pool would fragment memory."""
        if site not in self.slots:
            assert like is not None
            match = [room for room in self.rooms if room.takes(like)]
            if not match:
                points = max(pool.stop - pool.start for pool in self.pools) * like.shape[1]
                # Most models have one width, so that all sites share a room.
                states = like.new_empty(len(self.sites) - len(self.slots), points, like.shape[2])
                match = [_Room(states=states)]
                self.rooms += match
            self.slots[site] = match[0], len(match[0].sites)
            match[0].sites.append(site)
        room, slot = self.slots[site]
        return room.states[slot]

    def _halve_batch(self, error: RuntimeError) -> None:
        """Go on with half as many windows in a forward pass where memory ran out; other errors are not ours to hide."""
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not full:
            raise error
        if self.batch_size == 1:
            raise ModelError(
                f"memory ran out at one window of {self.spec.seq_len} tokens: {error}; "
                "try a smaller --seq-len, --dtype bfloat16 or --device-map auto"
            ) from error
        self.batch_size //= 2
        self.notes.append(f"memory ran out: windows in a forward pass halved to {self.batch_size}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _tokens(self, pool: Pool, stack: str | None, hand: np.ndarray) -> Tokens:
        part = slice(pool.start, pool.stop)
        windows = self.windows
        ids, documents, special = (rows[part] for rows in (windows.token_ids, windows.documents, windows.special))
        if self.model.kind == "encoder-decoder" and stack == "decoder":
            # The decoder reads the window shifted right: position 0 holds the start token, p the token before p.
            ids, documents, special = (
                np.concatenate([rows[:, :1], rows[:, :-1]], 1) for rows in (ids, documents, special)
            )
            special[:, 0] = True
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        # By numpy: on machines with many cores, torch takes milliseconds to wake its threads for these.
        ids, positions, documents, special = (
            torch.from_numpy(rows.reshape(-1)[hand]) for rows in (ids, positions, documents, special)
        )
        return Tokens(ids=ids, positions=positions, documents=documents, special=special)

    def _unit(self, seconds: float) -> Unit:
        attachments: dict[str, np.ndarray] = {}
        for site, owners in self.owners.items():
            prefix = f"owners/{site.stack or ''}/{site.name}"
            attachments |= owners.attach(prefix, self._decode, self.corpus.titles)
        provenance = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "cost": self._cost(seconds),
            "versions": {
                "anisoscope": anisoscope.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": _version_of("transformers"),
            },
            "device": _device_name(self.model.module),
            "windows": len(self.windows.token_ids),
            "layout": [asdict(part) for part in self.model.layout.stacks],
            "checks": list(self.model.checks),
            "notes": list(dict.fromkeys(self.notes)),
        }
        return Unit(spec=self.spec, provenance=provenance, records=tuple(self._records()), attachments=attachments)

    def _cost(self, seconds: float) -> dict[str, float]:
        """Seconds by what they were spent on."""
        parts = {part: round(self.cost[part], 3) for part in ("forward", "neighbours", "spectrum")}
        return parts | {"rest": round(max(seconds - sum(parts.values()), 0.0), 3)}

    def _decode(self, token: int) -> str:
        return self.model.tokenizer.convert_ids_to_tokens(token)

    def _records(self) -> Iterator[Record]:
        for site, metric in itertools.product(self.sites, self.metrics):
            for population in self._populations(metric):
                yield self._answer(site, population, metric)
        if self.loss is not None:
            output = Site(name="output")
            answer = (
                summarize(self.losses, self.loss, 1, self.settings)
                if self.losses
                else Estimate.from_values(
                    (), null=math.nan, points=0, dropped=0, dim=1, note="the model has no language-model head"
                )
            )
            measured = self.windows.token_ids.size
            yield self._record(output, "all", self.loss, answer, measured - answer.points)

    def _answer(self, site: Site, population: str, metric: Metric) -> Record:
        results = [result for _, result in sorted(self.results[site, population, metric].items())]
        answer = summarize(results, metric, self.dims[site], self.settings)
        source = self.sources.get(site) if metric.needs == "pair" else None
        variant = f"from={source.name}" if source else None
        return self._record(site, population, metric, answer, sum(self.excluded[site, population].values()), variant)

    def _record(
        self, site: Site, population: str, metric: Metric, answer: Estimate, excluded: int, variant: str | None = None
    ) -> Record:
        spec = self.spec
        return Record(
            key=self.key,
            model=spec.model,
            revision=spec.revision,
            step=spec.step,
            tokens=None,
            kind=self.model.kind,
            stack=site.stack,
            corpus=spec.corpus,
            population=population,
            site=site.name,
            depth=site.depth,
            metric=metric.name,
            metric_version=metric.version,
            value=answer.value,
            spread=answer.spread,
            null=answer.null,
            batches=answer.batches,
            points=answer.points,
            dropped=answer.dropped,
            excluded=excluded,
            dim=answer.dim,
            variant=variant,
            values=answer.values,
            note=answer.note,
            seconds=round(self.seconds[site], 6),
        )


def _return_free_memory() -> None:
    """Hand free heap pages back: glibc keeps the holes that thousands of large arrays leave, and would only grow."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _version_of(package: str) -> str:
    return str(getattr(__import__(package), "__version__", "unknown"))


def _device_name(module: torch.nn.Module) -> str:
    devices = {parameter.device for parameter in module.parameters()}
    names = {torch.cuda.get_device_name(item) if item.type == "cuda" else item.type for item in devices}
    return ", ".join(sorted(names)) or "cpu"
