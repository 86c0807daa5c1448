"""Where live numbers are shown: Weights & Biases, TensorBoard, trackio, a JSONL file. No torch.

Keys are `geom/<metric>/<site>`, `geom/<metric>/mean` and `max` over the blocks, and `geom/overhead_ms`. Block numbers
are zero-padded here, and only here, so that curves sort. The first population of a metric has its plain name, others
are named behind it (`geom/leading_variance.typical/mean`), and so are a gradient, its proxy and a variant. Bins of
frequency are left to the store. Forty blocks times six metrics are 240 curves: without
`all_sites`, blocks are shown by their mean, their maximum and a heat map.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anisoscope.errors import MissingPackageError, SpecError
from anisoscope.records import Record, site_order

# Dark blue over green to yellow: readable without colour vision.
_COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=float)
_UNKNOWN = 128
_PIXELS = 8
# Most columns of a heat map: steps beyond are thinned out.
_COLUMNS = 256


class Sink(Protocol):
    """What a Scope writes to; a class of your own with these methods will do."""

    def write(self, step: int, scalars: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Show the numbers of a step, and heat maps (height, width, 3) where there are some."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class JsonlSink:
    """One line of JSON per measured step; NaN becomes null."""

    def __init__(self, path: str | os.PathLike[str], *, all_sites: bool = True) -> None:
        self.path, self.all_sites = Path(path).absolute(), all_sites

    def write(self, step: int, scalars: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Append a line; it is on disk when this returns. A file shows no pictures."""
        if not scalars:
            return
        row = {"step": step} | {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Every line is written already."""


class TensorBoardSink:
    """Scalars and images in an event file of its own."""

    def __init__(self, folder: str | os.PathLike[str], *, all_sites: bool = False) -> None:
        _need("tensorboard", "TensorBoardSink")
        self.folder, self.all_sites, self._writer = Path(folder).absolute(), all_sites, None

    def write(self, step: int, scalars: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Write, and flush, so that a killed training loses nothing."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)
        for key, picture in pictures.items():
            self._writer.add_image(key, picture, step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """The run given, or the one that is active (`wandb.init`) when the first numbers come.

    It writes to W&B itself: what goes through the log of a Trainer is renamed to `train/geom/...` there.
    """

    def __init__(self, run: Any = None, *, all_sites: bool = False) -> None:
        _need("wandb", "WandbSink")
        self.run, self.all_sites, self._defined = run, all_sites, False

    def write(self, step: int, scalars: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Log under the step of the training, whatever W&B's own count is."""
        import wandb

        self.run = self.run or wandb.run
        if self.run is None:
            raise SpecError("no W&B run is active: call wandb.init() first, or hand one in with WandbSink(run)")
        if not self._defined:
            self.run.define_metric("train/global_step")
            self.run.define_metric("geom/*", step_metric="train/global_step")
            self._defined = True
        images = {key: wandb.Image(picture) for key, picture in pictures.items()}
        self.run.log({**scalars, **images, "train/global_step": step})

    def close(self) -> None:
        """The run belongs to whoever began it."""


class TrackioSink:
    """The active trackio run, or one of a project."""

    def __init__(self, project: str | None = None, *, name: str | None = None, all_sites: bool = False) -> None:
        _need("trackio", "TrackioSink")
        self.project, self.name, self.all_sites, self._run = project, name, all_sites, None

    def write(self, step: int, scalars: Mapping[str, float], pictures: Mapping[str, np.ndarray]) -> None:
        """Log under the step of the training."""
        import trackio  # pyright: ignore[reportMissingImports]

        if self.project is not None and self._run is None:
            self._run = trackio.init(project=self.project, name=self.name)
        images = {key: trackio.Image(picture) for key, picture in pictures.items()}
        numbers = {key: value for key, value in scalars.items() if math.isfinite(value)}
        log = trackio.log if self._run is None else self._run.log
        log({**numbers, **images, "train/global_step": step}, step=step)

    def close(self) -> None:
        """End the run where it was begun here."""
        if self._run is not None:
            self._run.finish()


def find_sinks(sinks: Any, folder: Path) -> list[Any]:
    """Sinks from objects or names: `jsonl` and `tensorboard` write below the folder of the store."""
    made = {
        "jsonl": lambda: JsonlSink(folder / "geometry.jsonl"),
        "tensorboard": lambda: TensorBoardSink(folder / "tensorboard"),
        "wandb": WandbSink,
        "trackio": TrackioSink,
    }
    found = []
    for sink in [sinks] if isinstance(sinks, str) or hasattr(sinks, "write") else sinks:
        if isinstance(sink, str) and sink not in made:
            raise SpecError(f"unknown sink {sink!r}: one of {', '.join(made)}, or an object with write() and close()")
        found.append(made[sink]() if isinstance(sink, str) else sink)
    return found


class Board:
    """Turns the records of each measured step into what sinks show."""

    def __init__(self, sinks: Sequence[Any]) -> None:
        self.sinks = sinks
        self._history: dict[str, dict[int, dict[str, float]]] = {}
        self._steps = 0

    def write(self, step: int, records: Iterable[Record], overhead: float) -> list[Exception]:
        """Show a step everywhere; what went wrong, one error per sink that failed."""
        curves = group(records)
        for metric, sites in curves.items():
            if sum(map(_is_block, sites)) > 1:
                columns = self._history.setdefault(metric, {})
                columns[step] = sites
                if len(columns) > _COLUMNS:
                    for old in sorted(columns)[1:-1:2]:
                        del columns[old]
        self._steps += 1
        # Pictures cost more than numbers: they come after 1, 2, 4, 8 ... steps, and at the end.
        drawn = self._pictures() if self._steps & (self._steps - 1) == 0 else {}
        overhead_ms = {"geom/overhead_ms": overhead * 1000}
        return self._send(
            lambda sink: sink.write(step, scalars_of(curves, all_sites=_shows_all(sink)) | overhead_ms, drawn)
        )

    def close(self) -> list[Exception]:
        """The last heat maps, and the end."""
        steps = [step for columns in self._history.values() for step in columns]
        errors = self._send(lambda sink: sink.write(max(steps), {}, self._pictures())) if steps else []
        return errors + self._send(lambda sink: sink.close())

    def _pictures(self) -> dict[str, np.ndarray]:
        return {f"geom/{metric}/heat_map": paint(columns) for metric, columns in self._history.items()}

    def _send(self, action: Any) -> list[Exception]:
        errors = []
        for sink in self.sinks:
            try:
                action(sink)
            except Exception as error:
                errors.append(error)
        return errors


def _shows_all(sink: Any) -> bool:
    return bool(getattr(sink, "all_sites", False))


def _is_block(site: str) -> bool:
    return "block." in site


def group(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Metric -> site -> value, both as sinks call them, sites in the order of the model."""
    rows = sorted(records, key=lambda record: (record.stack or "", site_order(record.site)))
    blocks = [int(row.site.split(".")[1]) for row in rows if row.site.startswith("block.")]
    digits = max(2, len(str(max(blocks, default=0))))
    first: dict[str, str] = {}
    curves: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.bin is not None:
            continue
        named = ".".join(part for part in (row.metric, row.gradient, row.proxy, row.variant) if part)
        plain = first.setdefault(named, row.population) == row.population
        metric = named if plain else f"{named}.{row.population}"
        parts = [part.zfill(digits) if part.isdigit() else part for part in row.site.split(".")]
        curves.setdefault(metric, {})[".".join([row.stack, *parts] if row.stack else parts)] = row.value
    return curves


def scalars_of(curves: Mapping[str, Mapping[str, float]], *, all_sites: bool) -> dict[str, float]:
    """The curves by their keys: every site where all are asked for, else means and maxima instead of blocks."""
    scalars: dict[str, float] = {}
    for metric, sites in curves.items():
        values = [value for site, value in sites.items() if _is_block(site) and math.isfinite(value)]
        if any(map(_is_block, sites)):
            scalars[f"geom/{metric}/mean"] = float(np.mean(values)) if values else math.nan
            scalars[f"geom/{metric}/max"] = max(values, default=math.nan)
        shown = {site: value for site, value in sites.items() if all_sites or not _is_block(site)}
        scalars |= {f"geom/{metric}/{site}": value for site, value in shown.items()}
    return scalars


def paint(columns: Mapping[int, Mapping[str, float]]) -> np.ndarray:
    """A heat map: measured steps from left to right, sites from the first at the top; grey where there is no number."""
    sites = list(dict.fromkeys(site for values in columns.values() for site in values))
    table = np.array([[columns[step].get(site, math.nan) for step in sorted(columns)] for site in sites])
    known = np.isfinite(table)
    low, high = (table[known].min(), table[known].max()) if known.any() else (0.0, 1.0)
    share = np.where(known, (table - low) / ((high - low) or 1.0), 0.0) * (len(_COLOURS) - 1)
    below = np.minimum(share.astype(int), len(_COLOURS) - 2)
    part = (share - below)[..., None]
    colours = _COLOURS[below] * (1 - part) + _COLOURS[below + 1] * part
    colours[~known] = _UNKNOWN
    return colours.round().astype(np.uint8).repeat(_PIXELS, 0).repeat(_PIXELS, 1)


def _need(package: str, purpose: str) -> None:
    if find_spec(package) is None:
        raise MissingPackageError(package, extra=package, purpose=purpose)
