"""The geometry of weight matrices: by hand, by brute force, in chunks, in bounded memory, and on real modules."""

import doctest
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from shell import APART
from torch import Tensor, nn

from anisoscope import weights
from anisoscope.corpora import load_corpus
from anisoscope.errors import StatesError
from anisoscope.lab import build_untrained
from anisoscope.metrics import all_metrics
from anisoscope.weights import (
    CENTRED,
    ESTIMATORS,
    PARTITIONS,
    RAW,
    WEIGHT_SITES,
    Geometry,
    find_weights,
    survey_weights,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ordinary_matrix() -> Tensor:
    return normal(300, 12) * torch.linspace(0.2, 1, 12) + torch.linspace(-0.3, 0.5, 12)


def value_of(name: str, geometry: Geometry, *, one_sign: bool = False) -> float:
    return geometry.measure(all_metrics()[name], one_sign=one_sign)


def by_brute_force(matrix: Tensor) -> dict[str, float]:
    """Every estimator from all pairs and a full decomposition, in float64."""
    exact = matrix.double()
    n, d = exact.shape
    units = exact / exact.norm(dim=1, keepdim=True)
    cosines = units @ units.T
    squares = torch.linalg.svdvals(exact).square()
    shares = squares / squares.sum()
    axes = torch.linalg.svd(exact).Vh
    logs = [float(torch.logsumexp(sign * exact @ axis, 0)) for axis in axes for sign in (1, -1)]
    return {
        "mean_norm": float(exact.norm(dim=1).mean()),
        "mean_offset": float(exact.mean(0).norm() / exact.square().sum(1).mean().sqrt()),
        "mean_cosine": float((cosines.sum() - n) / (n * (n - 1))),
        "leading_variance": float(shares[0]),
        "participation_ratio": float(1 / shares.square().sum()),
        "isoscore": float((1 / shares.square().sum() - 1) / (d - 1)),
        "effective_rank": float(torch.exp(-(shares * shares.log()).sum())),
        "partition_isotropy": math.exp(min(logs) - max(logs)),
        "log_partition_isotropy": min(logs) - max(logs),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 7, 299, 300])
def test_every_estimator_is_the_one_of_all_pairs_and_full_decompositions(dtype: torch.dtype, chunk: int | None) -> None:
    matrix = ordinary_matrix().to(dtype)
    survey = survey_weights(matrix, draws=0, chunk=chunk)
    for variant, exact in ((RAW, matrix.double()), (CENTRED, matrix.double() - matrix.double().mean(0))):
        for name, expected in by_brute_force(exact).items():
            found = value_of(name, survey.geometries[variant])
            assert found == pytest.approx(expected, rel=1e-10, abs=1e-12), (variant, name)
    assert set(by_brute_force(matrix)) == set(ESTIMATORS)


def test_raw_estimators_are_those_of_the_same_points_where_these_are_not_centred_either() -> None:
    matrix = ordinary_matrix()
    survey = survey_weights(matrix, draws=0)
    for name in ("mean_norm", "mean_offset", *PARTITIONS):
        assert value_of(name, survey.geometries[RAW]) == pytest.approx(float(all_metrics()[name](matrix)), rel=1e-12)


def test_partition_isotropy_by_hand() -> None:
    # WᵀW is diagonal, so the axes are the coordinates. Z: e² + 1, e⁻² + 1 and e + 1, e⁻¹ + 1. One sign: see below.
    geometry = survey_weights(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), draws=0).geometries[RAW]
    expected = (1 + math.exp(-2)) / (1 + math.exp(2))
    assert value_of("partition_isotropy", geometry) == pytest.approx(expected, rel=1e-12)
    assert value_of("log_partition_isotropy", geometry) == pytest.approx(math.log(expected), rel=1e-12)
    one_sign = [(1 + math.exp(a)) / (1 + math.exp(b)) for a in (1, -1) for b in (2, -2)]
    ratios = [min(ratio, 1 / ratio) for ratio in one_sign]
    found = value_of("partition_isotropy", geometry, one_sign=True)
    assert any(found == pytest.approx(ratio, rel=1e-12) for ratio in ratios)
    assert found >= expected


def test_both_signs_are_never_above_one_sign() -> None:
    for seed in range(5):
        geometry = survey_weights(normal(200, 8, seed=seed) + 0.2, draws=0).geometries[RAW]
        for name in PARTITIONS:
            assert value_of(name, geometry) <= value_of(name, geometry, one_sign=True)


def test_long_rows_do_not_overflow_and_the_logarithm_stays() -> None:
    matrix = normal(200, 8) * 1e4
    geometry = survey_weights(matrix, draws=0).geometries[RAW]
    assert math.isnan(value_of("partition_isotropy", geometry))
    found = value_of("log_partition_isotropy", geometry)
    assert found == pytest.approx(by_brute_force(matrix)["log_partition_isotropy"], rel=1e-12)
    assert found < -1e3


def test_centring_removes_what_is_a_shift() -> None:
    survey = survey_weights(normal(4000, 16) * 0.1 + 2, draws=1)
    for name, low, high in (("mean_cosine", 0.9, 1.0), ("leading_variance", 0.9, 1.0), ("mean_offset", 0.9, 1.0)):
        assert low < value_of(name, survey.geometries[RAW]) <= high
    assert value_of("partition_isotropy", survey.geometries[RAW]) < 1e-3
    assert value_of("partition_isotropy", survey.geometries[CENTRED]) > 0.95
    assert abs(value_of("mean_cosine", survey.geometries[CENTRED])) < 1e-3
    assert value_of("participation_ratio", survey.geometries[CENTRED]) == pytest.approx(16, rel=0.01)


def test_the_reference_has_the_same_lengths_and_no_preferred_direction() -> None:
    matrix = ordinary_matrix() * (1 + normal(300, 1, seed=3).abs())
    survey = survey_weights(matrix, draws=3, chunk=64)
    for variant in (RAW, CENTRED):
        for reference in survey.references[variant]:
            assert torch.allclose(reference.norms, survey.geometries[variant].norms, rtol=1e-5)
            assert abs(value_of("mean_cosine", reference)) < 0.01
    ratios = [value_of("participation_ratio", reference) for reference in survey.references[RAW]]
    assert len(set(ratios)) == 3
    # A matrix that is random itself is near its own reference; one that is drawn out is not.
    isotropic = survey_weights(normal(3000, 12), draws=3)
    expected = value_of("log_partition_isotropy", isotropic.references[RAW][0])
    assert value_of("log_partition_isotropy", isotropic.geometries[RAW]) == pytest.approx(expected, rel=0.5)
    assert value_of("log_partition_isotropy", survey.geometries[RAW]) < 2 * expected


def test_coordinates_are_those_of_the_singular_value_decomposition() -> None:
    matrix = ordinary_matrix()
    survey = survey_weights(matrix, draws=0)
    assert survey.sample.tolist() == list(range(300))
    for variant, exact in ((RAW, matrix), (CENTRED, matrix - matrix.mean(0))):
        u, s, _ = torch.linalg.svd(exact, full_matrices=False)
        assert torch.allclose(survey.coordinates[variant].abs(), (u[:, :2] * s[:2]).abs(), atol=1e-10)
        assert torch.allclose(survey.geometries[variant].spectrum.flip(0).sqrt(), s, atol=1e-10)
    arrays = survey.attachments("weights/embed.weight")
    assert sorted(arrays) == sorted(
        f"weights/embed.weight.{part}"
        for part in (
            "rows",
            *(f"{v}.{what}" for v in (RAW, CENTRED) for what in ("coordinates", "singular_values")),
        )
    )
    assert all(isinstance(values, np.ndarray) for values in arrays.values())


def test_rows_have_the_log_frequency_of_their_token_and_rows_of_none_have_no_number() -> None:
    survey = survey_weights(normal(3000, 3), draws=0)
    logs = -np.arange(2500.0)
    kept = survey.attachments("weights/x", logs)["weights/x.log_frequency"]
    rows = survey.sample.numpy()
    assert kept.dtype == np.float32
    assert kept[rows < 2500].tolist() == [-float(row) for row in rows if row < 2500]
    assert np.isnan(kept[rows >= 2500]).all()
    assert (rows >= 2500).any()
    # A tokenizer may know more tokens than the matrix has rows.
    more = survey.attachments("weights/x", -np.arange(9000.0))["weights/x.log_frequency"]
    assert more.tolist() == [-float(row) for row in rows]


def test_a_figure_gets_two_thousand_rows_at_most_always_the_same() -> None:
    one, two, other = (survey_weights(normal(3000, 3), draws=0, seed=seed) for seed in (0, 0, 1))
    assert len(one.sample) == len(set(one.sample.tolist())) == 2000
    assert torch.equal(one.sample, two.sample)
    assert not torch.equal(one.sample, other.sample)


def test_the_same_matrix_and_seed_give_the_same_numbers() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one, two = (survey_weights(ordinary_matrix().float(), seed=5) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    for variant in (RAW, CENTRED):
        for first, second in zip(
            (one.geometries[variant], *one.references[variant]),
            (two.geometries[variant], *two.references[variant]),
            strict=True,
        ):
            assert torch.equal(first.log_partitions, second.log_partitions)
            assert torch.equal(first.spectrum, second.spectrum)


def test_zero_rows_are_left_out_and_counted() -> None:
    matrix = ordinary_matrix()
    padded = torch.cat([torch.zeros(40, 12), matrix[:100], torch.zeros(1, 12), matrix[100:]]).double()
    one, two = survey_weights(matrix, draws=0), survey_weights(padded, draws=0, chunk=16)
    assert (two.rows, two.zeros) == (300, 41)
    for name in ESTIMATORS:
        for variant in (RAW, CENTRED):
            found = value_of(name, two.geometries[variant])
            assert found == pytest.approx(value_of(name, one.geometries[variant]), rel=1e-9, abs=1e-12)
    with pytest.raises(StatesError, match="every one of the 5 rows is zero"):
        survey_weights(torch.zeros(5, 3))


def test_a_large_vocabulary_is_surveyed_in_bounded_memory() -> None:
    # n x n would be 500 GB, a float64 copy of the matrix 128 MB; chunks are 16 MB.
    code = (
        "import resource, torch\n"
        "torch.set_num_threads(1)\n"
        "from anisoscope.weights import WEIGHT_SITES, survey_weights\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "matrix = torch.randn(250_000, 64, generator=torch.Generator().manual_seed(0)) + 0.1\n"
        "survey_weights(matrix[:1000], draws=1)\n"
        "before = peak()\n"
        "survey = survey_weights(matrix, draws=1)\n"
        "assert survey.rows == 250_000\n"
        "print(peak() - before)"
    )
    # Freed arrays go back at once: what counts is what the survey holds, not the holes that the heap keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [*APART, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) < 128


# On models


class Holder(nn.Module):
    def __init__(self, embed: nn.Module | None, unembed: nn.Module | None) -> None:
        super().__init__()
        self.embed, self.unembed = embed, unembed

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed

    def get_output_embeddings(self) -> nn.Module | None:
        return self.unembed


def matrix_module(matrix: Tensor) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(matrix)
    return module


def records_of(module: nn.Module, names: tuple[str, ...] = ESTIMATORS) -> dict[tuple[str, str, str], object]:
    return {
        (site.name, metric.name, variant): estimate
        for site, metric, variant, estimate, _ in weights.weight_records(module, WEIGHT_SITES, names)
    }


def test_records_of_two_matrices_raw_and_centred_with_their_nulls() -> None:
    one, two = ordinary_matrix().float(), normal(300, 12, seed=7).float()
    found = records_of(Holder(matrix_module(one), matrix_module(two)))
    assert len(found) == 2 * (1 + 2 * 6 + 4 * 2)
    assert {site for site, _, _ in found} == {"embed.weight", "unembed.weight"}
    for (site, name, variant), answer in found.items():
        assert answer.note is None
        assert (answer.points, answer.dropped, answer.dim, answer.batches) == (300, 0, 12, 1)
        matrix = (one if site == "embed.weight" else two).double()
        exact = matrix - matrix.mean(0) if variant.startswith(CENTRED) else matrix
        if "signs" not in variant:
            assert answer.value == pytest.approx(by_brute_force(exact)[name], rel=1e-9, abs=1e-12)
        assert math.isnan(answer.null) == (name == "mean_norm")
    # Random rows are near their null, rows with a common part are not.
    near, far = (found[site, "log_partition_isotropy", RAW] for site in ("unembed.weight", "embed.weight"))
    assert near.value == pytest.approx(near.null, rel=0.5)
    assert far.value < 2 * far.null
    assert found["embed.weight", "mean_cosine", RAW].null == 0


def test_only_what_was_asked_for_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = records_of(Holder(matrix_module(ordinary_matrix()), None), ("mean_cosine", "twonn"))
    assert {name for _, name, _ in found} == {"mean_cosine"}
    monkeypatch.setattr(weights, "survey_weights", None)
    assert records_of(Holder(matrix_module(ordinary_matrix()), None), ("twonn", "loss")) == {}


def test_tied_matrices_are_measured_once_and_the_note_says_so() -> None:
    shared = matrix_module(ordinary_matrix())
    found = records_of(Holder(shared, shared), ("mean_cosine",))
    assert {site for site, _, _ in found} == {"embed.weight"}
    assert {answer.note for answer in found.values()} == {"tied: the output matrix is this one"}
    equal = records_of(Holder(shared, matrix_module(ordinary_matrix())), ("mean_cosine",))
    assert {site for site, _, _ in equal} == {"embed.weight", "unembed.weight"}, "equal numbers are not one matrix"


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (None, "the model has no such matrix"),
        (nn.Flatten(), "the model has no such matrix"),
        (matrix_module(torch.zeros(5, 3)), "every row is zero"),
        (matrix_module(torch.zeros(5, 3, device="meta")), "the matrix is offloaded and cannot be read"),
        (matrix_module(torch.zeros(5)), "the model has no such matrix"),
    ],
)
def test_what_cannot_be_measured_is_nan_with_a_note(module: nn.Module | None, note: str) -> None:
    found = records_of(Holder(matrix_module(ordinary_matrix()), module), ("mean_cosine",))
    for (site, _, _), answer in found.items():
        assert math.isnan(answer.value) == (site == "unembed.weight")
        assert answer.note == (note if site == "unembed.weight" else None)


def test_a_module_without_embeddings_or_with_whole_numbers_is_nan_with_a_note() -> None:
    assert set(find_weights(nn.Linear(2, 2)).values()) == {"the model has no such matrix"}
    quantised = nn.Module()
    quantised.weight = torch.ones(5, 3, dtype=torch.int8)  # pyright: ignore
    assert find_weights(Holder(quantised, None))["embed.weight"] == "the matrix is quantised (torch.int8)"


def test_matrices_that_are_not_finite_are_refused() -> None:
    broken = ordinary_matrix()
    broken[3, 2] = math.nan
    with pytest.raises(StatesError, match=r"embed.weight: 1 of 3,600 values are NaN"):
        records_of(Holder(matrix_module(broken), None))


def test_a_value_that_underflows_has_a_note_and_its_logarithm() -> None:
    found = records_of(Holder(matrix_module(ordinary_matrix() * 1e4), None), PARTITIONS)
    ratio, logarithm = (found["embed.weight", name, RAW] for name in PARTITIONS)
    assert math.isnan(ratio.value)
    assert "too long for a partition function" in ratio.note
    assert logarithm.value < -1000
    assert logarithm.note is None


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_real_modules_have_their_matrices_found(kind: str, corpus_file: object) -> None:
    model = build_untrained(kind, load_corpus(str(corpus_file)))
    found = find_weights(model.module)
    embed = found["embed.weight"]
    assert isinstance(embed, Tensor)
    assert embed.shape[1] == model.module.config.hidden_size
    assert ("unembed.weight" not in found) == model.module.config.tie_word_embeddings


def test_the_example_is_true() -> None:
    assert doctest.testmod(weights).attempted > 0
    assert doctest.testmod(weights).failed == 0
