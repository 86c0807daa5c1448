"""The geometry of embedding matrices: rows are points, read in chunks, and nothing is ever n x n.

Notation: W (n, d) holds one row per token of the vocabulary. Raw is W as it is, centred is W without its mean row.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anisoscope.errors import StatesError
from anisoscope.estimates import check_finite
from anisoscope.kernels.gram import Directions, GramSums, Moments, for_products, row_norms
from anisoscope.metrics import Metric, all_metrics
from anisoscope.records import Estimate, Site

WEIGHT_SITES = ("embed.weight", "unembed.weight")
POPULATION = "rows"
RAW, CENTRED = "centred=no", "centred=yes"
# Numbers in a chunk of rows: 16 MB in float64, and a few times that while it is looked at.
CHUNK_NUMBERS = 2**21
# The null is the median over this many random matrices.
DRAWS = 3
# Rows that a figure shows.
SAMPLE = 2000

# Gives the rows of a matrix in chunks, from the beginning whenever it is called.
Stream = Callable[[], Iterator[Float[Tensor, "c d"]]]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One matrix X, raw, centred or random, as the estimators see it; float64."""

    norms: Float[Tensor, " n"]
    mean: Float[Tensor, " d"]
    directions: Directions
    spectrum: Float[Tensor, " d"]
    """Eigenvalues of XᵀX, ascending."""
    axes: Float[Tensor, "d _"]
    """The two leading right singular vectors, each with its largest coordinate positive."""
    log_partitions: Float[Tensor, "2 d"]
    """log Σᵢ exp(c · xᵢ) for every eigenvector c of XᵀX: as the decomposition gave it, and for -c."""

    def measure(self, metric: Metric, *, one_sign: bool = False) -> float:
        """A declared estimator on this matrix; NaN where it has no value."""
        partitions = self.log_partitions[:1] if one_sign else self.log_partitions
        log_isotropy = float(partitions.min() - partitions.max())
        total, spectrum = self.spectrum.sum(), self.spectrum
        match metric.name:
            case "mean_norm":
                return float(self.norms.mean())
            case "mean_offset":
                return float(torch.linalg.vector_norm(self.mean) / self.norms.square().mean().sqrt())
            case "log_partition_isotropy":
                return log_isotropy
            case "partition_isotropy":
                return math.exp(log_isotropy) or math.nan
            case "mean_cosine":
                return float(metric(self.directions))
            case "leading_variance":
                return float(metric(Moments(total=total, leading=spectrum[-1], axis=self.axes[:, 0])))
            case "effective_rank":
                return float(metric(spectrum))
            case _:
                return float(metric(GramSums(total=total, squares=spectrum.square().sum(), dim=len(spectrum))))


# What Geometry can measure. An eigenvector's sign is arbitrary: the published value of one sign is kept beside ours.
PARTITIONS = ("partition_isotropy", "log_partition_isotropy")
ESTIMATORS = (
    "mean_norm",
    "mean_offset",
    "mean_cosine",
    "leading_variance",
    "participation_ratio",
    "isoscore",
    "effective_rank",
    *PARTITIONS,
)


@dataclass(frozen=True, kw_only=True)
class WeightSurvey:
    """What was found out about a matrix."""

    rows: int
    zeros: int
    """Rows that are zero are padding, have no direction, and are left out of everything."""
    geometries: dict[str, Geometry]
    """Raw and centred."""
    references: dict[str, tuple[Geometry, ...]]
    """For each of them, random matrices: rows of the same lengths in random directions."""
    sample: Int[Tensor, " m"]
    """Rows drawn for a figure, ascending."""
    coordinates: dict[str, Float[Tensor, "m _"]]
    """Where they lie along the two leading singular vectors, raw and centred."""

    def attachments(self, prefix: str, log_frequency: Float[np.ndarray, " v"] | None = None) -> dict[str, np.ndarray]:
        """What a figure needs: the rows drawn, their places and all singular values.

        `log_frequency` is that of token ids, where text is known: of each row drawn it is kept, NaN of a row that no
        token has (matrices are often padded).
        """
        arrays = {f"{prefix}.rows": self.sample}
        if log_frequency is not None:
            known = torch.full((int(self.sample.max()) + 1,), math.nan)
            known[: len(log_frequency)] = torch.from_numpy(log_frequency[: len(known)])
            arrays[f"{prefix}.log_frequency"] = known[self.sample.cpu()]
        for variant, geometry in self.geometries.items():
            arrays[f"{prefix}.{variant}.coordinates"] = self.coordinates[variant].float()
            arrays[f"{prefix}.{variant}.singular_values"] = geometry.spectrum.flip(0).sqrt().float()
        return {name: values.cpu().numpy() for name, values in arrays.items()}


def survey_weights(
    matrix: Float[Tensor, "n d"], *, seed: int = 0, draws: int = DRAWS, chunk: int | None = None
) -> WeightSurvey:
    """Survey a matrix on its own device: five passes over its rows, two over those of each random matrix.

    Memory is a few chunks of `chunk` rows and a few d x d matrices, time O(nd²). Everything about the matrix itself is
    float64. Random matrices are float32: rounding moves their numbers by 1e-6, and the draw by far more.

    >>> import torch
    >>> corner = survey_weights(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    >>> corner.geometries["centred=no"].spectrum.tolist()
    [1.0, 4.0]
    """
    n, d = matrix.shape
    matrix, size = matrix.detach(), chunk or max(1, CHUNK_NUMBERS // d)

    def raw() -> Iterator[Tensor]:
        for part in matrix.split(size):
            exact = part.double()
            kept = exact[exact.any(1)]
            if len(kept):
                yield kept

    parts = [(part.sum(0), len(part)) for part in raw()]
    if not parts:
        raise StatesError(f"every one of the {n} rows is zero")
    mean = torch.stack([part for part, _ in parts]).sum(0) / sum(count for _, count in parts)

    def centred() -> Iterator[Tensor]:
        return (part - mean for part in raw())

    geometries = {RAW: _survey(raw, mean), CENTRED: _survey(centred, mean)}
    references = {
        variant: tuple(_survey(_random_rows(geometry.norms, d, size, seed + draw), mean) for draw in range(draws))
        for variant, geometry in geometries.items()
    }
    rows = len(geometries[RAW].norms)
    sample = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:SAMPLE].sort().values.to(matrix.device)
    shown = matrix[sample].double()
    return WeightSurvey(
        rows=rows,
        zeros=n - rows,
        geometries=geometries,
        references=references,
        sample=sample,
        coordinates={RAW: shown @ geometries[RAW].axes, CENTRED: (shown - mean) @ geometries[CENTRED].axes},
    )


def _survey(stream: Stream, like: Float[Tensor, " d"]) -> Geometry:
    d = len(like)
    gram, sums, units, lengths = like.new_zeros(d, d), like.new_zeros(d), like.new_zeros(d), []
    for part in stream():
        points, norms = for_products(part), row_norms(part)
        gram += points.T @ points
        sums += part.sum(0, dtype=torch.float64)
        units += (part.double() / norms[:, None]).sum(0)
        lengths.append(norms)
    spectrum, axes = torch.linalg.eigh(gram)
    partitions = like.new_full((2, d), -math.inf)
    for part in stream():
        points = for_products(part)
        along = points @ axes.to(points.dtype)
        found = torch.stack([torch.logsumexp(along, 0), torch.logsumexp(-along, 0)])
        partitions = torch.logaddexp(partitions, found.double())
    leading = axes[:, -2:].flip(1)
    norms = torch.cat(lengths)
    return Geometry(
        norms=norms,
        mean=sums / len(norms),
        directions=Directions(total=units, count=norms.new_tensor(len(norms))),
        spectrum=spectrum.clamp_min(0),
        axes=leading * leading.gather(0, leading.abs().argmax(0, keepdim=True)).sign(),
        log_partitions=partitions,
    )


def _random_rows(norms: Float[Tensor, " n"], d: int, size: int, seed: int) -> Stream:
    """Rows of these lengths in random directions, the same ones at every call."""

    def stream() -> Iterator[Tensor]:
        generator = torch.Generator(norms.device).manual_seed(seed)
        for lengths in norms.float().split(size):
            drawn = torch.randn(len(lengths), d, generator=generator, device=norms.device)
            yield drawn * (lengths / torch.linalg.vector_norm(drawn, dim=1))[:, None]

    return stream


def find_weights(module: nn.Module) -> dict[str, Float[Tensor, "n d"] | str]:
    """Input and output embeddings of a model by site, or the sentence that says why there is none to measure.

    Of tied matrices only the input's is there.
    """
    one, two = (_weight_of(module, ask) for ask in ("get_input_embeddings", "get_output_embeddings"))
    if isinstance(one, Tensor) and isinstance(two, Tensor) and _memory_of(one) == _memory_of(two):
        return {"embed.weight": one}
    return {"embed.weight": one, "unembed.weight": two}


def _memory_of(matrix: Tensor) -> tuple[int, torch.Size]:
    return matrix.data_ptr(), matrix.shape


def _weight_of(module: nn.Module, ask: str) -> Tensor | str:
    try:
        weight = getattr(getattr(module, ask)(), "weight", None)
    except (AttributeError, NotImplementedError):
        weight = None
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return "the model has no such matrix"
    if not weight.is_floating_point():
        return f"the matrix is quantised ({weight.dtype})"
    return "the matrix is offloaded and cannot be read" if weight.is_meta else weight.detach()


WeightRecord = tuple[Site, Metric, str, Estimate, WeightSurvey | None]


def weight_records(
    module: nn.Module, sites: Collection[str], names: Collection[str], *, seed: int = 0
) -> Iterator[WeightRecord]:
    """Site, metric, variant and estimate of the metrics asked for that a matrix of weights has, for every matrix.

    Raw and centred; partitions also by one sign of each eigenvector, as published. The null is the same number for rows
    of the same lengths in random directions. With each comes the survey it was read from, None where there is nothing
    to survey.
    """
    asked = [all_metrics()[name] for name in ESTIMATORS if name in names]
    found = find_weights(module) if asked and sites else {}
    for name, matrix in found.items():
        # A tied matrix stands under the name of the input.
        if name not in sites and len(found) > 1:
            continue
        survey, notes = None, ["tied: the output matrix is this one"] if len(found) == 1 else []
        if isinstance(matrix, str):
            notes.append(matrix)
        elif not bool(matrix.any()):
            notes.append("every row is zero")
        else:
            check_finite(name, matrix)
            survey = survey_weights(matrix, seed=seed)
            notes += [f"{survey.zeros} zero rows left out"] if survey.zeros else []
        for metric in asked:
            for variant in _variants(metric.name):
                estimate = _estimate(survey, metric, variant, notes)
                yield Site(name=name), metric, variant, estimate, survey


def _variants(name: str) -> tuple[str, ...]:
    if name == "mean_offset":
        # Centring takes it away.
        return (RAW,)
    return (RAW, CENTRED, f"{RAW};signs=one", f"{CENTRED};signs=one") if name in PARTITIONS else (RAW, CENTRED)


def _estimate(survey: WeightSurvey | None, metric: Metric, variant: str, notes: list[str]) -> Estimate:
    if survey is None:
        return Estimate.from_values((), null=math.nan, points=0, dropped=0, dim=0, note="; ".join(notes))
    which, _, signs = variant.partition(";")
    geometry = survey.geometries[which]
    value = geometry.measure(metric, one_sign=bool(signs))
    if metric.closed_form is not None:
        null = metric.closed_form(survey.rows, len(geometry.spectrum))
    elif metric.name == "mean_norm":
        null = math.nan
    else:
        drawn = [reference.measure(metric, one_sign=bool(signs)) for reference in survey.references[which]]
        null = statistics.median(drawn) if drawn else math.nan
    return Estimate.from_values(
        (value,),
        null=null,
        points=survey.rows,
        dropped=survey.zeros,
        dim=len(geometry.spectrum),
        note="; ".join([*notes, metric.undefined] if math.isnan(value) else notes) or None,
    )
