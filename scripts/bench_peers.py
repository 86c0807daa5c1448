"""The other packages' side of scripts/bench.py: runs in their own environment and knows nothing of anisoscope.

    .venv-bench/bin/python scripts/bench_peers.py

A worker that stays: the first line on stdout names versions and calls; then every line on stdin, a JSON object with
`call` and `file` (points, .npy), is answered by one with `wall` and `cpu` seconds around the call alone, and `value`.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

import numpy as np
import torch
from peers import load_microscope

PACKAGES = ("llm-microscope", "scikit-dimension", "scikit-learn", "scipy", "dadapy", "faiss-cpu", "IsoScore")
PACKAGES += ("overcomplete", "numpy", "torch")
SUBSET = 512
"""Points given to llm-microscope's quadratic loop; its time is scaled by (n / SUBSET)²."""
RANK = 32


def load_semi_nmf() -> Any:
    """overcomplete's SemiNMF without the package around it, which wants vision models."""
    for name in ("overcomplete", "overcomplete.optimization"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(importlib.util.find_spec("numpy").origin).parent.parent / name.replace(".", "/"))]
        sys.modules[name] = package
    return importlib.import_module("overcomplete.optimization.semi_nmf").SemiNMF


def fit_twonn(distances: np.ndarray) -> float:
    """Facco's fit for packages that only search: distances to the two nearest others, 10 % of the ratios discarded."""
    with np.errstate(all="ignore"):
        log_mu = np.sort(np.log(distances[:, 1] / distances[:, 0]))
    log_mu = log_mu[: int(len(log_mu) * 0.9 + 1e-9)]
    if not np.isfinite(log_mu).all():
        return float("nan")
    target = -np.log(1 - np.arange(1, len(log_mu) + 1) / len(distances))
    return float((log_mu * target).sum() / (log_mu * log_mu).sum())


def make_calls() -> dict[str, Callable[[np.ndarray], Any]]:
    """By name; a package that is not installed has none."""
    from scipy.sparse.linalg import svds
    from sklearn.decomposition import PCA
    from sklearn.neighbors import NearestNeighbors

    def by_svds(points: np.ndarray) -> float:
        centred = points - points.mean(0)
        return float(svds(centred, k=1, return_singular_vectors=False)[0] ** 2 / np.vdot(centred, centred))

    def by_pca(points: np.ndarray) -> float:
        return PCA(1, svd_solver="randomized", random_state=0).fit(points).explained_variance_ratio_[0]

    def by_sklearn(points: np.ndarray) -> float:
        search = NearestNeighbors(n_neighbors=2, algorithm="brute", n_jobs=1).fit(points)
        return fit_twonn(search.kneighbors()[0])

    calls = {"scipy svds": by_svds, "sklearn randomized PCA": by_pca, "sklearn brute": by_sklearn}
    with contextlib.suppress(ImportError):
        import skdim

        calls["scikit-dimension"] = lambda points: skdim.id.TwoNN().fit(points).dimension_
    with contextlib.suppress(ImportError):
        import dadapy

        calls["DADApy"] = lambda points: dadapy.Data(points, n_jobs=1).compute_id_2NN()[0]
    with contextlib.suppress(ImportError):
        import faiss

        def by_faiss(points: np.ndarray) -> float:
            faiss.omp_set_num_threads(1)
            centred = points - points.mean(0)
            index = faiss.IndexFlatL2(points.shape[1])
            index.add(centred)
            # The usual way to leave out the point itself: the first of three is dropped.
            return fit_twonn(np.sqrt(np.maximum(index.search(centred, 3)[0][:, 1:], 0)))

        calls["faiss Flat"] = by_faiss
    with contextlib.suppress(ImportError):
        import IsoScore.IsoScore

        calls["IsoScore"] = lambda points: IsoScore.IsoScore.IsoScore(torch.from_numpy(points))
    with contextlib.suppress(ImportError, AttributeError):
        microscope = load_microscope()
        calls["llm-microscope SVD"] = lambda points: microscope.calculate_anisotropy_torch(torch.from_numpy(points))
        calls["llm-microscope TwoNN"] = lambda points: microscope.intrinsic_dimension(
            torch.from_numpy(points[:SUBSET]), "cpu"
        )
    with contextlib.suppress(ImportError, AttributeError):
        semi_nmf = load_semi_nmf()

        def by_overcomplete(points: np.ndarray) -> float:
            torch.manual_seed(0)
            given = torch.from_numpy(points)
            codes, dictionary = semi_nmf(RANK).fit(given)
            return ((given - codes @ dictionary).norm() / given.norm()).item()

        calls["overcomplete"] = by_overcomplete
    return calls


def answer(call: Callable[[np.ndarray], Any], points: np.ndarray) -> dict[str, float]:
    # Packages built on numba change it behind everyone's back.
    torch.set_num_threads(1)
    cpu, wall = time.process_time(), time.perf_counter()
    value = call(points)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall, "cpu": cpu, "value": float(value)}


def main() -> None:
    warnings.simplefilter("ignore")
    # Whatever the packages print must not get between the lines of JSON.
    with contextlib.redirect_stdout(sys.stderr):
        calls = make_calls()
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    print(json.dumps({"versions": versions, "calls": list(calls), "subset": SUBSET, "rank": RANK}), flush=True)
    file, points = "", np.empty(0)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["file"] != file:
            file, points = asked["file"], np.load(asked["file"])
        with contextlib.redirect_stdout(sys.stderr):
            try:
                said: dict[str, Any] = answer(calls[asked["call"]], points)
            except Exception as error:
                said = {"wall": math.nan, "cpu": math.nan, "remark": f"raises {type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
