"""Simulate the shipped table of isotropic nulls: src/anisoscope/data/nulls.csv.

Each cell is the mean over trials of the metric on n standard Gaussian points in d dimensions. Metrics with an isotropic
null are invariant to translation, rotation and scale, so one Gaussian stands for all of them.

    python scripts/make_nulls.py [--device cuda] [--output FILE]
"""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import torch

from anisoscope.cloud import Cloud
from anisoscope.estimates import evaluate
from anisoscope.metrics import Metric, all_metrics

N_GRID = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
D_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
# The full spectrum of a 16384 x 16384 Gram in float64 takes minutes: larger Grams use the law they obey (below).
LARGEST_SPECTRUM = 1024
SETTINGS = {
    "twonn": ({"discard_fraction": 0.1}, {"discard_fraction": 0.8}),
    "twonn_mle": ({"discard_fraction": 0.1}, {"discard_fraction": 0.8}),
    "isoscore_star": ({"isoscore_zeta": 0.25},),
    "levina_bickel": ({"neighbors": 20},),
}
POINTS_PER_CELL = 1 << 16


def trials_for(n: int, d: int) -> int:
    """Many where clouds are small and noisy, few where they are large and the value hardly moves."""
    return int(min(64, max(4, POINTS_PER_CELL // n)))


def simulate(n: int, d: int, metrics: list[Metric], device: str) -> dict[tuple[str, str], list[float]]:
    values: dict[tuple[str, str], list[float]] = {}
    generator = torch.Generator(device).manual_seed(n * 100_003 + d)
    for _ in range(trials_for(n, d)):
        cloud = Cloud(points=torch.randn(n, d, generator=generator, device=device), neighbor_count=64)
        for metric in metrics:
            for settings in SETTINGS.get(metric.name, ({},)):
                if metric.needs == "spectrum" and min(n, d) > LARGEST_SPECTRUM:
                    # Page's entropy: log m - m / 2M, exact for Gaussian Grams up to terms of order 1/M².
                    small, large = min(n - 1, d), max(n - 1, d)
                    value = small * math.exp(-small / (2 * large))
                else:
                    value = float(evaluate(cloud, metric, settings).value)
                variant = ";".join(f"{name}={settings[name]:g}" for name in metric.settings)
                values.setdefault((metric.name, variant), []).append(value)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("src/anisoscope/data/nulls.csv"))
    parser.add_argument("--largest-n", type=int, default=max(N_GRID))
    parser.add_argument("--largest-d", type=int, default=max(D_GRID))
    options = parser.parse_args()
    metrics = [metric for metric in all_metrics().values() if metric.null == "isotropic"]
    rows, start = [], time.time()
    for n in (n for n in N_GRID if n <= options.largest_n):
        for d in (d for d in D_GRID if d <= options.largest_d):
            for (name, variant), values in sorted(simulate(n, d, metrics, options.device).items()):
                sample = torch.tensor(values, dtype=torch.float64)
                if sample.isnan().any():
                    continue
                version = next(metric.version for metric in metrics if metric.name == name)
                spread = f"{sample.std().item():.3g}"
                rows.append([name, version, variant, n, d, f"{sample.mean().item():.6g}", spread, len(values)])
        print(f"n = {n}: {time.time() - start:.0f} s", file=sys.stderr)
    with options.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["metric", "version", "settings", "n", "d", "null", "spread", "trials"])
        writer.writerows(sorted(rows))


if __name__ == "__main__":
    main()
