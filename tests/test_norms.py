"""The final norm as numbers, its stages in the walk, and what changing it would do."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

import anisoscope as an
from anisoscope.capture import capture
from anisoscope.corpora import load_corpus
from anisoscope.counterfactuals import measure_counterfactuals, norm_of, norm_replaced, variants_of
from anisoscope.errors import ModelError, SpecError
from anisoscope.estimates import deal, estimate
from anisoscope.gauge import seed_for
from anisoscope.metrics import all_metrics
from anisoscope.models import Model, adopt_model, load_model, select_sites, sites_of
from anisoscope.norms import NO_FINAL_NORM, Norm, read_norm, read_norms
from anisoscope.printing import print_counterfactuals, print_unit
from anisoscope.stages import NORM_METRICS, STAGES, stage_changes
from anisoscope.text import draw_windows, plan_pools

D = 48


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    for number, weight in enumerate(module.parameters()):
        weight.data.copy_(1 + 0.3 * draw(*weight.shape, seed=number))
    return module


# What the module does, and its gain and bias as they stand in its parameters.
NORMS: dict[str, tuple[Callable[[int], nn.Module], Callable[[Any], Tensor | None], Callable[[Any], Tensor | None]]] = {
    "LayerNorm": (nn.LayerNorm, lambda norm: norm.weight, lambda norm: norm.bias),
    "LayerNorm without bias": (lambda d: nn.LayerNorm(d, bias=False), lambda norm: norm.weight, lambda norm: None),
    "LayerNorm without parameters": (
        lambda d: nn.LayerNorm(d, elementwise_affine=False),
        lambda norm: None,
        lambda norm: None,
    ),
    "OLMo": (OlmoLayerNorm, lambda norm: None, lambda norm: None),
    "Nemotron": (NemotronLayerNorm1P, lambda norm: 1 + norm.weight, lambda norm: norm.bias),
    "RMSNorm": (nn.RMSNorm, lambda norm: norm.weight, lambda norm: None),
    "Llama": (LlamaRMSNorm, lambda norm: norm.weight, lambda norm: None),
    "Gemma": (GemmaRMSNorm, lambda norm: 1 + norm.weight, lambda norm: None),
}


@pytest.mark.parametrize("width", [D, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_gain_and_bias_are_those_of_the_weights_whatever_the_norm_and_the_dtype(
    name: str, dtype: torch.dtype, width: int
) -> None:
    make, gain_of, bias_of = NORMS[name]
    module = randomised(make(width)).to(dtype)
    kept = copy.deepcopy(module.state_dict())
    norm = read_norm(module, width)
    gain, bias = gain_of(module.double()), bias_of(module)
    assert (norm.has_gain, norm.has_bias) == (gain is not None, bias is not None)
    # Norms of transformers compute in float32 whatever they are given; those of torch in what they are given.
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(norm.gain, torch.ones(width).double() if gain is None else gain.detach(), **near)
    torch.testing.assert_close(norm.bias, torch.zeros(width).double() if bias is None else bias.detach(), **near)
    assert norm.centres == (name not in ("RMSNorm", "Llama", "Gemma"))
    assert all(torch.equal(module.state_dict()[key].to(dtype), value) for key, value in kept.items())


@pytest.mark.parametrize("name", NORMS)
def test_the_map_is_the_modules_in_float64(name: str) -> None:
    module = randomised(NORMS[name][0](D)).double()
    norm, states = read_norm(module, D), 0.01 * (draw(3, 7, D, seed=5) + 0.5)
    with torch.no_grad():
        expected = module(states)
    torch.testing.assert_close(norm(states), expected.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.gained(states) + norm.bias, norm(states))


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-6, 1e-12])
def test_the_epsilon_is_found(epsilon: float) -> None:
    for module in (nn.LayerNorm(D, eps=epsilon), LlamaRMSNorm(D, eps=epsilon), NemotronLayerNorm1P(D, eps=epsilon)):
        assert read_norm(randomised(module), D).epsilon == pytest.approx(epsilon, rel=1e-3)


def test_a_gain_of_ones_and_a_bias_of_zeros_are_there_all_the_same() -> None:
    fresh = read_norm(nn.LayerNorm(D), D)
    assert (fresh.has_gain, fresh.has_bias) == (True, True)
    torch.testing.assert_close(fresh.gain, torch.ones(D).double())
    assert not fresh.bias.any()
    assert (read_norm(LlamaRMSNorm(D), D).has_gain, read_norm(LlamaRMSNorm(D), D).has_bias) == (True, False)
    assert read_norm(GemmaRMSNorm(D), D).has_gain


class Mixing(nn.Module):
    """A norm whose gain is a matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(width) + 0.1 * draw(width, width).float())

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.layer_norm(states, states.shape[-1:]) @ self.mix.to(states.dtype)


class Grouped(nn.Module):
    """Each half of the coordinates has a norm of its own."""

    def forward(self, states: Tensor) -> Tensor:
        halves = states.unflatten(-1, (2, -1))
        return nn.functional.rms_norm(halves, halves.shape[-1:]).flatten(-2)


class Needy(nn.Module):
    """A norm that wants more than a state."""

    def forward(self, states: Tensor, more: Tensor) -> Tensor:
        return states + more


@pytest.mark.parametrize(("module", "reason"), [(Mixing(D), "no gain and bias"), (Grouped(), "no gain and bias")])
def test_what_is_no_gain_and_bias_on_each_coordinate_is_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_norm(module, D)


def test_a_norm_that_cannot_be_asked_says_so() -> None:
    with pytest.raises(ModelError, match="cannot be asked about its gain: TypeError"):
        read_norm(Needy(), D)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 1e4), (torch.float16, 6e3), (torch.float32, 1e4), (torch.float32, 1e30)]
)
@pytest.mark.parametrize("name", ["LayerNorm", "Llama", "Gemma"])
def test_nothing_overflows_at_large_norms(name: str, dtype: torch.dtype, size: float) -> None:
    norm = read_norm(randomised(NORMS[name][0](D)).to(dtype), D)
    states = (size * draw(64, D, seed=3)).to(dtype)
    normed = norm.normalise(states)
    assert bool(normed.isfinite().all())
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(64).double(), rtol=1e-6, atol=0)
    view = norm.view(normed.to(dtype))
    for metric in (all_metrics()[name] for name in NORM_METRICS):
        value = float(metric(view))
        assert math.isfinite(value) == (norm.has_bias or metric.name in ("norm_gain", "residual_drift"))


# Known answers


def affine(gain: Tensor, bias: Tensor) -> Norm:
    return Norm(gain=gain, bias=bias, epsilon=0.0, centres=True, has_gain=True, has_bias=True)


def answers(norm: Norm, normed: Tensor) -> dict[str, float]:
    return {name: float(all_metrics()[name](norm.view(normed))) for name in NORM_METRICS}


def test_by_hand_in_two_coordinates() -> None:
    normed = torch.tensor([[1.0, 1.0], [1.0, -1.0], [3.0, 0.0]]).double()
    found = answers(affine(torch.tensor([3.0, 4.0]).double(), torch.tensor([-5.0, 12.0]).double()), normed)
    # m = (5/3, 0); squares (11/3, 2/3); g * m + b = (0, 12); z = (-2, 16), (-2, 8), (4, 12)
    assert found == {
        "norm_gain": pytest.approx(5),
        "norm_bias": pytest.approx(13),
        "norm_bias_ratio": pytest.approx(13 / 5),
        "norm_bias_ratio_effective": pytest.approx(13 / math.sqrt(9 * 11 / 3 + 16 * 2 / 3)),
        "residual_drift": pytest.approx(12 / math.sqrt((4 + 256 + 4 + 64 + 16 + 144) / 3)),
        "drift_cancellation": pytest.approx(25 / 65),
    }


def test_parts_that_a_norm_has_not_give_nan_and_never_zero() -> None:
    normed = draw(100, D) + 0.5
    without_bias = replace(affine(1 + draw(D).abs(), torch.zeros(D).double()), has_bias=False)
    nothing = replace(affine(torch.ones(D).double(), torch.zeros(D).double()), has_gain=False, has_bias=False)
    zero = affine(1 + draw(D).abs(), torch.zeros(D).double())
    for norm, known in (
        (without_bias, {"norm_gain", "residual_drift"}),
        (nothing, {"residual_drift"}),
        (zero, {*NORM_METRICS} - {"drift_cancellation"}),
    ):
        found = answers(norm, normed)
        assert {name for name, value in found.items() if not math.isnan(value)} == known
        assert found["residual_drift"] > 0.1
    assert answers(zero, normed)["norm_bias"] == 0


def test_the_family_is_the_one_that_is_printed_and_brings_three_metrics_along() -> None:
    from anisoscope.metrics import find_metrics

    assert {item.name for item in all_metrics().values() if item.family == "final_norm"} == set(NORM_METRICS)
    names = [item.name for item in find_metrics(["final_norm"])]
    assert names == [*NORM_METRICS, "mean_cosine", "isoscore", "leading_variance"]
    assert [item.name for item in find_metrics(["norm_gain"])] == ["norm_gain"]
    with pytest.raises(SpecError, match="needs a model"):
        estimate(draw(10, 3), ["norm_gain"])


def finite_sample(final: Tensor) -> float:
    """What E cos may miss its closed form by: exact for equal lengths, and for infinitely many points.

    The next term in the lengths is the relative variance of ‖z‖²; n points over d coordinates turn the mean by
    1/√(nd), of which half the coordinates are counted. Three of both.
    """
    squares, (n, d) = final.square().sum(1), final.shape
    return 3 * float(squares.var() / squares.mean() ** 2 + (n * d / 2) ** -0.5)


N, WIDE = 4096, 512


def centred_cloud(stretch: Tensor, n: int = N) -> Tensor:
    """Normalised states with mean exactly 0: with every point its opposite."""
    half = draw(n // 2, len(stretch), seed=7) * stretch
    half = half - half.mean(-1, keepdim=True)
    half = half / half.square().mean(-1, keepdim=True).sqrt()
    return torch.cat([half, -half])


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0, 2.0])
def test_the_closed_form_holds_where_all_coordinates_are_alike(ratio: float) -> None:
    normed, gain = centred_cloud(torch.ones(WIDE).double()), 1 + 0.3 * draw(WIDE, seed=1)
    bias = draw(WIDE, seed=2)
    norm = affine(gain, bias * ratio * gain.norm() / bias.norm())
    found = answers(norm, normed)
    assert found["norm_bias_ratio"] == pytest.approx(ratio)
    assert found["norm_bias_ratio_effective"] == pytest.approx(ratio, rel=0.02)
    final = normed * norm.gain + norm.bias
    measured = estimate(final, "mean_cosine", batch_points=N)["mean_cosine"].value
    tolerance = finite_sample(final)
    assert tolerance < 0.03
    assert measured == pytest.approx(ratio**2 / (1 + ratio**2), abs=tolerance)
    assert measured == pytest.approx(found["residual_drift"] ** 2, abs=tolerance)


def test_with_unequal_coordinates_only_the_effective_ratio_tells_the_mean_cosine() -> None:
    stretch = torch.ones(WIDE).double()
    stretch[:4] = 12.0
    gain = torch.ones(WIDE).double()
    gain[:4] = 0.1
    normed, bias = centred_cloud(stretch), draw(WIDE, seed=2)
    norm = affine(gain, bias * gain.norm() / bias.norm())
    found = answers(norm, normed)
    final = normed * gain + norm.bias
    measured = estimate(final, "mean_cosine", batch_points=N)["mean_cosine"].value
    on_paper, in_effect = (found[name] ** 2 / (1 + found[name] ** 2) for name in NORM_METRICS[2:4])
    tolerance = finite_sample(final)
    assert measured == pytest.approx(in_effect, abs=tolerance)
    assert abs(measured - on_paper) > 2 * tolerance


def test_the_bias_that_cancels_the_drift_makes_the_states_isotropic() -> None:
    normed, gain = centred_cloud(torch.ones(WIDE).double()) + 0.8 * draw(WIDE, seed=3), 1 + 0.3 * draw(WIDE, seed=1)
    drift = gain * normed.mean(0)
    cosines = {}
    for share in (0.0, 0.5, 1.0):
        norm = affine(gain, -share * drift)
        found = answers(norm, normed)
        final = normed * gain + norm.bias
        cosines[share] = estimate(final, "mean_cosine", batch_points=N)["mean_cosine"].value
        assert found["drift_cancellation"] == (pytest.approx(1) if share else pytest.approx(math.nan, nan_ok=True))
        assert cosines[share] == pytest.approx(found["residual_drift"] ** 2, abs=finite_sample(final))
    assert cosines[0.0] > 0.3
    assert 0.05 < cosines[0.5] < cosines[0.0] / 2
    # Opposite points are in the cloud, so no more than -1/n comes from the sample.
    assert abs(cosines[1.0]) < 1e-3


# Constructed models: blocks that add nothing, so that the final norm is given the embeddings.

VOCABULARY, WIDTH = 2048, 128
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "LayerNorm": ("gpt2", {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}, "transformer.ln_f"),
    "RMSNorm": ("llama", {}, "model.norm"),
    "1 + weight": ("gemma", {"head_dim": 64}, "model.norm"),
    "no parameters": ("olmo", {}, "model.norm"),
}
LIKE_LLAMA = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def constructed(name: str, *, tied: bool, offset: float) -> tuple[Model, Any]:
    """A model whose last block's output is its embedding: pairs of opposite vectors, moved by `offset`."""
    kind, config, path = MODELS[name]
    config = config if kind == "gpt2" else LIKE_LLAMA | config
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=VOCABULARY, tie_word_embeddings=tied, **config)
    )
    for path_of, weight in module.named_parameters():
        if path_of.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight", "c_proj.bias", "wpe.weight")):
            weight.data.zero_()
    half = draw(VOCABULARY // 2, WIDTH, seed=1)
    common = offset * draw(WIDTH, seed=2)
    module.get_input_embeddings().weight.data.copy_(torch.cat([half, -half]) + common)
    norm = module.get_submodule(path)
    for number, weight in enumerate(norm.parameters()):
        weight.data.copy_(0.4 * draw(WIDTH, seed=10 + number) + (number == 0))
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == tied
    return adopt_model(module, None, name=name), norm


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("offset", [0.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_closed_forms_hold_on_constructed_models(name: str, tied: bool, offset: float) -> None:
    model, module = constructed(name, tied=tied, offset=offset)
    ids = torch.arange(VOCABULARY).view(-1, 64)
    sites = select_sites(model.layout, [], stages=True)
    assert [site.name for site in sites] == ["block.1", "final_norm.normed", "final_norm.gained", "final_norm"]
    pre, normed, gained, final = (state.flatten(0, 1).double() for state in capture(model, ids, sites).states.values())
    centred = pre - pre.mean(-1, keepdim=True) if name in ("LayerNorm", "no parameters") else pre
    by_hand = centred / centred.square().mean(-1, keepdim=True).sqrt()
    weights = [weight.detach().double() for weight in module.parameters()]
    gain = torch.ones(WIDTH).double() if not weights else weights[0] + (name == "1 + weight")
    bias = weights[1] if len(weights) == 2 else torch.zeros(WIDTH).double()
    # float32 states, and an epsilon of 1e-6 or 1e-5 against a variance of 1.
    for ours, theirs in ((normed, by_hand), (gained, by_hand * gain), (final, by_hand * gain + bias)):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)

    norm = read_norms(model.module, model.layout)[None]
    assert isinstance(norm, Norm)
    found = answers(norm, normed)
    cosine = estimate(final, "mean_cosine", batch_points=VOCABULARY)["mean_cosine"].value
    tolerance = finite_sample(final)
    assert cosine == pytest.approx(found["residual_drift"] ** 2, abs=tolerance)
    if name == "LayerNorm":
        assert found["norm_bias_ratio"] == pytest.approx(float(bias.norm() / gain.norm()), rel=1e-5)
        if offset == 0:
            effective = found["norm_bias_ratio_effective"]
            assert cosine == pytest.approx(effective**2 / (1 + effective**2), abs=tolerance)
    else:
        assert math.isnan(found["norm_bias"])
        assert math.isnan(found["norm_gain"]) == (name == "no parameters")
        assert (abs(cosine) < tolerance) == (offset == 0)


# In the walk

SMALL = {"tokens": 4096, "seq_len": 64, "batch_points": 512}


@pytest.fixture(scope="module")
def decoder(saved_models: dict[str, Path]) -> Model:
    """A small GPT-2 whose final norm has a gain and a bias worth the name."""
    model = load_model(str(saved_models["decoder"]), device="cpu")
    norm: Any = model.module.get_submodule("transformer.ln_f")
    norm.weight.data.copy_(1 + 0.3 * draw(128, seed=1))
    norm.bias.data.copy_(0.5 * draw(128, seed=2))
    return model


@pytest.fixture(scope="module")
def encoder(saved_models: dict[str, Path]) -> Model:
    return load_model(str(saved_models["encoder"]), device="cpu")


def spec_for(corpus: Path, **changes: Any) -> an.Spec:
    return an.Spec(model="tiny", corpus=str(corpus), **{**SMALL, "metrics": ("final_norm",), **changes})


@pytest.fixture(scope="module")
def unit(decoder: Model, corpus_file: Path) -> an.Unit:
    metrics = ("final_norm", "isotropy", "mean_offset", "procrustes_linearity")
    return an.measure(spec_for(corpus_file, metrics=metrics), model=decoder, progress=False)


def rows(unit: an.Unit, **wanted: Any) -> list[an.Record]:
    return [row for row in unit.records if all(getattr(row, name) == value for name, value in wanted.items())]


def test_the_family_brings_the_stages_and_its_numbers(unit: an.Unit) -> None:
    ends = ["final_norm.normed", "final_norm.gained", "final_norm"]
    for metric in ("mean_cosine", "isoscore", "leading_variance", "effective_rank", "mean_offset"):
        for population in ("all", "typical"):
            found = [row.site for row in rows(unit, metric=metric, population=population)]
            assert found == ["embed", *(f"block.{k}" for k in range(6)), *ends]
    for row in (row for row in unit.records if row.metric in NORM_METRICS):
        assert (row.site, row.depth, row.batches, row.dim) == ("final_norm", None, 8, 128)
        assert math.isfinite(row.value)
        assert row.points + row.excluded == 4096
    counts = {name: len(rows(unit, metric=name)) for name in NORM_METRICS}
    assert counts == dict(zip(NORM_METRICS, (1, 1, 1, 2, 2, 2), strict=True))
    # What the final norm is compared with does not depend on what else was asked for.
    assert {row.site: row.variant for row in rows(unit, metric="procrustes_linearity", population="all")}[
        "final_norm"
    ] == "from=block.5"


def test_stage_values_are_those_of_a_float64_reference(unit: an.Unit, decoder: Model, corpus_file: Path) -> None:
    windows = draw_windows(load_corpus(str(corpus_file)), decoder.tokenizer, seq_len=64, count=64, seed=0)
    layer: Any = decoder.module.get_submodule("transformer.ln_f")
    given: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: given.append(args[0].double()))
    with torch.no_grad():
        decoder.module(torch.from_numpy(windows.token_ids))
    handle.remove()
    gain, bias = layer.weight.detach().double(), layer.bias.detach().double()
    pre = given[0]
    centred = pre - pre.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt()
    stages = {"block.5": pre, "final_norm.normed": normed, "final_norm.gained": normed * gain}
    stages["final_norm"] = normed * gain + bias
    expected: dict[tuple[str, str], list[float]] = {}
    for pool in plan_pools(64, 64, 512):
        for hand in deal((pool.stop - pool.start) * 64, pool.batches, seed_for(0, pool.first)):
            for site, states in stages.items():
                points = states[pool.start : pool.stop].flatten(0, 1)[hand]
                values = torch.linalg.svdvals(points - points.mean(0)) ** 2
                unit_rows = points / points.norm(dim=1, keepdim=True)
                n = len(points)
                numbers = {
                    "leading_variance": values[0] / values.sum(),
                    "isoscore": (values.sum() ** 2 / values.square().sum() - 1) / 127,
                    "mean_cosine": (unit_rows.sum(0).square().sum() - n) / (n * (n - 1)),
                }
                if site == "final_norm":
                    here = normed[pool.start : pool.stop].flatten(0, 1)[hand]
                    drift = gain * here.mean(0)
                    length = (gain**2 * here.square().mean(0)).sum().sqrt()
                    numbers |= {
                        "residual_drift": points.mean(0).norm() / points.square().sum(1).mean().sqrt(),
                        "drift_cancellation": torch.cosine_similarity(bias, -drift, dim=0),
                        "norm_bias_ratio_effective": bias.norm() / length,
                        "norm_gain": gain.norm(),
                        "norm_bias": bias.norm(),
                        "norm_bias_ratio": bias.norm() / gain.norm(),
                    }
                for metric, value in numbers.items():
                    expected.setdefault((site, metric), []).append(float(value))
    for (site, metric), values in expected.items():
        (row,) = rows(unit, site=site, metric=metric, population="all")
        assert row.values == pytest.approx(values, rel=2e-5, abs=1e-6), (site, metric)


def test_the_residual_drift_is_the_mean_offset_of_what_the_norm_returns(unit: an.Unit) -> None:
    for population in ("all", "typical"):
        (drift,) = rows(unit, metric="residual_drift", population=population)
        (offset,) = rows(unit, metric="mean_offset", site="final_norm", population=population)
        assert drift.values == pytest.approx(offset.values, rel=1e-5)
        assert (drift.points, drift.null) == (offset.points, pytest.approx(offset.null))


def test_each_stage_owns_a_part_of_the_change_and_the_parts_add_up(unit: an.Unit) -> None:
    found = {(one.metric, one.population): one for one in stage_changes(unit.records)}
    assert ("mean_cosine", "typical") in found
    assert not any(metric in NORM_METRICS for metric, _ in found)
    one = found["mean_cosine", "all"]
    assert tuple(one.stages) == STAGES
    whole = one.stages["final"].value - one.stages["pre"].value
    assert sum(change.value for change in one.changes.values()) == pytest.approx(whole)
    assert sum(one.shares.values()) == pytest.approx(1)
    paired = np.subtract(one.stages["gained"].values, one.stages["normed"].values)
    assert one.changes["gained"].spread == pytest.approx(paired.std(ddof=1))
    still = replace(one, stages=dict.fromkeys(STAGES, one.stages["pre"]))
    assert all(math.isnan(share) for share in still.shares.values())


def test_sites_inside_the_norm_are_measured_when_named_and_never_by_a_star(decoder: Model) -> None:
    def names(*patterns: str, stages: bool = False) -> list[str]:
        return [site.name for site in select_sites(decoder.layout, patterns, stages=stages)]

    assert names("final_norm.*") == ["final_norm.normed", "final_norm.gained"]
    assert names("final_norm*") == ["final_norm.normed", "final_norm.gained", "final_norm"]
    assert names("*") == [site.name for site in sites_of(decoder.layout)]
    assert names("embed", stages=True) == ["embed", "block.5", "final_norm.normed", "final_norm.gained", "final_norm"]


def test_a_model_without_a_final_norm_gives_nan_with_a_note(encoder: Model, corpus_file: Path) -> None:
    unit = an.measure(spec_for(corpus_file, sites=("final_norm.*", "block.5")), model=encoder, progress=False)
    assert {row.site for row in unit.records if row.metric not in NORM_METRICS} == {"block.5"}
    found = [row for row in unit.records if row.metric in NORM_METRICS]
    assert {row.metric for row in found} == set(NORM_METRICS)
    for row in found:
        assert math.isnan(row.value)
        assert (row.note, row.points, row.excluded, row.dim) == (NO_FINAL_NORM, 0, 4096, 128)
    with pytest.raises(ModelError, match="there is no final norm"):
        measure_counterfactuals(spec_for(corpus_file), model=encoder, progress=False)


def test_a_norm_that_is_not_understood_is_said_so_and_the_rest_is_measured(decoder: Model, corpus_file: Path) -> None:
    strange = copy.deepcopy(decoder.module)
    strange.transformer.ln_f = Mixing(128)  # pyright: ignore
    model = adopt_model(strange, decoder.tokenizer, name="strange")
    unit = an.measure(spec_for(corpus_file), model=model, progress=False)
    assert {row.site for row in unit.records} == {"embed", *(f"block.{k}" for k in range(6)), "final_norm"}
    (row,) = rows(unit, metric="norm_gain")
    assert math.isnan(row.value)
    assert "no gain and bias on each coordinate" in (row.note or "")
    assert any("final_norm.normed was not measured" in note for note in unit.provenance["notes"])
    (site,) = select_sites(model.layout, ["final_norm.gained"])
    with pytest.raises(ModelError, match=r"final_norm\.gained: the final norm .Mixing. is no gain"):
        capture(model, torch.zeros(1, 8, dtype=torch.int64), [site])


def test_stages_are_printed(unit: an.Unit, capsys: pytest.CaptureFixture[str]) -> None:
    print_unit(unit)
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Through the final norm"))
    assert lines[start + 1].split()[:6] == ["estimator", "population", *STAGES]
    cosine = next(line for line in lines[start:] if line.startswith("mean_cosine"))
    assert "%)" in cosine
    numbers = next(number for number, line in enumerate(lines) if line.startswith("population  norm_gain"))
    assert lines[numbers].split()[1:] == list(NORM_METRICS)
    assert not any(line.startswith("norm_gain") for line in lines)


# What if


@pytest.fixture(scope="module")
def changed(decoder: Model, corpus_file: Path) -> an.Unit:
    return measure_counterfactuals(spec_for(corpus_file), model=decoder, progress=False)


def test_the_norm_as_it_is_changes_no_bit(decoder: Model) -> None:
    ids = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        model = replace(decoder, module=copy.deepcopy(decoder.module).to(dtype))
        plain = capture(model, ids, sites_of(model.layout))
        with norm_replaced(model, norm_of(model)):
            same = capture(model, ids, sites_of(model.layout))
        assert plain.logits is not None
        assert same.logits is not None
        assert torch.equal(plain.logits, same.logits)
        assert all(torch.equal(state, same.states[site]) for site, state in plain.states.items())


def test_own_is_what_a_plain_walk_over_the_second_half_gives(
    changed: an.Unit, decoder: Model, corpus_file: Path
) -> None:
    from anisoscope.counterfactuals import METRICS
    from anisoscope.walk import draw as draw_for

    corpus = load_corpus(str(corpus_file))
    spec = spec_for(corpus_file, metrics=METRICS, sites=("final_norm",))
    windows = draw_for(spec, decoder, corpus)
    plain = an.measure(spec, model=decoder, windows=windows.take(slice(32, None)), progress=False)
    own = rows(changed, variant="norm=own")
    assert [(row.metric, row.values) for row in own] == [(row.metric, row.values) for row in plain.records]
    assert changed.key != plain.key
    assert changed.provenance["text"]["states"]["windows"] == 32


def with_norm(decoder: Model, **weights: Tensor) -> Model:
    module = copy.deepcopy(decoder.module)
    for name, value in weights.items():
        getattr(module.transformer.ln_f, name).data.copy_(value)  # pyright: ignore
    return replace(decoder, module=module)


def test_a_changed_norm_is_what_changed_weights_would_be(decoder: Model) -> None:
    norm, mean = norm_of(decoder), draw(128, seed=9)
    other = with_norm(decoder, weight=2 + draw(128, seed=4), bias=draw(128, seed=5))
    ids = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(0))
    for name, new, weights in (
        ("bias=0", None, {"bias": torch.zeros(128)}),
        ("bias=-gain*mean", None, {"bias": (-norm.gain * mean).float()}),
        ("gain=1", None, {"weight": torch.ones(128)}),
        ("gain=rms", None, {"weight": norm.gain.square().mean().sqrt().float().expand(128)}),
        ("swap", norm_of(other), {"weight": other.module.transformer.ln_f.weight.data,  # pyright: ignore
                                  "bias": other.module.transformer.ln_f.bias.data}),  # pyright: ignore
    ):  # fmt: skip
        expected = capture(with_norm(decoder, **weights), ids, ()).logits
        with norm_replaced(decoder, new or variants_of(norm, mean)[name]):
            found = capture(decoder, ids, ()).logits
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_weights_and_hooks_are_as_before_also_after_an_error(decoder: Model) -> None:
    layer = decoder.module.get_submodule("transformer.ln_f")
    before, hooks = copy.deepcopy(layer.state_dict()), len(layer._forward_hooks)
    zero = variants_of(norm_of(decoder), torch.zeros(128).double())["bias=0"]
    with norm_replaced(decoder, zero):
        assert len(layer._forward_hooks) == hooks + 1
    with pytest.raises(IndexError), norm_replaced(decoder, zero):
        capture(decoder, torch.full((1, 8), 10_000), ())
    assert len(layer._forward_hooks) == hooks
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with pytest.raises(SpecError, match="width 5"), norm_replaced(decoder, read_norm(nn.LayerNorm(5), 5)):
        pass


def test_the_bias_that_cancels_the_drift_is_estimated_on_other_windows_and_works(changed: an.Unit) -> None:
    cosine = {row.variant: row.value for row in rows(changed, metric="mean_cosine", population="all")}
    assert list(cosine) == ["norm=own", "bias=0", "bias=-gain*mean", "gain=1", "gain=rms"]
    assert changed.spec.controls == tuple(cosine)
    assert abs(cosine["bias=-gain*mean"]) < 0.05 < cosine["norm=own"]
    losses = {row.variant: row.value for row in rows(changed, metric="loss")}
    assert len(set(losses.values())) == 5
    assert "the mean was estimated on 32 other windows" in changed.provenance["notes"]


def test_norms_of_other_checkpoints_can_be_swapped_in_and_one_window_is_too_few(
    decoder: Model, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_for(corpus_file, tokens=1024, batch_points=256)
    unit = measure_counterfactuals(spec, model=decoder, swaps={"fresh": read_norm(nn.LayerNorm(128), 128)})
    assert unit.spec.controls[-1] == "norm=fresh"
    own, fresh = (
        rows(unit, metric="isoscore", population="all", variant=f"norm={name}")[0] for name in ("own", "fresh")
    )
    assert own.values != fresh.values
    print_counterfactuals(unit)
    assert "norm=fresh" in capsys.readouterr().out
    with pytest.raises(SpecError, match="need two windows"):
        measure_counterfactuals(replace(spec, tokens=64), model=decoder, progress=False)


def test_variants_that_change_nothing_are_left_out() -> None:
    mean = torch.zeros(D).double()
    assert list(variants_of(read_norm(LlamaRMSNorm(D), D), mean)) == ["bias=-gain*mean", "gain=1", "gain=rms"]
    assert list(variants_of(read_norm(OlmoLayerNorm(D), D), mean)) == ["bias=-gain*mean"]
