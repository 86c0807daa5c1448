"""Write a store of many results, to measure how reading, claims and reports grow with it. No model is run.

    python scripts/large_store.py FOLDER [--results 20000]

A result is a model at one step of its training on one text: 59 rows, of states at six blocks and the ends, with eight
batches a number, and of gradients at the blocks. Every third family of models has three seeds. Numbers follow smooth
curves over depth and training, plus noise.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.records import Checkpoint, Estimate, Record, Site, Spec, Unit
from anisoscope.store import Store

CHECKPOINTS, CORPORA = 100, ("enwik8", "pydoc", "books", "code", "papers")
BLOCKS, BATCHES, POINTS, WIDTH = 6, 8, 4096, 512
SITES = (
    Site(name="embed"),
    *(Site(name=f"block.{block}", depth=(block + 1) / BLOCKS) for block in range(BLOCKS)),
    Site(name="final_norm"),
)
METRICS = {
    "leading_variance": ("all", "typical"),
    "mean_cosine": ("all",),
    "twonn": ("all", "types"),
}
GRADIENT_METRICS = ("tangent_energy", "tangent_excess", "normal_ratio")
RESOLVED = (*((name, 1) for name in (*METRICS, "loss")), *((name, 2) for name in GRADIENT_METRICS))
PROVENANCE: dict[str, Any] = {
    "time": "2026-01-01T00:00:00+00:00",
    "seconds": 5.9,
    "cost": {"forward": 0.3, "neighbours": 2.9, "spectrum": 2.2, "rest": 0.5},
    "versions": {"anisoscope": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0"},
    "device": "made up",
    "windows": 64,
    "layout": [{"name": None, "blocks": [f"layers.{block}" for block in range(BLOCKS)], "width": WIDTH}],
    "checks": [
        f"{BLOCKS} block calls in the expected order.",
        "Changing later tokens leaves earlier states unchanged.",
    ],
    "notes": ["These numbers are made up."],
}


def training_steps(count: int) -> list[int]:
    """Distinct steps as published trainings have them: 0, 1, 2, 4 ... 512, then every thousand.

    >>> training_steps(13)
    [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000]
    """
    early = [0, *(2**power for power in range(10))]
    return [*early, *range(1000, 1000 * (count - len(early) + 1), 1000)][:count]


def model_names(count: int) -> list[str]:
    """Single models, and every third family with three seeds.

    >>> model_names(5)
    ['model-00', 'model-01', 'model-02-seed0', 'model-02-seed1', 'model-02-seed2']
    """
    names: list[str] = []
    for family in range(count):
        single = f"model-{family:02d}"
        names += [f"{single}-seed{seed}" for seed in range(3)] if family % 3 == 2 else [single]
    return names[:count]


def make_units(results: int, *, checkpoints: int = CHECKPOINTS, corpora: tuple[str, ...] = CORPORA) -> Iterator[Unit]:
    """The results, training by training: `results` must be a multiple of checkpoints times corpora."""
    models, rest = divmod(results, checkpoints * len(corpora))
    if rest or not models:
        raise SystemExit(f"results are a multiple of {checkpoints * len(corpora)}; came {results}")
    steps = training_steps(checkpoints)
    for number, model in enumerate(model_names(models)):
        for text, corpus in enumerate(corpora):
            yield from _training(model, number, corpus, text, steps)


def _training(model: str, number: int, corpus: str, text: int, steps: list[int]) -> Iterator[Unit]:
    kind = "encoder" if number % 4 == 3 else "decoder"
    rows = [
        (metric, population, site)
        for site in range(len(SITES))
        for metric, populations in METRICS.items()
        for population in populations
    ]
    chance = np.random.default_rng([number, text])
    noise = chance.normal(size=(len(steps), len(rows) + 1, BATCHES))
    gains = chance.normal(size=(len(steps), BLOCKS))
    for place, step in enumerate(steps):
        progress = np.log1p(step) / np.log1p(max(steps[-1], 1))
        spec = Spec(
            model=model,
            revision=f"step{step}",
            weights=f"{number:04x}{step:060x}",
            step=step,
            corpus=corpus,
            corpus_hash=f"{text:064x}",
            tokens=BATCHES * POINTS,
            metrics=RESOLVED,
            gradients=("virtual",),
        )
        checkpoint = Checkpoint(model=model, revision=spec.revision, step=step, tokens=step * 2**21)
        key, records = spec.key, []
        for row, (metric, population, site) in enumerate(rows):
            middle = _middle(metric, population, progress, site, kind)
            values = middle * (1 + 0.02 * noise[place, row])
            records.append(_record(spec, checkpoint, kind, SITES[site], key, metric, population, values, 0.01))
        losses = 10 - 6 * progress + 0.1 * noise[place, -1]
        records.append(_record(spec, checkpoint, kind, Site(name="output"), key, "loss", "all", losses, math.nan))
        for block, gain in enumerate(gains[place].tolist()):
            records += _gradient_records(spec, checkpoint, kind, SITES[1 + block], key, 0.05 * progress + 0.02 * gain)
        yield Unit(spec=spec, provenance=PROVENANCE, records=tuple(records))


def _middle(metric: str, population: str, progress: float, site: int, kind: str) -> float:
    """A bell over depth that grows where it is anisotropy; a dimension that rises and falls."""
    bell = np.exp(-(((site - 3.5) / 2.5) ** 2)) if kind == "decoder" else 0.6
    if metric == "twonn":
        return float((8 + 14 * progress * (1.4 - progress) + 2 * bell) * (0.8 if population == "types" else 1.0))
    strength = {"leading_variance": 0.7, "mean_cosine": 0.5}[metric]
    return float(0.05 + strength * progress * bell * (0.5 if population == "typical" else 1.0))


def _record(
    spec: Spec,
    checkpoint: Checkpoint,
    kind: str,
    site: Site,
    key: str,
    metric: str,
    population: str,
    values: np.ndarray,
    null: float,
    **others: Any,
) -> Record:
    left_out = 8 if population == "typical" else 0
    points = len(values) * (POINTS // 2 if population == "types" else POINTS) - left_out
    answer = Estimate.from_values(tuple(values.tolist()), null=null, points=points, dropped=0, dim=WIDTH)
    return Record.from_estimate(
        answer,
        spec=spec,
        checkpoint=checkpoint,
        kind=kind,
        site=site,
        population=population,
        metric=metric,
        metric_version=dict(RESOLVED)[metric],
        key=key,
        excluded=left_out,
        seconds=0.1,
        **others,
    )


def _gradient_records(
    spec: Spec, checkpoint: Checkpoint, kind: str, site: Site, key: str, excess: float
) -> Iterator[Record]:
    """Energy in a tangent proxy, how far it is above its control, and the paper's ratio."""
    shared = {"gradient": "virtual", "proxy": "pca", "rank": 16, "variant": "mean=in"}
    for metric, value in zip(GRADIENT_METRICS, (0.1 + excess, excess, 1 + 20 * excess), strict=True):
        ends = {"low": value - 0.02, "high": value + 0.02}
        control = {"control": "haar", "control_value": 0.1}
        if metric != "tangent_energy":
            control["p"] = min(1.0, max(0.005, 0.5 - 10 * excess))
        values = np.array([value])
        yield _record(
            spec, checkpoint, kind, site, key, metric, "typical", values, math.nan, **shared, **ends, **control
        )


def make_store(folder: Path, results: int, **sizes: Any) -> Store:
    """A store of so many results in a folder."""
    store = Store(folder)
    for number, unit in enumerate(make_units(results, **sizes), 1):
        store.put(unit)
        if number % 1000 == 0:
            print(f"{number:,} results", file=sys.stderr, flush=True)
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=int, default=20_000)
    options = parser.parse_args()
    make_store(options.folder, options.results)


if __name__ == "__main__":
    main()
