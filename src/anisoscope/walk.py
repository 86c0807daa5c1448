"""The walk: documents -> token windows -> states at sites -> Clouds -> views -> metrics -> Records -> a Unit."""

import contextlib
import ctypes
import itertools
import math
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anisoscope
from anisoscope.capture import capture, token_losses
from anisoscope.cloud import Cloud, Tokens, select_population
from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.estimates import Evaluated, check_finite, check_settings, deal, evaluate, neighbors_wanted, summarize
from anisoscope.layout import select_sites
from anisoscope.metrics import Metric, find_metrics
from anisoscope.models import Model, adopt_model, hash_weights, load_model
from anisoscope.owners import AxisOwners
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


class _Walk:
    """One run of `measure`: what is accumulated while the pools go by."""

    def __init__(self, spec: Spec, model: Model, corpus: Corpus, windows: Windows, batch_size: int | None) -> None:
        self.spec, self.model, self.corpus, self.windows = spec, model, corpus, windows
        self.settings = _settings(spec)
        metrics = find_metrics([name for name, _ in spec.metrics if isinstance(name, str)])
        self.loss = next((metric for metric in metrics if metric.needs == "losses"), None)
        self.metrics = [metric for metric in metrics if metric.needs != "losses"]
        self.sites = select_sites(model.layout, spec.sites)
        self.neighbors = neighbors_wanted(self.metrics, self.settings)
        self.batch_size = batch_size or max(1, FORWARD_TOKENS // spec.seq_len)
        self.notes = [*corpus.notes, *windows.notes, *model.notes]
        self.results: dict[tuple[Site, str, Metric], list[Evaluated]] = defaultdict(list)
        self.excluded: dict[tuple[Site, str], int] = defaultdict(int)
        self.owners: dict[Site, AxisOwners] = defaultdict(AxisOwners)
        self.dims: dict[Site, int] = {}
        self.seconds: dict[Site, float] = defaultdict(float)
        self.cost: dict[str, float] = defaultdict(float)
        self.losses: list[Evaluated] = []
        self.rooms: dict[Site, Tensor] = {}
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
                _return_free_memory()
        return self._unit(time.time() - start)

    def _measure_pool(self, pool: Pool, advance: Advance) -> None:
        with self._clock("forward"):
            states, losses = self._run_model(pool, advance)
        points_in_pool = (pool.stop - pool.start) * self.windows.token_ids.shape[1]
        hands = deal(points_in_pool, pool.batches, _seed_for(self.spec.seed, pool.first))
        tokens = {stack.name: self._tokens(pool, stack.name, losses) for stack in self.model.layout.stacks}
        if self.loss is not None and losses is not None:
            known = tokens[self.model.layout.stacks[-1].name]
            for hand in hands:
                cloud = Cloud(points=torch.zeros(len(hand), 1), tokens=known.take(hand))
                self.losses.append(evaluate(cloud, self.loss, self.settings))
        # Which points most populations have depends on the tokens alone: found once for all sites.
        parts: dict[tuple[str | None, int, str], Tensor] = {}
        for site in self.sites:
            clock = time.time()
            points = states[site]
            check_finite(site.name, points)
            here = tokens[site.stack]
            for number, hand in enumerate(hands, start=pool.first):
                index = hand.to(points.device)
                before = states[self.sources[site]] if site in self.sources else None
                cloud = Cloud(
                    points=points[index],
                    tokens=here.take(hand).to(points.device),
                    previous=None if before is None else before[hand.to(before.device)].to(points.device),
                    neighbor_count=self.neighbors,
                )
                self._measure_cloud(site, cloud, number, parts)
                advance(1)
            self.dims[site] = points.shape[1]
            self.seconds[site] += time.time() - clock

    def _measure_cloud(
        self, site: Site, cloud: Cloud, number: int, parts: dict[tuple[str | None, int, str], Tensor]
    ) -> None:
        views = {"all": cloud}
        if self.neighbors:
            with self._clock("neighbours"):
                _ = cloud.products
        for metric in self.metrics:
            for name in self.spec.populations or metric.populations:
                if name not in views:
                    index = self._part(name, site, cloud, number, parts)
                    views[name] = cloud.take(index)
                    self.excluded[site, name] += len(cloud) - len(index)
                if metric.needs == "pair" and cloud.previous is None:
                    nothing = torch.tensor(math.nan)
                    note = "there is no earlier site to compare with"
                    result = Evaluated(value=nothing, points=len(views[name]), dropped=0, note=note)
                else:
                    with self._clock("neighbours" if metric.needs == "neighbors" else "spectrum"):
                        result = evaluate(views[name], metric, self.settings)
                self.results[site, name, metric].append(result)
        if any(metric.name == "leading_variance" for metric in self.metrics):
            self.owners[site].add(cloud)

    def _part(
        self, name: str, site: Site, cloud: Cloud, number: int, parts: dict[tuple[str | None, int, str], Tensor]
    ) -> Tensor:
        """The points of a population, from `parts` where it does not depend on the states."""
        assert cloud.tokens is not None
        key = site.stack, number, name
        if key not in parts:
            seed = _seed_for(self.spec.seed, number, 1)
            index = select_population(name, cloud.points, cloud.tokens, typical_k=self.spec.typical_k, seed=seed)
            if name == "typical":
                return index
            parts[key] = index
        return parts[key].to(cloud.points.device)

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.cost[part] += time.perf_counter() - start

    def _run_model(self, pool: Pool, advance: Advance) -> tuple[dict[Site, Tensor], Tensor | None]:
        """States (tokens, d) of every site and losses (tokens) of a pool, in window order."""
        losses: list[Tensor] = []
        start, length = pool.start, self.windows.token_ids.shape[1]
        while start < pool.stop:
            stop = min(start + self.batch_size, pool.stop)
            ids = torch.from_numpy(self.windows.token_ids[start:stop])
            try:
                captured = capture(self.model, ids, self.sites)
                loss = None
                if self.loss is not None:
                    seeds = [_seed_for(self.spec.seed, window, 2) for window in range(start, stop)]
                    loss = token_losses(self.model, ids, captured, seeds)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                self._halve_batch(error)
                continue
            rows = slice((start - pool.start) * length, (stop - pool.start) * length)
            for site, state in captured.states.items():
                self._room_for(site, state)[rows] = state.flatten(0, 1)
            if loss is not None:
                losses.append(loss.flatten())
            del captured
            advance(stop - start)
            start = stop
        points = (pool.stop - pool.start) * length
        return {site: self.rooms[site][:points] for site in self.sites}, torch.cat(losses) if losses else None

    def _room_for(self, site: Site, state: Tensor) -> Tensor:
        """Room for the states of a pool, made once: allocating it anew for each pool would fragment memory."""
        if site not in self.rooms:
            points = max(pool.stop - pool.start for pool in self.pools) * state.shape[1]
            self.rooms[site] = state.new_empty(points, state.shape[2])
        return self.rooms[site]

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

    def _tokens(self, pool: Pool, stack: str | None, losses: Tensor | None) -> Tokens:
        part = slice(pool.start, pool.stop)
        ids, documents, special = (
            torch.from_numpy(values[part])
            for values in (self.windows.token_ids, self.windows.documents, self.windows.special)
        )
        if self.model.kind == "encoder-decoder" and stack == "decoder":
            # The decoder reads the window shifted right: position 0 holds the start token, p the token before p.
            ids, documents, special = (torch.cat([rows[:, :1], rows[:, :-1]], 1) for rows in (ids, documents, special))
            special[:, 0] = True
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        return Tokens(
            ids=ids.flatten(),
            positions=positions.flatten(),
            documents=documents.flatten(),
            special=special.flatten(),
            losses=None if losses is None else losses.cpu(),
        )

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
            "layout": [asdict(stack) for stack in self.model.layout.stacks],
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
        for (site, population, metric), results in self.results.items():
            answer = summarize(results, metric, self.dims[site], self.settings)
            source = self.sources.get(site) if metric.needs == "pair" else None
            variant = f"from={source.name}" if source else None
            yield self._record(site, population, metric, answer, self.excluded[site, population], variant)
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

    def _record(
        self, site: Site, population: str, metric: Metric, answer: Estimate, excluded: int, variant: str | None = None
    ) -> Record:
        spec = self.spec
        return Record(
            key=spec.key,
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
