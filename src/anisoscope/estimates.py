"""From clouds to Estimates: a metric on each batch, then mean, spread and null; the side door for your own matrix."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.cloud import Cloud, Tokens
from anisoscope.errors import SpecError, StatesError
from anisoscope.metrics import Metric, find_metrics
from anisoscope.nulls import null_of
from anisoscope.records import Estimate
from anisoscope.validation import check_settings


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One metric on one cloud."""

    value: Tensor | float
    points: int
    dropped: int
    note: str | None
    null_dim: int | None = None
    """The dimensions its null is about, where they are not those of the points: the previous site's."""
    control: Tensor | float = math.nan
    """Its null, where that is measured on the same points."""


def evaluate(cloud: Cloud, metric: Metric, settings: Mapping[str, Any]) -> Evaluated:
    """A metric on the view of the cloud it needs; NaN with a note where the data forbid a number."""
    points, dropped = len(cloud), 0
    if metric.needs == "neighbors":
        points, dropped = len(cloud.unique.index), cloud.unique.dropped
    elif metric.needs == "losses":
        points = len(cloud.losses)
    dim = cloud.previous.shape[1] if metric.needs == "pair" and cloud.previous is not None else cloud.dim
    value, control = torch.tensor(math.nan), math.nan
    if points >= metric.min_points(dim, settings.get("neighbors", 0)):
        view = getattr(cloud, metric.needs)
        value = apply(metric, view, settings)
        control = math.nan if metric.control is None else metric.control(view)
    return replace(judge(metric, value, points, dropped, dim, settings), control=control)


def apply(metric: Metric, view: Any, settings: Mapping[str, Any]) -> Tensor:
    """The metric with the settings it reads."""
    return metric(view, **{name: settings[name] for name in metric.settings})


def judge(
    metric: Metric, value: Tensor | float, points: int, dropped: int, dim: int, settings: Mapping[str, Any]
) -> Evaluated:
    """A value with the reason why it is none, where it is none."""
    note = _missing(metric, value, points, dropped, dim, settings)
    if note and not isinstance(value, Tensor):
        value = math.nan
    return Evaluated(value=value, points=points, dropped=dropped, note=note, null_dim=dim)


def _missing(
    metric: Metric, value: Tensor | float, points: int, dropped: int, dim: int, settings: Mapping[str, Any]
) -> str | None:
    """Why there is no value, where there is none."""
    too_few = _too_few(metric, points, dropped, dim, settings)
    return too_few or (metric.undefined if math.isnan(float(value)) else None)


def _too_few(metric: Metric, points: int, dropped: int, dim: int, settings: Mapping[str, Any]) -> str | None:
    needed = metric.min_points(dim, settings.get("neighbors", 0))
    return f"{points} {'distinct ' if dropped else ''}points, and it needs {needed}" if points < needed else None


def summarize(results: Sequence[Evaluated], metric: Metric, dim: int, settings: Mapping[str, Any]) -> Estimate:
    """Mean, spread and null over batches."""
    values = tuple(float(result.value) for result in results)
    points = sum(result.points for result in results)
    null, missing_null = null_of(metric, points / len(results), results[0].null_dim or dim, settings)
    if metric.null == "control":
        null = torch.tensor([float(result.control) for result in results], dtype=torch.float64).nanmean().item()
    undefined = sum(math.isnan(value) for value in values)
    notes = list(dict.fromkeys(result.note for result in results if result.note))
    if 0 < undefined < len(values):
        notes.append(f"no value in {undefined} of {len(values)} batches")
    return Estimate.from_values(
        values,
        null=null,
        points=points,
        dropped=sum(result.dropped for result in results),
        dim=dim,
        note="; ".join([*notes, *([missing_null] if missing_null else [])]) or None,
    )


def answer_once(metric: Metric, value: Tensor | float, points: int, dim: int, note: str | None = None) -> Estimate:
    """The Estimate of a number that comes from all points together, with what else is to be noted.

    Of a metric without settings.
    """
    missing, null, missing_null = _apart_from_value(metric, points, dim)
    number = math.nan if missing else float(value)
    if missing is None and math.isnan(number):
        missing = metric.undefined
    return Estimate(
        value=number,
        spread=math.nan,
        values=(number,),
        null=null,
        batches=1,
        points=points,
        dropped=0,
        dim=dim,
        note="; ".join(filter(None, (missing, missing_null, note))) or None,
    )


# Thousands of numbers are answered for a few of these.
@lru_cache(maxsize=1024)
def _apart_from_value(metric: Metric, points: int, dim: int) -> tuple[str | None, float, str | None]:
    """Why there can be no value of so many points, the null, and why there is none."""
    return _too_few(metric, points, 0, dim, {}), *null_of(metric, points, dim, {})


def estimate(
    points: Any,
    metrics: str | Iterable[str] = ("leading_variance", "twonn"),
    *,
    batch_points: int = 4096,
    discard_fraction: float = 0.1,
    gride_scales: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
    neighbors: int = 20,
    isoscore_zeta: float = 0.25,
    grads: Any = None,
    token_ids: Any = None,
    frequencies: Any = None,
    sentences: Any = None,
    windows: Any = None,
    documents: Any = None,
    rank: int = 16,
    proxy: str = "pca",
    gradient: str = "virtual",
    seed: int = 0,
) -> dict[str, Estimate]:
    """Measure a matrix of your own: rows are points, numpy or torch, any float dtype, any device.

    The points are dealt in seeded random order into batches of at least `batch_points`; with fewer there is one batch
    and no spread. `token_ids` and `sentences` say, one whole number per point, which token it is and where it comes
    from, for metrics that compare occurrences.
    A family stands for those of its metrics that need no model, nor labels that were not given for a trend.

    For metrics of the families alignment, pinning and curvature: `grads` are the gradients of a loss at the points,
    `windows` says which window of text each point comes from, `documents` which document (half of them are fitted on,
    half tested, and of each one window is used where windows are permuted; by default each window is a document),
    `frequencies` how frequent its token is, `gradient` whether the coupled one (`virtual`) or the rows themselves
    (`activation`) are tested. They are not split into batches.

    >>> import numpy as np, anisoscope as an
    >>> line = np.arange(12.0).reshape(-1, 1) * np.array([[1.0, 2.0, 2.0]])
    >>> round(an.estimate(line, ["leading_variance"])["leading_variance"].value, 6)
    1.0
    """
    settings = {
        "discard_fraction": discard_fraction,
        "gride_scales": tuple(gride_scales),
        "neighbors": neighbors,
        "isoscore_zeta": isoscore_zeta,
    }
    check_settings({**settings, "batch_points": batch_points, "rank": rank, "proxy": proxy, "seed": seed})
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    found = _of_a_matrix(names, gride_scales)
    if token_ids is None or frequencies is None:
        # A family stands for what can be told of what was given.
        found = [metric for metric in found if metric.needs != "trend" or metric.name in names]
    given = {"token_ids": token_ids, "sentences": sentences}
    handed = [metric for metric in found if metric.needs in _HANDED]
    found = [metric for metric in found if metric.needs not in _HANDED]
    for metric in found:
        label = _LABELS.get(metric.needs)
        if label is not None and given[label] is None:
            raise SpecError(f"{metric.name} compares occurrences; give {label}=, one whole number per point")
    matrix = _as_matrix(points)
    check_finite("points", matrix)
    ids, places = (_as_labels(name, labels, matrix) for name, labels in given.items())
    # Checked also where no metric reads them: rows of another shape are a mistake.
    beside = {
        "grads": None if grads is None else _as_rows("grads", grads, matrix),
        "frequencies": None if frequencies is None else _as_numbers("frequencies", frequencies, matrix),
        "windows": None if windows is None else _as_labels("windows", windows, matrix),
        "documents": None if documents is None else _as_labels("documents", documents, matrix),
    }
    apart: dict[str, Estimate] = {}
    if handed:
        # It looks at walks of a model too, which look at this room.
        from anisoscope.handed import estimate_handed

        apart = estimate_handed(
            handed,
            matrix,
            token_ids=None if token_ids is None else ids,
            **beside,
            rank=rank,
            proxy=proxy,
            gradient=gradient,
            seed=seed,
        )
    none = torch.zeros_like(ids)
    tokens = Tokens(ids=ids, positions=none, documents=none, special=none.bool(), sentences=places)
    count = max(1, len(matrix) // batch_points)
    batches = [index.to(matrix.device) for index in deal(len(matrix), count, seed)]
    wanted = neighbors_wanted(found, settings)
    clouds = [Cloud(points=matrix[index], tokens=tokens.take(index), neighbor_count=wanted) for index in batches]
    return apart | {
        metric.name: summarize(
            [evaluate(cloud, metric, settings) for cloud in clouds], metric, matrix.shape[1], settings
        )
        for metric in found
    }


def _of_a_matrix(names: Iterable[str], gride_scales: tuple[int, ...]) -> list[Metric]:
    """The metrics that names stand for; of a family those that need no model."""
    found: dict[str, Metric] = {}
    for name in names:
        every = find_metrics([name], gride_scales=gride_scales)
        able = [metric for metric in every if metric.needs not in _OF_MODELS]
        if not any(name in (metric.name, metric.family) for metric in able):
            raise SpecError(f"{every[0].name} needs a model, not a matrix of points; use measure()")
        found |= {metric.name: metric for metric in able}
    # Says so where none was named.
    return find_metrics(found)


# Views of more than a matrix of points.
_OF_MODELS = ("losses", "pair", "norm", "heads", "attention", "updates", "movement")
_OF_MODELS += ("turn", "concepts")
# Views of a matrix together with gradients, windows or frequencies.
_HANDED = ("enrichment", "removal", "trend", "pinned", "curved")
# Which views need to be told what the points are.
_LABELS = {"types": "token_ids", "explained": "token_ids", "passages": "sentences"}


def _as_labels(name: str, labels: Any, points: Float[Tensor, "n d"]) -> Int[Tensor, " n"]:
    """One whole number per point; zeros where none were given, which no metric then reads."""
    if labels is None:
        return torch.zeros(len(points), dtype=torch.int64, device=points.device)
    found = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if found.shape != points.shape[:1] or found.dtype.kind not in "iu":
        raise SpecError(f"{name} must be {len(points)} whole numbers; came {found.shape}, {found.dtype}")
    return torch.from_numpy(found.astype(np.int64)).to(points.device)


def _as_rows(name: str, rows: Any, points: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    matrix = _as_matrix(rows, name).to(points.device)
    if matrix.shape != points.shape:
        raise SpecError(f"{name} must be of the shape of the points, {tuple(points.shape)}; came {tuple(matrix.shape)}")
    check_finite(name, matrix)
    return matrix


def _as_numbers(name: str, numbers: Any, points: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    found = torch.as_tensor(np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else numbers, dtype=float))
    if found.shape != points.shape[:1] or not bool((found > 0).all()):
        raise SpecError(f"{name} must be {len(points)} numbers above 0, one per point; came shape {tuple(found.shape)}")
    return found.to(points.device)


def _as_matrix(points: Any, name: str = "points") -> Float[Tensor, "n d"]:
    wanted = f"{name} must be a matrix of floats, one point per row"
    if hasattr(points, "to_numpy"):
        # pandas and polars: torch would look up rows as if they were columns.
        points = points.to_numpy()
    if isinstance(points, np.ndarray):
        # torch takes neither reversed rows nor foreign byte order, and warns of memory that is read-only.
        if points.dtype.kind not in "biufc":
            raise SpecError(f"{wanted}; came values that are not numbers ({points.dtype}): select the numeric columns")
        points = np.require(points, points.dtype.newbyteorder("="), ["C", "W"])
    try:
        matrix = torch.as_tensor(points)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(f"{wanted}; came {type(points).__name__}: {error}") from error
    if matrix.ndim != 2 or not matrix.is_floating_point() or 0 in matrix.shape:
        raise SpecError(f"{wanted}; came shape {tuple(matrix.shape)}, {matrix.dtype}")
    return matrix.detach()


def check_finite(where: str, states: Float[Tensor, "n d"]) -> None:
    """Refuse states that are NaN or infinite, and say how many."""
    # One fast pass tells whether there is anything to count.
    if not bool(torch.stack(torch.aminmax(states)).isfinite().all()):
        wrong = states.numel() - int(states.isfinite().sum())
        raise StatesError(
            f"{where}: {wrong:,} of {states.numel():,} values are NaN or infinite; "
            "nothing was measured there (a model in float16 may need --dtype float32 or bfloat16)"
        )


def neighbors_wanted(metrics: Iterable[Metric], settings: Mapping[str, Any]) -> int:
    """How many neighbours the most demanding of the metrics reads."""
    counts = (item.neighbors for item in metrics)
    return max((settings["neighbors"] if count == "neighbors" else int(count) for count in counts), default=0)


def deal(count: int, hands: int, seed: int) -> list[Tensor]:
    """0 ... count - 1 in seeded random order, dealt into hands of equal size (give or take one)."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(hands))
