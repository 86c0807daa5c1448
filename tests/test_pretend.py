"""The analyses of gradients as a GPU would run them, on machines without one (see pretend.py)."""

from dataclasses import replace

import pytest
import torch
from pretend import DEVICE, Pretend

import anisoscope as an
from anisoscope.alignment import align
from anisoscope.corpora import load_corpus
from anisoscope.gradients import Coupled
from anisoscope.kernels import has_triton
from anisoscope.layout import select_sites
from anisoscope.looks import looks_at
from anisoscope.metrics import find_metrics
from anisoscope.models import Model, load_model
from anisoscope.past import Past
from anisoscope.probed import Probed, ProbeRow
from anisoscope.probes import draw_probe
from anisoscope.records import Site
from anisoscope.scratch import InMemory, Matrices

pytestmark = pytest.mark.skipif(has_triton(), reason="kernels of a real GPU would be asked to do what it pretends")

# Between a stack of sites and each alone, as the CPU has it.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def decoder() -> Model:
    return load_model("pocket-decoder", device="cpu")


def probe_of(decoder: Model, sites: tuple[str, ...], **changes: object) -> Probed:
    given = {"model": "pocket-decoder", "tokens": 64 * 64, "seq_len": 64, "sites": sites}
    spec = an.Spec(**(given | changes))
    probe = draw_probe(spec, decoder.tokenizer, load_corpus("pydoc"))
    return Probed(model=decoder, probe=probe, sites=select_sites(decoder.layout, sites), spec=spec)


def sent(probed: Probed) -> Probed:
    """The same with all that was captured on the GPU."""

    def send(one: Coupled) -> Coupled:
        return replace(one, values=one.values.to(DEVICE), gradients=one.gradients.to(DEVICE))

    there = replace(probed)
    states: Matrices[Site] = Matrices(probed.fit_states.rows)
    # Not written: there is no memory of a GPU to be asked for.
    states._places.update({site: InMemory(one.to(DEVICE)) for site, one in probed.fit_states.items()})
    there.__dict__["fit_states"] = states
    for name in ("gradients", *(["shuffled_gradients"] if probed.spec.controls else [])):
        shown = getattr(probed, name)
        there.__dict__[name] = replace(
            shown,
            tokens=shown.tokens.to(DEVICE),
            windows=shown.windows.to(DEVICE),
            read=shown.read.to(DEVICE),
            sites={site: send(one) for site, one in shown.sites.items()},
        )
    return there


def rows_of(probed: Probed, family: str, past: Past | None = None) -> list[ProbeRow]:
    names = [metric.name for metric in find_metrics((family,))]
    return looks_at(probed, names, past=past, decode=str)[family]()[0]


def check(found: list[ProbeRow], expected: list[ProbeRow]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for name in ("site", "population", "metric", "excluded"):
            assert getattr(one, name) == getattr(other, name)
        assert one.answer.points == other.answer.points
        assert one.columns.get("control") == other.columns.get("control")
        assert one.answer.value == pytest.approx(other.answer.value, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True), other


def test_it_refuses_what_a_gpu_refuses_and_counts_what_waits() -> None:
    generator = torch.Generator().manual_seed(0)
    with Pretend() as gpu:
        here, there = torch.ones(3), torch.ones(3).to(DEVICE)
        assert there.is_cuda
        assert (there + 1).device == DEVICE
        assert (2 * there).cpu().device.type == "cpu"
        assert torch.zeros_like(there, dtype=torch.bool).device == DEVICE
        for refused in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: torch.stack([there.sum(), here.sum()]),
            lambda: there.index_add_(0, torch.tensor([0, 1, 2]), there),
            lambda: here[there > 0],
            lambda: torch.randn(3, generator=generator, device=DEVICE),
        ):
            with pytest.raises(RuntimeError):
                refused()
        with pytest.raises(TypeError):
            there.numpy()
        gpu.waits.clear()
        assert there[:2].sum().add(1).sqrt().shape == ()
        assert not gpu.waits
        assert float(there.sum()) == 3
        assert there[torch.tensor([0, 1])].tolist() == [1, 1]
        assert bool((there > 0).all())
        assert sum(gpu.waits.values()) == 4
    assert torch.ones(3).device.type == "cpu"


@pytest.mark.parametrize("family", ["alignment", "pinning", "curvature"])
def test_a_gpu_gives_the_rows_of_the_cpu(decoder: Model, family: str) -> None:
    probed = probe_of(decoder, ("embed", "block.2", "final_norm"))
    with Pretend():
        found = rows_of(sent(probed), family)
    check(found, rows_of(probed, family))


def test_concepts_on_a_gpu(decoder: Model) -> None:
    probed = probe_of(decoder, ("block.2",), tokens=16 * 64, rank=3)
    with Pretend():
        found = rows_of(sent(probed), "concepts")
    check(found, rows_of(probed, "concepts"))


def test_everything_that_alignment_can_be_asked_for_on_a_gpu(decoder: Model) -> None:
    controls = ("type_disjoint", "shuffled_targets", "shares")
    probed = probe_of(decoder, ("block.2",), proxy="local_pca", controls=controls, populations=("all",))
    kept = align(probed, ["tangent_energy"]).attachments
    past = Past(fits={"rolling": [kept], "frozen": [kept, kept]}, steps={"rolling": "1", "frozen": "1, 2"})
    with Pretend():
        found = rows_of(sent(probed), "alignment", past)
    expected = rows_of(probed, "alignment", past)
    assert {row.columns["variant"] for row in expected} >= {"mean=in;split=types", "mean=in;fit=rolling", "fit=frozen"}
    assert {row.columns["proxy"] for row in expected} == {"pca", "seminmf", "local_pca"}
    shares = [row for row in expected if row.metric.name == "tangent_anisotropy_share"]
    assert {row.columns["control"] for row in shares} == {"normal", "next", "permuted", "haar", "signs"}
    check(found, expected)


@pytest.mark.parametrize("family", ["alignment", "pinning", "curvature", "contextuality", "isotropy"])
def test_a_matrix_on_a_gpu_gives_what_it_gives_on_the_cpu(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    points, gradients = torch.randn(2, 2048, 24, generator=generator)
    ids = torch.randint(0, 100, (2048,), generator=generator)
    given = {
        "points": points,
        "grads": gradients,
        "windows": torch.arange(2048) // 32,
        "token_ids": ids,
        "sentences": torch.arange(2048) // 8,
        "frequencies": torch.rand(100, generator=generator)[ids],
    }
    expected = an.estimate(metrics=family, rank=4, **given)
    with Pretend():
        found = an.estimate(metrics=family, rank=4, **{name: one.to(DEVICE) for name, one in given.items()})
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].value == pytest.approx(one.value, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True), name


def test_what_a_gpu_is_asked_for_hardly_grows_with_the_sites(decoder: Model) -> None:
    counts = []
    for sites in (("block.1", "block.2"), ("*",)):
        probed = probe_of(decoder, sites)
        with Pretend() as gpu:
            there = sent(probed)
            gpu.waits.clear()
            rows_of(there, "alignment")
        counts.append(sum(gpu.waits.values()))
    # One a site, and searches may take longer for some.
    assert counts[1] <= counts[0] + 12, counts
