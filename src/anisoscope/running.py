"""One run of the walk: pools of windows through the model into the gauge, and out comes a Unit."""

import contextlib
import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anisoscope
from anisoscope.attention import VIEWS as OF_ATTENTION
from anisoscope.attention import WINDOWS as ATTENTION_WINDOWS
from anisoscope.attention import attention_records
from anisoscope.capture import capture, token_losses, windows_per_pass
from anisoscope.cloud import Cloud, Tokens
from anisoscope.corpora import Corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.estimates import Evaluated, deal, evaluate, summarize
from anisoscope.gauge import Clock, Gauge, seed_for
from anisoscope.layout import select_sites
from anisoscope.looks import VIEWS as OF_PROBE
from anisoscope.looks import looks_at
from anisoscope.metrics import Metric, find_metrics
from anisoscope.models import Model
from anisoscope.norms import Norm, read_norms
from anisoscope.passes import PassSize, out_of_memory
from anisoscope.past import Past
from anisoscope.probed import Probed, ProbeRow
from anisoscope.probes import Probe, draw_probe
from anisoscope.progress import Advance, show_progress
from anisoscope.records import FINAL_NORM_SITES, Checkpoint, Estimate, Record, Site, Spec, Unit
from anisoscope.rooms import Batch, Rooms
from anisoscope.scratch import return_free_memory
from anisoscope.text import POOLED_BATCHES, Pool, Windows, plan_pools
from anisoscope.weights import POPULATION as ROWS
from anisoscope.weights import WEIGHT_SITES, WeightRecord, weight_records

# Tokens in one forward pass where the batch size is left to us.
FORWARD_TOKENS = 4096


def settings_of(spec: Spec) -> dict[str, Any]:
    """What metrics read of a Spec."""
    return {name: getattr(spec, name) for name in ("discard_fraction", "gride_scales", "neighbors", "isoscore_zeta")}


def weight_sites(spec: Spec) -> list[str]:
    """The matrices of embeddings that a Spec asks for."""
    asked = [pattern for pattern in spec.sites if pattern.endswith(".weight")]
    names = [name for name in WEIGHT_SITES if any(fnmatchcase(name, pattern) for pattern in asked)]
    if len(names) < len(asked) and "*" not in "".join(asked):
        raise SpecError(f"sites of weights are {' and '.join(WEIGHT_SITES)}; came {', '.join(asked)}")
    return names


class Run:
    """What is accumulated while the pools go by, and becomes a Unit."""

    def __init__(
        self,
        spec: Spec,
        model: Model,
        corpus: Corpus,
        windows: Windows,
        checkpoint: Checkpoint,
        batch_size: int | None,
        forgiving: bool,
        probe: Probe | None = None,
        past: Past | None = None,
    ) -> None:
        self.spec, self.model, self.corpus, self.windows = spec, model, corpus, windows
        self.probe, self.past, self.forgiving = probe, past, forgiving
        self.checkpoint = checkpoint
        self.key = spec.key
        self.settings = settings_of(spec)
        metrics = find_metrics([name for name, _ in spec.metrics if isinstance(name, str)])
        self.failed: dict[str, str] = {}
        if forgiving:
            metrics = [replace(metric, function=self._forgive(metric)) for metric in metrics]
        self.loss = next((metric for metric in metrics if metric.needs == "losses"), None)
        apart = ("losses", *OF_ATTENTION, *OF_PROBE)
        self.metrics = [metric for metric in metrics if metric.needs not in apart]
        self.of_probe = [metric.name for metric in metrics if metric.needs in OF_PROBE]
        self.of_attention = [metric.name for metric in metrics if metric.needs in OF_ATTENTION]
        self.pass_size = PassSize(batch_size)
        self.notes = [*corpus.notes, *windows.notes, *model.notes]
        self.norms: dict[str | None, Norm | str] = {}
        self.sites = self._select_sites()
        self.losses: list[Evaluated] = []
        self.on_gpu = any(parameter.is_cuda for parameter in model.module.parameters())
        self.clock = Clock(on_gpu=self.on_gpu)
        self.gauge = Gauge(spec, self.metrics, self.sites, self.settings, self.clock, self.norms)
        count, length = windows.token_ids.shape
        self.pools = plan_pools(count, length, spec.batch_points)
        if self.loss is None and not (self.sites and self.metrics):
            # Weights or attention alone were asked for: no states are wanted.
            self.pools = []
        largest = max((pool.stop - pool.start for pool in self.pools), default=0) * length
        self.rooms = Rooms(len(self.sites), largest)

    def _forgive(self, metric: Metric) -> Callable[..., Tensor]:
        """The metric's function, with NaN where it raises; the error is kept for the note."""

        def attempt(*args: Any, **kwargs: Any) -> Tensor:
            try:
                return metric.function(*args, **kwargs)
            except Exception as error:
                self.failed[metric.name] = f"it failed: {type(error).__name__}: {error}"
                return torch.tensor(math.nan)

        return attempt

    def _select_sites(self) -> tuple[Site, ...]:
        """What the Spec asks for; what is inside a norm shows only where the norm is understood."""
        of_norms = any(metric.needs == "norm" for metric in self.metrics)
        states = [pattern for pattern in self.spec.sites if not pattern.endswith(".weight")]
        asked = select_sites(self.model.layout, states, stages=of_norms)
        inside = [site for site in asked if site.name in FINAL_NORM_SITES[:2]]
        if inside or of_norms:
            self.norms = read_norms(self.model.module, self.model.layout)
        closed = [site for site in inside if isinstance(self.norms[site.stack], str)]
        self.notes += [f"{site.name} was not measured: {self.norms[site.stack]}" for site in closed]
        return tuple(site for site in asked if site not in closed)

    def run(self, progress: bool) -> Unit:
        """Everything, pool by pool."""
        count, length = self.windows.token_ids.shape
        batches = sum(pool.batches for pool in self.pools)
        if self.pools and count * length < self.spec.batch_points:
            self.notes.append(f"{count * length} points in all, fewer than batch_points = {self.spec.batch_points}")
        elif self.pools and batches < POOLED_BATCHES:
            self.notes.append(f"{batches} batches in all: pooled and dealt, but from fewer than {POOLED_BATCHES}")
        start, work = time.time(), count + batches * len(self.sites)
        with show_progress(self.spec.model, total=work, shown=progress and bool(self.pools)) as advance:
            for pool in self.pools:
                self._measure_pool(pool, advance)
                return_free_memory(torch.device("cuda" if self.on_gpu else "cpu"))
        return self._unit(start)

    def _measure_pool(self, pool: Pool, advance: Advance) -> None:
        points = (pool.stop - pool.start) * self.windows.token_ids.shape[1]
        hands = deal(points, pool.batches, seed_for(self.spec.seed, pool.first))
        with self.clock("forward"):
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
        self.gauge.measure(self.rooms, batches, advance)
        if self.loss is not None and losses is not None:
            known = losses.cpu().numpy()
            for batch, hand in zip(batches, hands, strict=True):
                mine = torch.from_numpy(known[hand.numpy()])
                here = replace(batch.tokens[self.model.layout.stacks[-1].name], losses=mine)
                cloud = Cloud(points=torch.zeros(len(hand), 1), tokens=here)
                self.losses.append(evaluate(cloud, self.loss, self.settings))

    def _run_model(self, pool: Pool, order: Tensor, advance: Advance) -> Tensor | None:
        """States of every site into the rooms, in the order given; losses (tokens) of a pool, in window order."""
        losses: list[Tensor] = []
        length = self.windows.token_ids.shape[1]
        place = torch.from_numpy(np.argsort(order.numpy()))
        places: dict[torch.device, Tensor] = {}

        def forward(part: slice) -> None:
            ids = torch.from_numpy(self.windows.token_ids[part])
            rows = slice((part.start - pool.start) * length, (part.stop - pool.start) * length)

            def keep(site: Site, state: Tensor) -> None:
                if state.device not in places:
                    places[state.device] = place.to(state.device)
                self.rooms.keep(site, state, places[state.device][rows])

            captured = capture(self.model, ids, self.sites, keep, self.norms)
            if self.loss is not None:
                seeds = [seed_for(self.spec.seed, window, 2) for window in range(part.start, part.stop)]
                loss = token_losses(self.model, ids, captured, seeds)
                if loss is not None:
                    losses.append(loss.flatten())
            advance(part.stop - part.start)

        default = windows_per_pass(self.model, self.spec.seq_len, FORWARD_TOKENS)
        self.pass_size.run(forward, start=pool.start, stop=pool.stop, default=default, seq_len=length)
        return torch.cat(losses) if losses else None

    def _tokens(self, pool: Pool, stack: str | None, hand: np.ndarray) -> Tokens:
        part = slice(pool.start, pool.stop)
        windows = self.windows
        held = (windows.token_ids, windows.documents, windows.special, windows.sentences)
        ids, documents, special, sentences = (rows[part] for rows in held)
        if self.model.kind == "encoder-decoder" and stack == "decoder":
            # The decoder reads the window shifted right: position 0 holds the start token, p the token before p.
            ids, documents, special, sentences = (
                np.concatenate([rows[:, :1], rows[:, :-1]], 1) for rows in (ids, documents, special, sentences)
            )
            special[:, 0] = True
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        # By numpy: on machines with many cores, torch takes milliseconds to wake its threads for these.
        ids, positions, documents, special, sentences = (
            torch.from_numpy(rows.reshape(-1)[hand]) for rows in (ids, positions, documents, special, sentences)
        )
        return Tokens(ids=ids, positions=positions, documents=documents, special=special, sentences=sentences)

    def _unit(self, start: float) -> Unit:
        attachments: dict[str, np.ndarray] = {}
        for site, owners in self.gauge.collect_owners(self.rooms).items():
            prefix = f"owners/{site.stack or ''}/{site.name}"
            attachments |= owners.attach(prefix, self._decode, self.corpus.titles)
        # States of the last pool, which nothing reads any more.
        self.rooms = Rooms(0, 0)
        weights, attention = list(self._weigh()), list(self._attend())
        probed, kept = self._look_at_probe()
        attachments |= kept
        surveys = {site.name: survey for site, _, _, _, survey in weights if survey is not None}
        frequencies = self._count_tokens() if surveys else None
        seconds = time.time() - start
        for name, survey in surveys.items():
            attachments |= survey.attachments(f"weights/{name}", frequencies)
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
            "text": self._text(),
            "layout": [asdict(part) for part in self.model.layout.stacks],
            "checks": list(self.model.checks),
            "notes": list(dict.fromkeys([*self.notes, *self.pass_size.notes])),
        }
        if self.failed:
            provenance["failed"] = self.failed
        records = [*self._records()]
        records += [
            self._record(site, ROWS, metric, answer, 0, variant) for site, metric, variant, answer, _ in weights
        ]
        records += [*attention, *probed]
        return Unit(spec=self.spec, provenance=provenance, records=tuple(records), attachments=attachments)

    def _text(self) -> dict[str, Any]:
        """The text behind the numbers: of states and attention, and of the halves of the probe, which are others."""
        text: dict[str, Any] = {}
        if self.pools or self.of_attention:
            text["states"] = self._count_text(self.windows)
        if self.of_probe:
            probe = self._draw_probe()
            text["probe"] = {"fit": self._count_text(probe.fit), "test": self._count_text(probe.test)}
        return text

    def _count_text(self, windows: Windows) -> dict[str, Any]:
        return {
            "corpus": self.corpus.name,
            "corpus_hash": self.corpus.hash,
            "windows": len(windows.token_ids),
            "tokens": windows.token_ids.size,
            "documents": len(np.unique(windows.documents)),
        }

    def _attend(self) -> Iterator[Record]:
        """The metrics of attention that the Spec asks for, on the first windows."""
        ids = torch.from_numpy(self.windows.token_ids)
        if self.of_attention and len(ids) > ATTENTION_WINDOWS:
            self.notes.append(f"attention was looked at in the first {ATTENTION_WINDOWS} windows")
        for site, metric, answer in attention_records(self.model, ids, self.sites, self.of_attention):
            yield self._record(site, "all", metric, answer, ids.numel() - answer.points)

    def _look_at_probe(self) -> tuple[list[Record], dict[str, np.ndarray]]:
        """What is measured on the halves of the probe."""
        if not self.of_probe:
            return [], {}
        probed = Probed(
            model=self.model, probe=self._draw_probe(), sites=self.sites, spec=self.spec, pass_size=self.pass_size
        )
        self.notes += probed.probe.windows.notes
        looks = looks_at(probed, self.of_probe, past=self.past, decode=self._decode)
        rows: list[ProbeRow] = []
        attachments: dict[str, np.ndarray] = {}
        with self.clock("probe"):
            for family, look in looks.items():
                with self._forgiving(family), self._out_of_memory(family, probed):
                    found, kept = look()
                    rows += found
                    attachments |= kept
        records = [
            self._record(row.site, row.population, row.metric, row.answer, row.excluded, **row.columns) for row in rows
        ]
        return records, attachments

    @contextlib.contextmanager
    def _out_of_memory(self, family: str, probed: Probed) -> Iterator[None]:
        """Say what to ask less of where memory runs out in an analysis."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise ModelError(
                f"memory ran out in {family}, measured on {self.spec.tokens:,} tokens of text and one of "
                f"{len(probed.sites)} sites at a time: {error}; try fewer --tokens, or --device cpu if a GPU was full"
            ) from error

    def _draw_probe(self) -> Probe:
        """The probe, drawn once."""
        self.probe = self.probe or draw_probe(self.spec, self.model.tokenizer, self.corpus)
        return self.probe

    @contextlib.contextmanager
    def _forgiving(self, family: str) -> Iterator[None]:
        """Where a failure is to cost no more than the numbers themselves."""
        try:
            yield
        except Exception as error:
            if not self.forgiving:
                raise
            self.failed[family] = f"it failed: {type(error).__name__}: {error}"

    def _weigh(self) -> Iterator[WeightRecord]:
        """The matrices of embeddings that the Spec asks for."""
        yield from weight_records(
            self.model.module, weight_sites(self.spec), [metric.name for metric in self.metrics], seed=self.spec.seed
        )

    def _count_tokens(self) -> np.ndarray | None:
        """Log frequencies by token id, for the colours of a figure: as everywhere, without the probe's test half."""
        with self._forgiving("log_frequency"):
            return self._draw_probe().log_frequency
        return None

    def _cost(self, seconds: float) -> dict[str, float]:
        """Seconds by what they were spent on."""
        known = ("forward", "neighbours", "spectrum", *(["probe"] if self.of_probe else []))
        parts = {part: round(self.clock.seconds[part], 3) for part in known}
        return parts | {"rest": round(max(seconds - sum(parts.values()), 0.0), 3)}

    def _decode(self, token: int) -> str:
        return self.model.tokenizer.convert_ids_to_tokens(token)

    def _records(self) -> Iterator[Record]:
        for site, metric in itertools.product(self.sites, self.gauge.metrics):
            for population in self.gauge.populations(metric):
                yield self._answer(site, population, metric)
        for part, metric in itertools.product(self.model.layout.stacks, self.gauge.of_norms):
            site, norm = Site(name="final_norm", stack=part.name), self.norms[part.name]
            for population in self.gauge.populations(metric):
                if isinstance(norm, Norm):
                    yield self._answer(site, population, metric)
                else:
                    yield self._missing(site, population, metric, part.width or 0, norm)
        if self.loss is not None:
            output = Site(name="output")
            if not self.losses:
                yield self._missing(output, "all", self.loss, 1, "the model has no language-model head")
                return
            answer = summarize(self.losses, self.loss, 1, self.settings)
            yield self._record(output, "all", self.loss, answer, self.windows.token_ids.size - answer.points)

    def _missing(self, site: Site, population: str, metric: Metric, dim: int, note: str) -> Record:
        """The record of a number that this model has not."""
        answer = Estimate.from_values((), null=math.nan, points=0, dropped=0, dim=dim, note=note)
        return self._record(site, population, metric, answer, self.windows.token_ids.size)

    def _answer(self, site: Site, population: str, metric: Metric) -> Record:
        results = [result for _, result in sorted(self.gauge.results[site, population, metric].items())]
        answer = summarize(results, metric, self.gauge.dims[site], self.settings)
        source = self.gauge.sources.get(site) if metric.needs == "pair" else None
        variant = f"from={source.name}" if source else None
        return self._record(
            site, population, metric, answer, sum(self.gauge.excluded[site, population].values()), variant
        )

    def _record(
        self,
        site: Site,
        population: str,
        metric: Metric,
        answer: Estimate,
        excluded: int,
        variant: str | None = None,
        **columns: Any,
    ) -> Record:
        failed = self.failed.get(metric.name) if math.isnan(answer.value) else None
        return Record.from_estimate(
            answer,
            key=self.key,
            spec=self.spec,
            checkpoint=self.checkpoint,
            kind=self.model.kind,
            site=site,
            population=population,
            metric=metric.name,
            metric_version=metric.version,
            excluded=excluded,
            variant=variant,
            note=failed or answer.note,
            seconds=round(self.gauge.seconds[site], 6),
            **columns,
        )


def _version_of(package: str) -> str:
    return str(getattr(__import__(package), "__version__", "unknown"))


def _device_name(module: torch.nn.Module) -> str:
    devices = {parameter.device for parameter in module.parameters()}
    names = {torch.cuda.get_device_name(item) if item.type == "cuda" else item.type for item in devices}
    return ", ".join(sorted(names)) or "cpu"
