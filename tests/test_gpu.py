"""The same numbers on a GPU. Skipped where there is none; docs/log.md says when they last ran on one."""

import time
from pathlib import Path

import pytest
import torch

import anisoscope as an
from anisoscope.cloud import Cloud, Tokens
from anisoscope.corpora import load_corpus
from anisoscope.estimates import evaluate
from anisoscope.kernels import queues
from anisoscope.lab import Recipe, build_model, build_untrained
from anisoscope.metrics import all_metrics
from anisoscope.models import load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

SETTINGS = {"discard_fraction": 0.1, "neighbors": 20, "isoscore_zeta": 0.25}


def test_every_metric_agrees_between_cpu_and_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1024, 96, generator=generator) * torch.arange(1, 97).pow(-0.5) + 0.3
    points[:40] = points[40:80]
    previous = points @ torch.randn(96, 96, generator=generator)
    count = torch.arange(1024)
    tokens = Tokens(ids=count % 90, positions=count, documents=count // 64, sentences=count // 8, special=count < 0)
    here = Cloud(points=points, previous=previous, tokens=tokens, neighbor_count=64)
    there = Cloud(
        points=points.cuda(), previous=previous.cuda(), tokens=tokens.to(torch.device("cuda")), neighbor_count=64
    )
    for metric in all_metrics().values():
        # Those of a norm, of attention and of the loss are compared in walks below; updates are made on the CPU.
        if metric.needs not in (
            "losses",
            "norm",
            "heads",
            "attention",
            "updates",
            "enrichment",
            "removal",
            "trend",
            "turn",
            "movement",
            "pinned",
            "curved",
            "concepts",
        ):
            one, two = evaluate(here, metric, SETTINGS), evaluate(there, metric, SETTINGS)
            assert two.value.device.type == "cuda", metric.name
            assert float(two.value) == pytest.approx(float(one.value), rel=1e-5), metric.name
            assert (two.points, two.dropped) == (one.points, one.dropped)


def measure_on(device: str, corpus_file: Path, **changes: object) -> an.Unit:
    corpus = load_corpus(str(corpus_file))
    model = build_untrained("decoder", corpus)
    spec = an.Spec(model="tiny", corpus=str(corpus_file), tokens=8192, seq_len=64, batch_points=1024, **changes)
    module = model.module.to(device=device, dtype=getattr(torch, spec.dtype))
    return an.measure(spec, model=module, tokenizer=model.tokenizer, progress=False)


def test_the_walk_agrees_between_cpu_and_gpu(corpus_file: Path) -> None:
    here, there = measure_on("cpu", corpus_file), measure_on("cuda", corpus_file)
    assert there.provenance["device"] == torch.cuda.get_device_name(0)
    for one, two in zip(here.records, there.records, strict=True):
        assert two.value == pytest.approx(one.value, rel=2e-3), (one.metric, one.site, one.population)
        assert two.excluded == one.excluded


def test_norms_attention_occurrences_and_weights_agree_between_cpu_and_gpu(corpus_file: Path) -> None:
    asked = {
        "sites": ("embed", "block.*", "final_norm", "embed.weight", "unembed.weight"),
        "metrics": (
            *("final_norm", "contextuality", "isotropy", "anisotropy", "hull_margin", "rogue_share", "rogue_r2_3"),
            *("query_drift", "key_drift", "query_key_drift", "attention_entropy"),
        ),
    }
    here, there = (measure_on(device, corpus_file, **asked) for device in ("cpu", "cuda"))
    assert len(here.records) > 150
    for one, two in zip(here.records, there.records, strict=True):
        place = (one.metric, one.site, one.population, one.variant)
        assert two.value == pytest.approx(one.value, rel=2e-3, abs=1e-4, nan_ok=True), place
        assert two.note == one.note, place


def test_gradients_types_and_their_nulls_agree_between_cpu_and_gpu() -> None:
    spec = an.Spec(
        model="pocket-decoder",
        tokens=64 * 64,
        seq_len=64,
        rank=8,
        sites=("block.1", "block.4"),
        metrics=("alignment", "pinning"),
        controls=("shares",),
    )
    here, there = (
        an.measure(spec, model=load_model("pocket-decoder", device=device), progress=False)
        for device in ("cpu", "cuda")
    )
    assert len(here.records) > 150
    for one, two in zip(here.records, there.records, strict=True):
        place = (one.metric, one.site, one.population, one.gradient, one.proxy, one.variant, one.control)
        # A semi-NMF goes its own way from the first rounding on, as two seeds do; what is drawn is the same.
        close = {"rel": 0.1, "abs": 0.02} if one.proxy == "seminmf" else {"rel": 5e-3, "abs": 1e-3}
        assert two.value == pytest.approx(one.value, nan_ok=True, **close), place
        if one.p is not None and one.proxy != "seminmf":
            assert two.p == pytest.approx(one.p, abs=0.011), place


def test_a_second_queue_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pocket = load_model("pocket-decoder", device="cpu")
    torch.manual_seed(0)
    # Wide enough that the second queue is still busy when the first is looked at.
    recipe = Recipe(layers=6, width=1024, heads=16, vocabulary=len(pocket.tokenizer))
    module = build_model(recipe, pocket.tokenizer).cuda()
    spec = an.Spec(model="wide", tokens=4096, seq_len=64, metrics=("alignment",))

    def records() -> list[an.Record]:
        return list(an.measure(spec, model=module, tokenizer=pocket.tokenizer, progress=False).records)

    several = [records() for _ in range(3)]
    monkeypatch.setattr(queues, "_second", lambda device: None)
    alone = records()
    assert len(alone) > 500
    for found in several:
        for one, two in zip(found, alone, strict=True):
            place = (one.metric, one.site, one.gradient, one.proxy, one.variant, one.control)
            assert one.value == pytest.approx(two.value, rel=1e-6, abs=1e-9, nan_ok=True), place
            assert one.p == (two.p if two.p is None else pytest.approx(two.p, nan_ok=True)), place
            if one.control_value is not None:
                assert one.control_value == pytest.approx(two.control_value, rel=1e-6, abs=1e-9, nan_ok=True), place


def test_low_precision_models_are_measured_on_the_gpu(corpus_file: Path) -> None:
    whole, half = (measure_on("cuda", corpus_file, dtype=dtype) for dtype in ("float32", "bfloat16"))
    for one, two in zip(whole.records, half.records, strict=True):
        if one.metric == "leading_variance":
            assert two.value == pytest.approx(one.value, rel=0.05)


def test_a_gpu_that_is_really_full_halves_the_batch(corpus_file: Path) -> None:
    model = build_untrained("decoder", load_corpus(str(corpus_file)))
    module = model.module.cuda()
    spec = an.Spec(
        model="tiny",
        corpus=str(corpus_file),
        tokens=16384,
        seq_len=64,
        batch_points=4096,
        sites=("block.0",),
        metrics=("mean_cosine", "loss"),
    )
    torch.cuda.empty_cache()
    # Logits of the 256 windows of a pool take 134 MB and more on the way: they fit in smaller batches only.
    limit = torch.cuda.memory_reserved() + 150e6
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        unit = an.measure(spec, model=module, tokenizer=model.tokenizer, batch_size=256, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(note.startswith("memory ran out") for note in unit.provenance["notes"]), unit.provenance["notes"]


def test_nothing_leaks_on_the_gpu_over_many_batches(corpus_file: Path) -> None:
    measure_on("cuda", corpus_file)
    torch.cuda.synchronize()
    before, clock = torch.cuda.memory_allocated(), time.time()
    measure_on("cuda", corpus_file)
    assert torch.cuda.memory_allocated() <= before + 1e6, time.time() - clock
