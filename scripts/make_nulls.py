"""Simulate the shipped table of isotropic nulls: src/anisoscope/data/nulls.csv.

Each cell is the mean over trials of the metric on n standard Gaussian points in d dimensions. Metrics with an isotropic
null are invariant to translation, rotation and scale, so one Gaussian stands for all of them. Cells are independent and
run in processes of their own: small ones on the CPU, where a GPU would only wait for launches, large ones on the GPU if
there is one. A few minutes with a large GPU and 16 cores, days without. Cells are written as they come, so that a
run that was cut short goes on with --resume.

    python scripts/make_nulls.py [--resume] [--output FILE] [--largest-n 1024 --largest-d 512]
"""

import argparse
import csv
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from anisoscope.cloud import Cloud
from anisoscope.estimates import evaluate
from anisoscope.metrics import all_metrics
from anisoscope.nulls import variant_of

N_GRID = tuple(2**power for power in range(3, 15))
D_GRID = (1, *(size for power in range(1, 14) for size in (2**power, 3 * 2 ** (power - 1))), 2**14)
SETTINGS = {
    "twonn": ({"discard_fraction": 0.1}, {"discard_fraction": 0.8}),
    "twonn_mle": ({"discard_fraction": 0.1}, {"discard_fraction": 0.8}),
    "isoscore_star": ({"isoscore_zeta": 0.25},),
    "levina_bickel": ({"neighbors": 20},),
}
# The full spectrum of a 16384 x 16384 Gram in float64 takes minutes: larger Grams use the law they obey (below).
LARGEST_SPECTRUM = 1024
# Elements of a cloud. Below, a GPU spends a trial on launches, and a CPU process is as fast; above, it is not.
LARGEST_ON_CPU = 2**18
COLUMNS = ("metric", "version", "settings", "n", "d", "null", "spread", "trials")


def trials_for(n: int, d: int) -> int:
    """Many where clouds are small and noisy, few where they are large and the value hardly moves."""
    return min(256 if n * d < LARGEST_ON_CPU else 64, max(8, 2**16 // n))


def cost(n: int, d: int) -> int:
    """Products of a cell; what is not a product (launches, Lanczos steps) weighs about 2³⁸ of them on a GPU."""
    return trials_for(n, d) * (n * n * d + 2**38)


def simulate(n: int, d: int, device: str) -> list[tuple[str | int, ...]]:
    """The rows of one cell; a metric that has no value there has no row."""
    generator = torch.Generator(device).manual_seed(n * 100_003 + d)
    samples: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(trials_for(n, d)):
        cloud = Cloud(points=torch.randn(n, d, generator=generator, device=device), neighbor_count=64)
        for metric in all_metrics().values():
            for settings in SETTINGS.get(metric.name, ({},)) if metric.null == "isotropic" else ():
                if metric.needs == "spectrum" and min(n, d) > LARGEST_SPECTRUM:
                    value = effective_rank_law(n, d)
                else:
                    value = float(evaluate(cloud, metric, settings).value)
                key = metric.name, metric.version, variant_of(metric, settings)
                samples.setdefault(key, []).append(value)
    if device != "cpu":
        torch.cuda.empty_cache()
    rows = []
    for key, values in samples.items():
        sample = torch.tensor(values, dtype=torch.float64)
        if not sample.isnan().any():
            rows.append((*key, n, d, f"{sample.mean().item():.6g}", f"{sample.std().item():.3g}", len(values)))
    return rows


def effective_rank_law(n: int, d: int) -> float:
    """m exp(-m / 2M): the entropy of Marchenko and Pastur's law, right to about 1/M for Gaussian Grams."""
    small, large = min(n - 1, d), max(n - 1, d)
    return small * math.exp(-small / (2 * large))


def workers(count: int) -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("src/anisoscope/data/nulls.csv"))
    parser.add_argument("--resume", action="store_true", help="keep the cells that the output holds already")
    parser.add_argument("--largest-n", type=int, default=max(N_GRID))
    parser.add_argument("--largest-d", type=int, default=max(D_GRID))
    parser.add_argument("--cpu-workers", type=int, default=os.cpu_count())
    parser.add_argument("--gpu-workers", type=int, default=6 if torch.cuda.is_available() else 0)
    options = parser.parse_args()
    rows = read_rows(options.output) if options.resume else []
    held = {row[3:5] for row in rows}
    wanted = [(n, d) for n in N_GRID for d in D_GRID if n <= options.largest_n and d <= options.largest_d]
    cells = sorted((cell for cell in wanted if cell not in held), key=lambda cell: cost(*cell), reverse=True)
    start = time.monotonic()
    with workers(options.cpu_workers) as on_cpu, workers(max(1, options.gpu_workers)) as on_gpu:
        running = {}
        for n, d in cells:
            large = options.gpu_workers > 0 and n * d >= LARGEST_ON_CPU
            running[on_gpu.submit(simulate, n, d, "cuda") if large else on_cpu.submit(simulate, n, d, "cpu")] = n, d
        for done, future in enumerate(as_completed(running), 1):
            rows += future.result()
            write_rows(options.output, rows)
            passed = f"{time.monotonic() - start:.0f} s"
            print("{}/{} cells, {}: n = {}, d = {}".format(done, len(cells), passed, *running[future]), file=sys.stderr)


def read_rows(path: Path) -> list[tuple[str | int, ...]]:
    """What write_rows wrote; nothing where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        whole = {"version", "n", "d", "trials"}
        return [tuple(int(row[c]) if c in whole else row[c] for c in COLUMNS) for row in csv.DictReader(file)]


def write_rows(path: Path, rows: list[tuple[str | int, ...]]) -> None:
    """In order, under a temporary name first: a run cut short leaves whole cells."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(rows))
    partial.replace(path)


if __name__ == "__main__":
    main()
