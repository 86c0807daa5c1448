"""The other packages' side of scripts/parity.py: runs in their own environment and knows nothing of anisoscope.

    .venv-peers/bin/python scripts/parity_peers.py FOLDER

FOLDER holds manifest.json and the .npy files it names. One JSON object goes to stdout: versions, what was found on
import, and a value, an error or a warning of each function on each cloud. A crash is a result like any other.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import IsoScore.IsoScore as isoscore
import numpy as np
import skdim
import torch
from peers import load_microscope

PACKAGES = ("llm-microscope", "scikit-dimension", "IsoScore", "dadapy", "numpy", "scikit-learn", "torch")
GRIDE_SCALES = (2, 8, 64)
# Noise of the calling convention, not about the data.
IGNORED_WARNINGS = ("To copy construct from a tensor",)


def load_dadapy() -> Any:
    try:
        return importlib.import_module("dadapy")
    except ImportError:
        return None


def attempt(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """The value, or the exception, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = function(*arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
    messages = [str(item.message).strip().splitlines()[0] for item in caught]
    messages = [message for message in messages if not message.startswith(IGNORED_WARNINGS)]
    return {"value": None if value is None else float(value), "warnings": sorted(set(messages))}


def shrunk_isoscore(points: torch.Tensor, target: str) -> torch.Tensor:
    """IsoScore* with ζ = .25, towards I or towards (tr C / d) I."""
    identity = torch.eye(points.shape[1], dtype=points.dtype)
    scale = torch.cov(points.T).diagonal().mean() if target == "trace" else 1.0
    return isoscore.IsoScore_star(points, scale * identity, 0.25)


def functions_of_clouds(microscope: Any, dadapy: Any) -> dict[str, Callable[[Any], Any]]:
    """By name; llm-microscope and IsoScore are given tensors, the others arrays."""
    calls = {
        "microscope.calculate_anisotropy_torch": microscope.calculate_anisotropy_torch,
        "microscope.intrinsic_dimension": lambda points: microscope.intrinsic_dimension(points, "cpu"),
        "isoscore.IsoScore": isoscore.IsoScore,
        "isoscore.IsoScore_star.identity": lambda points: shrunk_isoscore(points, "identity"),
        "isoscore.IsoScore_star.trace": lambda points: shrunk_isoscore(points, "trace"),
        "skdim.TwoNN": lambda points: skdim.id.TwoNN().fit(as_array(points)).dimension_,
        "skdim.TwoNN.mle": lambda points: skdim.id.TwoNN(method="mle").fit(as_array(points)).dimension_,
        "skdim.MLE": lambda points: skdim.id.MLE().fit(as_array(points), n_neighbors=20, comb="mle").dimension_,
        "skdim.MLE.mean": lambda points: skdim.id.MLE().fit(as_array(points), n_neighbors=20, comb="mean").dimension_,
    }
    for scale in GRIDE_SCALES:
        calls[f"skdim.GRIDE.{scale}"] = lambda points, near=scale // 2: (
            skdim.id.GRIDE(n1=near).fit(as_array(points)).dimension_
        )
    if dadapy is not None:
        calls["dadapy.2NN"] = lambda points: dadapy.Data(as_array(points), n_jobs=1).compute_id_2NN()[0]
        for scale in GRIDE_SCALES:
            calls[f"dadapy.gride.{scale}"] = lambda points, scale=scale: dadapy.Data(
                as_array(points), n_jobs=1
            ).return_id_scaling_gride(range_max=scale)[0][-1]
    return calls


def as_array(points: torch.Tensor) -> Any:
    """A numpy array; a tensor where numpy has no such dtype."""
    return points if points.dtype == torch.bfloat16 else points.numpy()


def read(folder: Path, entry: dict[str, str]) -> torch.Tensor:
    points = torch.from_numpy(np.load(folder / entry["file"]))
    return points.to(getattr(torch, entry["dtype"]))


def main() -> None:
    folder = Path(sys.argv[1])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    # Whatever the packages print must not get between the reader and the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        microscope, dadapy = load_microscope(), load_dadapy()
        clouds = {}
        for name, entry in manifest["clouds"].items():
            points = read(folder, entry)
            calls = functions_of_clouds(microscope, dadapy)
            clouds[name] = {call: attempt(function, points) for call, function in calls.items()}
        pairs = {}
        for name, entry in manifest["pairs"].items():
            source, target = (read(folder, entry[side]) for side in ("source", "target"))
            pairs[name] = {
                "microscope.procrustes_similarity": attempt(microscope.procrustes_similarity, source, target),
                "microscope.procrustes_similarity_centered": attempt(
                    microscope.procrustes_similarity_centered, source, target
                ),
            }
        findings = {
            "import llm_microscope": attempt(lambda: importlib.import_module("llm_microscope") and None),
            "fast": "fast" in inspect.signature(microscope.calculate_anisotropy_torch).parameters,
        }
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    print(json.dumps({"versions": versions, "findings": findings, "clouds": clouds, "pairs": pairs}))


if __name__ == "__main__":
    main()
