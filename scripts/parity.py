"""Compare our numbers with the papers' formulas, the papers' code and other packages: writes docs/parity.md.

    python scripts/parity.py [--output FILE]

Three voices on the same clouds: anisoscope; a plain float64 numpy transcription of each source's formula, written anew
below; and the released packages, which run in an environment of their own (.venv-peers, made on the
first run, then kept). A cell that differs from ours and has no explanation makes the script fail.
"""

import argparse
import datetime
import json
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import make_environment, python_of

import anisoscope
from anisoscope.cloud import Cloud
from anisoscope.estimates import evaluate
from anisoscope.metrics import all_metrics

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
REQUIREMENTS = ROOT / "scripts" / "parity-requirements.txt"

NEIGHBORS = 20
GRIDE_SCALES = (2, 8, 64)
# Below the first a cell counts as equal to machine precision, above the second it needs an explanation.
EXACT = 1e-12
EXPLAIN_ABOVE = 1e-5
NOT_INSTALLED = "not installed"


# The clouds.


def make_clouds() -> dict[str, torch.Tensor]:
    """By name; the names are the rows of the tables."""
    rng = np.random.default_rng(2311_05928)
    frame = np.linalg.qr(rng.standard_normal((64, 10)))[0]
    flat = rng.standard_normal((2000, 10)) @ frame.T
    near = np.concatenate([flat, flat[:300] + 1e-9 * rng.standard_normal((300, 64))])
    spiked = rng.standard_normal((2048, 64))
    spiked[0, 0] = 1000.0
    axes = np.linalg.qr(rng.standard_normal((256, 256)))[0]
    steep = (rng.standard_normal((2048, 256)) * np.arange(1, 257) ** -0.6) @ axes.T
    arrays = {
        "flat": flat,
        "flat, float32": flat.astype(np.float32),
        "flat, bfloat16 values in float32": torch.from_numpy(flat).bfloat16().float().numpy(),
        "flat, bfloat16 tensor": torch.from_numpy(flat).bfloat16(),
        "flat + 300 exact duplicates": np.concatenate([flat, flat[:300]]),
        "flat + 30 near-duplicates": near[:2030],
        "flat + 300 near-duplicates": near,
        "flat + 300 near-duplicates, float32": near.astype(np.float32),
        "flat + offset 10⁴": flat + 1e4,
        "flat + offset 10⁴, float32": (flat + 1e4).astype(np.float32),
        "Gaussian, d = 2": rng.standard_normal((2000, 2)),
        "Gaussian, d = 20": rng.standard_normal((2000, 20)),
        "steep": steep,
        "spiked": spiked,
        "few": rng.standard_normal((200, 256)),
    }
    return {name: torch.as_tensor(array) for name, array in arrays.items()}


CLOUDS = {
    "flat": "2,000 Gaussian points on a 10-dimensional subspace of R⁶⁴, float64",
    "flat, float32": "the same, rounded to float32",
    "flat, bfloat16 values in float32": "the same, rounded to bfloat16 and held in float32",
    "flat, bfloat16 tensor": "the same numbers as a bfloat16 tensor",
    "flat + 300 exact duplicates": "`flat` and its first 300 points again",
    "flat + 30 near-duplicates": "`flat` and its first 30 points again, each coordinate moved by about 10⁻⁹",
    "flat + 300 near-duplicates": "the same with the first 300 points",
    "flat + 300 near-duplicates, float32": "the same, rounded to float32",
    "flat + offset 10⁴": "`flat` with 10⁴ added to every coordinate",
    "flat + offset 10⁴, float32": "the same, rounded to float32 (steps of 10⁻³)",
    "Gaussian, d = 2": "2,000 standard Gaussian points in R²",
    "Gaussian, d = 20": "2,000 standard Gaussian points in R²⁰",
    "steep": "2,048 Gaussian points in R²⁵⁶ with λⱼ ∝ j^-1.2",
    "spiked": "2,048 standard Gaussian points in R⁶⁴, one coordinate of one point set to 1,000",
    "few": "200 standard Gaussian points in R²⁵⁶",
}


def make_pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Source and target of linearity, by name."""
    rng = np.random.default_rng(2405_12250)
    source = rng.standard_normal((2000, 64))
    noise = rng.standard_normal((2000, 64))
    mapped = source @ (rng.standard_normal((64, 64)) / 8)
    target = mapped + 0.5 * noise
    frame = np.linalg.qr(rng.standard_normal((64, 10)))[0]
    flat = rng.standard_normal((2000, 10)) @ frame.T
    dead = source.copy()
    dead[:, 3] = 0.25
    arrays = {
        "map + noise": (source, target),
        "map + noise, float32": (source.astype(np.float32), target.astype(np.float32)),
        "map + noise, bfloat16 tensor": (torch.from_numpy(source).bfloat16(), torch.from_numpy(target).bfloat16()),
        "small update": (source, source + 0.1 * np.tanh(mapped)),
        "offset 10⁴, float32": ((source + 1e4).astype(np.float32), (target + 1e4).astype(np.float32)),
        "independent": (source, noise),
        "rank 10": (flat, flat @ frame @ rng.standard_normal((10, 64)) / 4 + 0.5 * noise),
        "rank 10, float32": (flat.astype(np.float32), (flat + 0.5 * noise).astype(np.float32)),
        "dead coordinate": (dead, target),
        "n < 2d": (source[:100], target[:100]),
        "n < d": (source[:40], target[:40]),
    }
    return {name: (torch.as_tensor(x), torch.as_tensor(y)) for name, (x, y) in arrays.items()}


PAIRS = {
    "map + noise": "Y = XA + noise, 2,000 Gaussian points in R⁶⁴, float64",
    "map + noise, float32": "the same, rounded to float32",
    "map + noise, bfloat16 tensor": "the same as bfloat16 tensors",
    "small update": "Y = X + .1 tanh(XA), as in a residual stream",
    "offset 10⁴, float32": "`map + noise` with 10⁴ added to X and Y, float32",
    "independent": "Y independent of X",
    "rank 10": "X on a 10-dimensional subspace of R⁶⁴, Y = XA + noise, float64",
    "rank 10, float32": "X on a 10-dimensional subspace of R⁶⁴, Y = X + noise, float32",
    "dead coordinate": "`map + noise` with one coordinate of X constant",
    "n < 2d": "the first 100 points of `map + noise`",
    "n < d": "the first 40 points of `map + noise`",
}


# The sources' formulas in float64 numpy, as plainly as possible.


def centred(points: np.ndarray) -> np.ndarray:
    return points - points.mean(0)


def anisotropy_by_svd(points: np.ndarray) -> float:
    """Razzhigaev et al. 2024: σ₁² / Σσᵢ² of the centred matrix."""
    squares = np.linalg.svd(centred(points), compute_uv=False) ** 2
    return squares.max() / squares.sum()


def anisotropy_by_power(points: np.ndarray) -> float:
    """The later repository's `fast=True`: 100 power iterations, then σ² / ‖X‖²_F."""
    x = centred(points)
    vector = np.random.default_rng(0).standard_normal(x.shape[1])
    for _ in range(100):
        vector = x.T @ (x @ vector)
        vector /= np.linalg.norm(vector)
    return float(((x @ vector) ** 2).sum() / (x**2).sum())


def isoscore_as_printed(covariance: np.ndarray) -> float:
    """Rudman et al. 2022: the isotropy defect δ of the normalised eigenvalues, then two rescalings."""
    d = len(covariance)
    eigenvalues = np.clip(np.linalg.eigvalsh(covariance), 0, None)
    normalised = math.sqrt(d) * eigenvalues / np.linalg.norm(eigenvalues)
    defect = np.linalg.norm(normalised - 1) / math.sqrt(2 * (d - math.sqrt(d)))
    return ((d - defect**2 * (d - math.sqrt(d))) ** 2 - d) / (d * (d - 1))


def shrunk(covariance: np.ndarray, target: np.ndarray, zeta: float = 0.25) -> np.ndarray:
    return (1 - zeta) * covariance + zeta * target


def neighbor_distances(points: np.ndarray, k: int) -> np.ndarray:
    """Distances to the k nearest others, by differences."""
    rows = []
    for index, point in enumerate(points):
        distances = np.sqrt(((points - point) ** 2).sum(1))
        distances[index] = np.inf
        rows.append(np.sort(np.partition(distances, k)[:k]))
    return np.array(rows)


def log_ratios(distances: np.ndarray, near: int = 1, far: int = 2) -> np.ndarray:
    return np.sort(np.log(distances[:, far - 1] / distances[:, near - 1]))


def line_through_origin(x: np.ndarray, y: np.ndarray) -> float:
    return float((x * y).sum() / (x * x).sum())


def facco(log_mu: np.ndarray, discard: float, first_rank: int = 1) -> float:
    """Facco et al. 2017: -log(1 - F) = d log μ with F = i/N, the largest ratios left out."""
    n = len(log_mu)
    kept = min(int(n * (1 - discard) + 1e-9), n - 1)
    return line_through_origin(log_mu[:kept], -np.log(1 - np.arange(first_rank, kept + first_rank) / n))


def facco_with_printed_target(log_mu: np.ndarray, discard: float) -> float:
    """The equation that *The Shape of Learning* prints, y = 1 - F, taken literally."""
    kept = int(len(log_mu) * (1 - discard) + 1e-9)
    return line_through_origin(log_mu[:kept], 1 - np.arange(1, kept + 1) / len(log_mu))


def released_dimension(points: np.ndarray, distances: np.ndarray) -> float:
    """What LLM-Microscope computes: its distances are in units of the mean norm; points with r₁ < 10⁻⁸ or μ ≤ 1 + 10⁻⁸
    leave the fit but stay in the rank count; the fit takes the first fifth of the others."""
    distances = distances / np.linalg.norm(centred(points), axis=1).mean()
    valid = distances[:, 0] >= 1e-8
    mu = np.sort(distances[valid, 1] / distances[valid, 0])
    mu = mu[mu > 1 + 1e-8]
    left_out = len(points) - len(mu)
    ranks = np.arange(1, len(mu) + 1) + left_out
    kept = min(len(mu) // 5, len(mu) - 1)
    return line_through_origin(np.log(mu[:kept]), -np.log(1 - ranks[:kept] / len(points)))


def censored_likelihood(log_mu: np.ndarray, discard: float) -> float:
    """Denti et al. 2022 for TwoNN, with the largest ratios known only to exceed the last one kept."""
    n = len(log_mu)
    kept = min(int(n * (1 - discard) + 1e-9), n - 1)
    return (kept - 1) / (log_mu[:kept].sum() + (n - kept) * log_mu[kept - 1])


def gride(log_mu: np.ndarray, near: int, far: int, cut: bool = False) -> float:
    """Denti et al. 2022: the root of the score; `cut` leaves out μ ≥ q₅₀ + 20 (q₉₅ - q₅₀), as DADApy does."""
    if cut:
        mu = np.exp(log_mu)
        middle, high = np.percentile(mu, [50, 95])
        log_mu = log_mu[mu < middle + 20 * (high - middle)]
    n = len(log_mu)

    def score(d: float) -> float:
        exponent = d * log_mu
        shares = np.ones(n)
        np.divide(exponent, -np.expm1(-exponent), out=shares, where=exponent > 0)
        return (n - 1) / d + (far - near - 1) * shares.sum() / d - (far - 1) * log_mu.sum()

    low, high = 1e-6, 1e6
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if score(middle) > 0 else (low, middle)
    return middle


def pointwise_inverse(distances: np.ndarray, k: int, terms: int) -> np.ndarray:
    """Levina and Bickel 2004 at every point: 1/d = Σ_j<k log(r_k / r_j) / terms."""
    return np.log(distances[:, k - 1 : k] / distances[:, : k - 1]).sum(1) / terms


def linearity(source: np.ndarray, target: np.ndarray) -> float:
    """Razzhigaev et al. 2024: 1 - min_A ‖XA - Y‖², X and Y centred, of unit norm; the minimum by least squares."""
    x, y = centred(source), centred(target)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return 1 - ((x @ np.linalg.lstsq(x, y)[0] - y) ** 2).sum()


# What each of the three voices says.


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number, or why there is none."""

    value: float = math.nan
    error: str = ""
    remark: str = ""


Column = dict[str, Cell]


def ours(metric: str, clouds: dict[str, Cloud], **settings: Any) -> Column:
    column = {}
    for name, cloud in clouds.items():
        result = evaluate(cloud, all_metrics()[metric], settings)
        remark = f"{result.dropped} dropped" if result.dropped else ""
        column[name] = Cell(value=float(result.value), error=result.note or "", remark=remark)
    return column


def formula(function: Callable[..., float], inputs: dict[str, Any]) -> Column:
    return {name: Cell(value=float(function(given))) for name, given in inputs.items()}


def theirs(results: dict[str, dict[str, Any]], call: str) -> Column:
    column = {}
    for name, calls in results.items():
        found = calls.get(call)
        if found is None:
            column[name] = Cell(error=NOT_INSTALLED)
        elif "error" in found:
            column[name] = Cell(error=f"`{found['error'].split(':')[0]}`")
        else:
            column[name] = Cell(value=found["value"], remark="warns" if found["warnings"] else "")
    return column


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One cloud as the formulas want it: float64 arrays and brute-force distances."""

    points: np.ndarray
    covariance: np.ndarray
    all_distances: np.ndarray
    """Of every row to its two nearest others."""
    distances: np.ndarray
    """Of the distinct rows to their 64 nearest others."""

    @classmethod
    def of(cls, points: torch.Tensor) -> "Prepared":
        exact = points.double().numpy()
        distinct = np.unique(exact, axis=0)
        distances = neighbor_distances(distinct, max(GRIDE_SCALES))
        of_all = distances[:, :2] if len(distinct) == len(exact) else neighbor_distances(exact, 2)
        return cls(points=exact, covariance=np.cov(exact.T), all_distances=of_all, distances=distances)

    def log_mu(self, far: int = 2) -> np.ndarray:
        return log_ratios(self.distances, far // 2, far)

    def scaled_identity(self) -> np.ndarray:
        return np.eye(len(self.covariance)) * np.trace(self.covariance) / len(self.covariance)


# The tables.


def prose(text: str) -> str:
    """One line of what is written on several."""
    return " ".join(text.split())


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first column is ours; `same` names the formula column that follows our conventions."""

    title: str
    text: str
    columns: dict[str, Column]
    same: str
    why: dict[str, dict[str, str]] = field(default_factory=dict)
    """Column, then row (or `*`), to the keys of its explanations."""
    shown: tuple[str, ...] = ()
    """Columns of another quantity, not compared with ours."""


NEAR = ("flat + 30 near-duplicates", "flat + 300 near-duplicates", "flat + 300 near-duplicates, float32")
EXACT_DUPLICATES = ("flat + 300 exact duplicates",)
BFLOAT16 = ("flat, bfloat16 tensor", "map + noise, bfloat16 tensor")


def because(**reasons: tuple[str, ...]) -> dict[str, str]:
    """Row to key; rows of BFLOAT16 always have theirs."""
    return dict.fromkeys(BFLOAT16, "bfloat16") | {row: key for key, rows in reasons.items() for row in rows}


def make_tables(
    clouds: dict[str, Cloud], prepared: dict[str, Prepared], pairs: dict[str, Cloud], peers: dict[str, Any]
) -> list[Table]:
    found = peers["clouds"]
    tables = [
        Table(
            title="Anisotropy: `leading_variance`",
            text=prose("""
                Razzhigaev et al., *The Shape of Learning* (2024): σ₁² / Σσ² of the centred points. The released
                package decomposes; the later repository also has 100 power iterations (`fast=True`), which the wheel
                has not, so only their transcription is shown.
            """),
            columns={
                "ours": ours("leading_variance", clouds),
                "formula": formula(lambda one: anisotropy_by_svd(one.points), prepared),
                "formula, 100 power iterations": formula(lambda one: anisotropy_by_power(one.points), prepared),
                "llm-microscope": theirs(found, "microscope.calculate_anisotropy_torch"),
            },
            same="formula",
            why={"formula, 100 power iterations": {"*": "power"}, "llm-microscope": because()},
        ),
        Table(
            title="Isotropy: `isoscore`",
            text=prose("""
                Rudman et al. (2022). The formula is transcribed as printed (defect, two rescalings); ours is
                (PR - 1)/(d - 1). The package is called with points as rows, as its version 2 wants.
            """),
            columns={
                "ours": ours("isoscore", clouds),
                "formula": formula(lambda one: isoscore_as_printed(one.covariance), prepared),
                "IsoScore": theirs(found, "isoscore.IsoScore"),
            },
            same="formula",
            why={"IsoScore": because()},
        ),
        Table(
            title="Isotropy: `isoscore_star`, ζ = .25",
            text="Rudman and Eickhoff (2024), towards two targets C₀. Ours shrinks towards (tr C / d) I.",
            columns={
                "ours": ours("isoscore_star", clouds, isoscore_zeta=0.25),
                "formula, (tr C / d) I": formula(
                    lambda one: isoscore_as_printed(shrunk(one.covariance, one.scaled_identity())), prepared
                ),
                "IsoScore, (tr C / d) I": theirs(found, "isoscore.IsoScore_star.trace"),
                "formula, I": formula(
                    lambda one: isoscore_as_printed(shrunk(one.covariance, np.eye(len(one.covariance)))), prepared
                ),
                "IsoScore, I": theirs(found, "isoscore.IsoScore_star.identity"),
            },
            same="formula, (tr C / d) I",
            why={
                "IsoScore, (tr C / d) I": because(),
                "formula, I": {"*": "target"},
                "IsoScore, I": {"*": "target"} | because(),
            },
        ),
        Table(
            title="Dimension: `twonn`, the lowest 90 % of the ratios",
            text=prose("""
                Facco et al. (2017), a line through the origin, F = i/N; on the distinct points. scikit-dimension:
                `TwoNN()`; DADApy, by the method's authors: `compute_id_2NN()`. The last column is our warning sign.
            """),
            columns={
                "ours": ours("twonn", clouds, discard_fraction=0.1),
                "formula": formula(lambda one: facco(one.log_mu(), 0.1), prepared),
                "scikit-dimension": theirs(found, "skdim.TwoNN"),
                "DADApy": theirs(found, "dadapy.2NN"),
                "`near_duplicate_rate`": ours("near_duplicate_rate", clouds),
            },
            same="formula",
            why={
                "scikit-dimension": because(duplicates=EXACT_DUPLICATES, near=NEAR),
                "DADApy": because(duplicates=EXACT_DUPLICATES, near=NEAR),
            },
            shown=("`near_duplicate_rate`",),
        ),
        Table(
            title="Dimension: `twonn_mle`, the largest 10 % censored",
            text="The same ratios by maximum likelihood. scikit-dimension: `TwoNN(method='mle')`.",
            columns={
                "ours": ours("twonn_mle", clouds, discard_fraction=0.1),
                "formula": formula(lambda one: censored_likelihood(one.log_mu(), 0.1), prepared),
                "scikit-dimension": theirs(found, "skdim.TwoNN.mle"),
            },
            same="formula",
            why={"scikit-dimension": because(duplicates=EXACT_DUPLICATES, near=NEAR)},
        ),
        Table(
            title="Dimension: `twonn`, the lowest 20 % of the ratios",
            text=prose("""
                The fit of *The Shape of Learning* as released: `intrinsic_dimension` with its reduction_factor of 5,
                `discard_fraction` .8 in our words. 'As released' transcribes what that code does with repeated points;
                'formula' is Facco's on the distinct ones.
            """),
            columns={
                "ours": ours("twonn", clouds, discard_fraction=0.8),
                "formula": formula(lambda one: facco(one.log_mu(), 0.8), prepared),
                "formula as released": formula(lambda one: released_dimension(one.points, one.all_distances), prepared),
                "llm-microscope": theirs(found, "microscope.intrinsic_dimension"),
            },
            same="formula",
            why={
                "formula as released": dict.fromkeys((*EXACT_DUPLICATES, *NEAR), "ranks"),
                "llm-microscope": dict.fromkeys((*EXACT_DUPLICATES, *NEAR), "ranks"),
            },
        ),
    ]
    for scale in GRIDE_SCALES:
        near = scale // 2
        cut = {"flat + 30 near-duplicates": "cut"} if scale == 2 else {}
        blurred = because(duplicates=EXACT_DUPLICATES, near=NEAR) | cut
        tables.append(
            Table(
                title=f"Dimension: `gride_{scale}`",
                text=prose(f"""
                    Denti et al. (2022), neighbours {near} and {scale}. scikit-dimension: `GRIDE(n1={near})`; DADApy:
                    `return_id_scaling_gride(range_max={scale})`, last entry. Both cut at q₅₀ + 20 (q₉₅ - q₅₀); ours
                    does not.
                """),
                columns={
                    "ours": ours(f"gride_{scale}", clouds),
                    "formula": formula(lambda one, s=scale: gride(one.log_mu(s), s // 2, s), prepared),
                    "formula with cut": formula(
                        lambda one, s=scale: gride(one.log_mu(s), s // 2, s, cut=True), prepared
                    ),
                    "scikit-dimension": theirs(found, f"skdim.GRIDE.{scale}"),
                    "DADApy": theirs(found, f"dadapy.gride.{scale}"),
                },
                same="formula",
                why={"formula with cut": cut, "scikit-dimension": blurred, "DADApy": blurred},
            )
        )
    tables += [
        Table(
            title=f"Dimension: `levina_bickel`, k = {NEIGHBORS}",
            text=prose("""
                Levina and Bickel (2004) with k - 1 terms, inverses averaged (MacKay and Ghahramani): ours, and
                scikit-dimension's `MLE().fit(X, n_neighbors=20, comb='mle')`. Its `K` is something else, and unused
                when `neighborhood_based`, the default. `comb='mean'` averages dimensions, as Levina and Bickel print.
            """),
            columns={
                "ours": ours("levina_bickel", clouds, neighbors=NEIGHBORS),
                "formula": formula(lambda one: 1 / inverse_dimensions(one).mean(), prepared),
                "scikit-dimension": theirs(found, "skdim.MLE"),
                "formula, mean": formula(lambda one: (1 / inverse_dimensions(one)).mean(), prepared),
                "scikit-dimension, mean": theirs(found, "skdim.MLE.mean"),
            },
            same="formula",
            why={
                "scikit-dimension": because(duplicates=EXACT_DUPLICATES, near=NEAR),
                "formula, mean": {"*": "mean"},
                "scikit-dimension, mean": {"*": "mean"}
                | because(duplicates=EXACT_DUPLICATES)
                | dict.fromkeys(NEAR, "near mean"),
            },
        ),
        Table(
            title="Linearity: `procrustes_linearity`",
            text=prose("""
                Razzhigaev et al., *Your Transformer is Secretly Linear* (2024): 1 - min ‖XA - Y‖² for centred X and Y
                of unit norm; the formula's minimum by `numpy.linalg.lstsq`. llm-microscope: `procrustes_similarity`.
            """),
            columns={
                "ours": ours("procrustes_linearity", pairs),
                "formula": formula(
                    lambda pair: linearity(pair.previous.double().numpy(), pair.points.double().numpy()), pairs
                ),
                "llm-microscope": theirs(peers["pairs"], "microscope.procrustes_similarity"),
            },
            same="formula",
            why={
                "formula": dict.fromkeys(("n < 2d", "n < d"), "too_few"),
                "llm-microscope": because(
                    rank=("rank 10", "rank 10, float32", "dead coordinate"), too_few=("n < 2d", "n < d")
                ),
            },
        ),
    ]
    return tables


def inverse_dimensions(one: Prepared) -> np.ndarray:
    return pointwise_inverse(one.distances, NEIGHBORS, NEIGHBORS - 1)


def make_conventions() -> list[tuple[str, str, Callable[[Prepared], float]]]:
    """Quantity, convention, and the number; the first of each quantity is ours."""

    def rescaled(one: Prepared, factor: float) -> float:
        covariance = factor**2 * one.covariance
        return isoscore_as_printed(shrunk(covariance, np.eye(len(covariance))))

    def unsquared(one: Prepared) -> float:
        values = np.linalg.svd(centred(one.points), compute_uv=False)
        return values[0] / values.sum()

    def uncensored(one: Prepared) -> float:
        kept = one.log_mu()[: int(0.9 * len(one.distances))]
        return (len(kept) - 1) / kept.sum()

    k = NEIGHBORS
    return [
        ("`leading_variance`", "σ₁² / Σσ², centred", lambda one: anisotropy_by_svd(one.points)),
        ("`leading_variance`", "singular values not squared, σ₁ / Σσ", unsquared),
        ("`leading_variance`", "100 power iterations", lambda one: anisotropy_by_power(one.points)),
        (
            "`isoscore_star`, ζ = .25",
            "C₀ = (tr C / d) I, at any scale of the points",
            lambda one: isoscore_as_printed(shrunk(one.covariance, one.scaled_identity())),
        ),
        ("`isoscore_star`, ζ = .25", "C₀ = I", lambda one: rescaled(one, 1)),
        ("`isoscore_star`, ζ = .25", "C₀ = I, points times 10", lambda one: rescaled(one, 10)),
        ("`twonn`", "F = i/N, the lowest 90 %", lambda one: facco(one.log_mu(), 0.1)),
        (
            "`twonn`",
            "F = (i - 1)/N (scikit-dimension up to 0.3.4)",
            lambda one: facco(one.log_mu(), 0.1, first_rank=0),
        ),
        ("`twonn`", "the lowest 20 % (LLM-Microscope)", lambda one: facco(one.log_mu(), 0.8)),
        (
            "`twonn`",
            "y = 1 - F, as *The Shape of Learning* prints, the lowest 90 %",
            lambda one: facco_with_printed_target(one.log_mu(), 0.1),
        ),
        ("`twonn`", "the same, all ratios", lambda one: facco_with_printed_target(one.log_mu(), 0.0)),
        ("`twonn_mle`", "the largest 10 % censored", lambda one: censored_likelihood(one.log_mu(), 0.1)),
        ("`twonn_mle`", "all ratios, (N - 1)/Σ log μ: `gride_2`", lambda one: gride(one.log_mu(), 1, 2)),
        ("`twonn_mle`", "the largest 10 % dropped, not censored", uncensored),
        ("`levina_bickel`, k = 20", "k - 1 terms, inverses averaged", lambda one: 1 / inverse_dimensions(one).mean()),
        ("`levina_bickel`, k = 20", "dimensions averaged", lambda one: (1 / inverse_dimensions(one)).mean()),
        (
            "`levina_bickel`, k = 20",
            "k - 2 for k - 1 (scikit-dimension's `unbiased=True`)",
            lambda one: 1 / pointwise_inverse(one.distances, k, k - 2).mean(),
        ),
        (
            "`levina_bickel`, k = 20",
            "the zero term j = k counted",
            lambda one: 1 / pointwise_inverse(one.distances, k, k).mean(),
        ),
        (
            "`levina_bickel`, k = 20",
            "distances left squared, as some search libraries return them",
            lambda one: 1 / pointwise_inverse(one.distances**2, k, k - 1).mean(),
        ),
    ]


# The page.


CONVENTION_CLOUDS = ("flat", "Gaussian, d = 2", "steep")


def relative(cell: Cell, reference: Cell) -> float:
    """Signed; NaN where either is missing."""
    if reference.value == 0:
        return math.nan
    return (cell.value - reference.value) / abs(reference.value)


def render_difference(difference: float) -> str:
    size = abs(difference)
    if size < EXACT:
        return "="
    if size < 1e-3:
        return f"{difference:+.0e}"
    return f"{100 * difference:+.{0 if size >= 0.1 else 1 if size >= 0.01 else 2}f} %"


def render_cell(cell: Cell, reference: Cell | None, mark: str) -> str:
    """`reference` is None for our own column and for other quantities."""
    if math.isnan(cell.value):
        text = f"NaN: {cell.error}" if reference is None else cell.error or "NaN"
    else:
        text = f"{cell.value:.5g}"
        if reference is not None and not math.isnan(relative(cell, reference)):
            text += f" ({render_difference(relative(cell, reference))})"
    return ", ".join(part for part in (text, cell.remark) if part) + (f" [{mark}]" if mark else "")


def needs_explanation(cell: Cell, reference: Cell) -> bool:
    if cell.error == NOT_INSTALLED:
        return False
    return not abs(relative(cell, reference)) <= EXPLAIN_ABOVE


def explanation_of(table: Table, column: str, row: str) -> str | None:
    """The keys of the explanations a cell has, '' where it needs one and has none, None where it needs none."""
    reference = next(iter(table.columns.values()))
    if column in (next(iter(table.columns)), *table.shown):
        return None
    if not needs_explanation(table.columns[column][row], reference[row]):
        return None
    reasons = table.why.get(column, {})
    return reasons.get(row, reasons.get("*", ""))


def render_table(table: Table, numbers: dict[str, int]) -> list[str]:
    reference = next(iter(table.columns.values()))
    lines = [f"### {table.title}", "", table.text, ""]
    lines += ["| |" + "|".join(f" {name} " for name in table.columns) + "|", "|---" * (len(table.columns) + 1) + "|"]
    for row, own in reference.items():
        cells = []
        for name, column in table.columns.items():
            key = explanation_of(table, name, row)
            mark = "" if key is None else ", ".join(str(numbers[one]) for one in key.split()) or "unexplained"
            cells.append(render_cell(column[row], None if column is reference or name in table.shown else own, mark))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def is_rounded(row: str) -> bool:
    return "float32" in row or "bfloat16" in row


def largest_unexplained(tables: list[Table], voice: str, rounded: bool) -> float:
    """The largest difference from ours among the cells that count as equal, over columns of one voice."""
    differences = [0.0]
    for table in tables:
        reference = next(iter(table.columns.values()))
        for name, column in table.columns.items():
            wanted = name == table.same if voice == "formula" else name.split(",")[0] == voice
            if not wanted or "*" in table.why.get(name, {}):
                continue
            for row, cell in column.items():
                difference = abs(relative(cell, reference[row]))
                if is_rounded(row) == rounded and difference <= EXPLAIN_ABOVE:
                    differences.append(difference)
    return max(differences)


VOICES = {
    "formula": """Ours computes in float64 on float64 points and in float32 on others; `leading_variance` stops at a
        relative error of 10⁻⁶.""",
    "llm-microscope": """F in float32 within a float64 dimension; anisotropy and linearity in the input's dtype.""",
    "IsoScore": """√d and what is made of it in float32, the rest in the input's dtype.""",
    "scikit-dimension": """Distances from products, ‖x‖² + ‖y‖² - 2x·y, which lose digits far from the origin.""",
    "DADApy": """The same distances; the line by an iterative fit, GRIDE's root by bisection to 10⁻⁷.""",
}


def explain(tables: dict[str, Table], peers: dict[str, Any]) -> dict[str, str]:
    """Why cells differ, by key, in the order of the page; every number comes from the tables."""

    def at(title: str, column: str, row: str, digits: int = 3) -> str:
        cell = tables[title].columns[column][row]
        return cell.error if math.isnan(cell.value) else f"{cell.value:.{digits}g}"

    anisotropy, star, line, censored, fifth, gride_2, gride_8, pointwise, linear = (
        next(title for title in tables if text in title)
        for text in ("leading_", "_star", "90 %", "censored", "20 %", "gride_2", "gride_8", "levina", "linearity")
    )
    exact, few_near, near = EXACT_DUPLICATES[0], NEAR[0], NEAR[1]
    errors = {
        call["error"]
        for found in (peers["clouds"][BFLOAT16[0]], peers["pairs"][BFLOAT16[1]])
        for call in found.values()
        if "error" in call
    }
    texts = {
        "power": f"""**Power iterations that have not converged.** After 100 of them the direction still mixes axes
            whose variances are close: on `flat` they give {at(anisotropy, "formula, 100 power iterations", "flat", 5)}
            for {at(anisotropy, "formula", "flat", 5)}, always too little. Ours iterates until a bound on the error is
            met.""",
        "target": f"""**Another shrinkage target.** Towards I, as the package suggests, IsoScore* depends on the unit of
            the points: {at(star, "IsoScore, I", "steep")} on `steep` for {at(star, "ours", "steep")} with (tr C / d) I.
            Given our target the package gives our number.""",
        "duplicates": f"""**Exact duplicates.** A repeated point has r₁ = 0 and no ratio. We remove repeats, count them
            (`dropped`) and give the number of `flat`. scikit-dimension and DADApy take distances from products at this
            width: a repeat is at 0 or at some 10⁻⁸, by the luck of rounding, so leaving out zeros leaves out some of
            them and the rest decide: {at(line, "scikit-dimension", exact)} (DADApy: {at(line, "DADApy", exact)}). At
            coarser scales a repeat counts as one more neighbour at the same place
            ({at(gride_8, "scikit-dimension", exact)} for {at(gride_8, "ours", exact)} in `gride_8`). One distance of 0
            is enough for {at(pointwise, "scikit-dimension", exact)} in scikit-dimension's `MLE`. Cells that rest on
            rounding read differently on another machine.""",
        "near": f"""**Near-duplicates.** They are not repeats, so we keep them, and ours is the formula on exact
            distances; with 600 of 2,300 points in pairs 10⁻⁸ apart the formula itself reads {at(line, "ours", near)},
            not 10. The packages differ because 10⁻⁸ is below what their distances resolve, some pairs being at 0 for
            them, and in float32 because we remove the few that rounding made equal. No estimator that reads r₁ is right
            on 300 of them, ours included: `near_duplicate_rate` ({at(line, "`near_duplicate_rate`", near)}) is there to
            say so. Coarser scales hardly feel them ({at(gride_8, "ours", near)} in `gride_8`).""",
        "cut": f"""**GRIDE's cut of outlying ratios.** DADApy, and scikit-dimension after it, leave out
            μ ≥ q₅₀ + 20 (q₉₅ - q₅₀); ours keeps every ratio. It shows when fewer than 5 % of the points have a
            near-duplicate: with 30 of them `gride_2` reads {at(gride_2, "ours", few_near)} and, cut,
            {at(gride_2, "formula with cut", few_near)}; `twonn` and `twonn_mle`, which discard or censor the largest
            ratios, read {at(line, "ours", few_near)} and {at(censored, "ours", few_near)}.""",
        "ranks": f"""**Repeats kept in the rank count.** llm-microscope drops points with r₁ < 10⁻⁸ from the fit and
            still counts them in F, so F starts near their share instead of 0 and a line through the origin turns
            steep: {at(fifth, "llm-microscope", exact)} for {at(fifth, "ours", exact)}, without a warning. The package
            equals its transcription. With near-duplicates a fit on the lowest 20 % is wrong in every column: a point
            near such a pair has μ near 1, which pulls Facco's formula up, too ({at(fifth, "formula", near)}).""",
        "mean": f"""**Mean of dimensions or of inverses.** The mean of 1/d is unbiased, the mean of d too large by
            about (k - 1)/(k - 2): {at(pointwise, "formula, mean", "flat")} for {at(pointwise, "formula", "flat")} on
            `flat`. scikit-dimension offers both, and its default is ours.""",
        "rank": f"""**Sources without full rank.** llm-microscope divides by all singular values, also by those that are
            rounding noise, and the noise spoils the fit: {at(linear, "llm-microscope", "rank 10")} for
            {at(linear, "ours", "rank 10")} on `rank 10`, {at(linear, "llm-microscope", "rank 10, float32")} for
            {at(linear, "ours", "rank 10, float32")} in float32. One constant coordinate is enough. Ours leaves out what
            is noise in float64; directions that exist only because X was rounded to float32 are counted, as least
            squares counts them.""",
        "too_few": """**Too few points.** Below 2d points even an independent Y scores above a half, so ours has no
            value and says why; the formula returns a number near 1.""",
        "bfloat16": f"""**bfloat16.** CPU decompositions and numpy have no such type, so all but llm-microscope's
            dimension raise ({"; ".join(sorted(f"`{error}`" for error in errors))}). Ours converts to float32, which
            holds bfloat16 exactly: in the tables of clouds its row equals the one above.""",
    }
    return {key: prose(text) for key, text in texts.items()}


def make_page(tables: list[Table], prepared: dict[str, Prepared], peers: dict[str, Any]) -> tuple[str, list[str]]:
    """The page, and the cells that differ without an explanation."""
    by_title = {table.title: table for table in tables}
    keys = {
        (table.title, column, row): explanation_of(table, column, row)
        for table in tables
        for column in table.columns
        for row in table.columns[column]
    }
    used = {one for key in keys.values() if key for one in key.split()}
    explanations = {key: text for key, text in explain(by_title, peers).items() if key in used}
    numbers = {key: number for number, key in enumerate(explanations, 1)}
    unexplained = [" / ".join(place) for place, key in keys.items() if key == ""]
    versions = ", ".join(f"{name} {version}" for name, version in peers["versions"].items())
    failure = peers["findings"]["import llm_microscope"].get("error", "nothing")
    halves = {call["microscope.procrustes_similarity_centered"].get("value") for call in peers["pairs"].values()}
    largest = {
        (voice, rounded): f"{largest_unexplained(tables, voice, rounded):.0e}"
        for voice in VOICES
        for rounded in (False, True)
    }
    lines = [
        "<!-- Written by scripts/parity.py: `make parity` writes it again. Do not edit. -->",
        "",
        "# Parity with the papers' formulas and code",
        "",
        prose(f"""
            Our numbers are the sources' formulas: wherever we give one it equals a plain float64 transcription within
            {largest["formula", False]} (relative) on float64 points and within {largest["formula", True]} on float32
            and bfloat16 points. Given the same conventions the released packages agree within 10⁻⁵, except on repeated
            points, near-repeated points, sources without full rank and bfloat16, where some give another number, often
            without a warning, and some raise. In parentheses stands the difference relative to ours (`=`: below 10⁻¹²);
            where it exceeds 10⁻⁵, a number in brackets leads to the reason at the end.
        """),
        "",
        prose(f"""
            Measured on {datetime.date.today().isoformat()} with anisoscope {anisoscope.__version__} (Python
            {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}) and, in an environment of
            their own, {versions}. `make parity` measures everything again; no result on this page is typed.
        """),
        "",
        "## The largest differences where nothing is amiss",
        "",
        "| | float64 points | float32 and bfloat16 points | Where they come from |",
        "|---|---|---|---|",
    ]
    for voice, reason in VOICES.items():
        lines.append(f"| {voice} | {largest[voice, False]} | {largest[voice, True]} | {prose(reason)} |")
    lines += ["", "## The clouds", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in {**CLOUDS, **PAIRS}.items()]
    lines += ["", f"The last {len(PAIRS)} are pairs, for linearity. All are seeded.", "", "## The tables", ""]
    for table in tables:
        lines += render_table(table, numbers)
    lines += ["## What a convention does", ""]
    lines += ["The first line of each quantity is ours; all are transcriptions.", ""]
    lines += ["| | |" + "|".join(f" {name} " for name in CONVENTION_CLOUDS) + "|", "|---|---|---|---|---|"]
    reference: dict[str, Column] = {}
    for quantity, convention, function in make_conventions():
        column = formula(function, {name: prepared[name] for name in CONVENTION_CLOUDS})
        first = quantity not in reference
        own = reference.setdefault(quantity, column)
        cells = (render_cell(column[name], None if first else own[name], "") for name in CONVENTION_CLOUDS)
        lines.append(f"| {quantity if first else ''} | {convention} | {' | '.join(cells)} |")
    lines += ["", "## What differs and why", ""]
    lines += [f"{number}. {explanations[key]}" for key, number in numbers.items()]
    lines += [
        "",
        "And outside the tables:",
        "",
        f"- `import llm_microscope` raises on the released wheel (`{failure}`); its functions are loaded by path.",
        "- `calculate_anisotropy_torch` in the wheel has "
        + ("a" if peers["findings"]["fast"] else "no")
        + " `fast` option.",
        "- `procrustes_similarity_centered` in the wheel "
        + ("ends before it returns: its value is `None`." if halves == {None} else f"returns {halves}."),
        "- scikit-dimension used F = (i - 1)/N up to 0.3.4; since 0.3.6 it is Facco's i/N, as ours.",
    ]
    if "dadapy" not in peers["versions"]:
        lines.append("- DADApy could not be installed here; its columns are empty.")
    return "\n".join(lines) + "\n", unexplained


# The other environment.


def ask_peers(clouds: dict[str, torch.Tensor], pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def save(points: torch.Tensor) -> dict[str, str]:
            file = f"{len(list(folder.iterdir()))}.npy"
            # numpy has no bfloat16; float32 holds it exactly.
            np.save(folder / file, (points.float() if points.dtype == torch.bfloat16 else points).numpy())
            return {"file": file, "dtype": str(points.dtype).removeprefix("torch.")}

        manifest = {
            "clouds": {name: save(points) for name, points in clouds.items()},
            "pairs": {name: {"source": save(x), "target": save(y)} for name, (x, y) in pairs.items()},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        command = [python_of(PEERS), str(ROOT / "scripts" / "parity_peers.py"), name]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "parity.md")
    options = parser.parse_args()
    make_environment(PEERS, REQUIREMENTS)
    points, pairs = make_clouds(), make_pairs()
    print("asking the packages (about three minutes)", file=sys.stderr)
    peers = ask_peers(points, pairs)
    prepared = {name: Prepared.of(tensor) for name, tensor in points.items()}
    tables = make_tables(
        {name: Cloud(points=tensor, neighbor_count=max(GRIDE_SCALES)) for name, tensor in points.items()},
        prepared,
        {name: Cloud(points=target, previous=source) for name, (source, target) in pairs.items()},
        peers,
    )
    page, unexplained = make_page(tables, prepared, peers)
    options.output.write_text(page, encoding="utf-8")
    if unexplained:
        sys.exit("these cells differ from ours and nothing explains it:\n" + "\n".join(unexplained))


if __name__ == "__main__":
    main()
