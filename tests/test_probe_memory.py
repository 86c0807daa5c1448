"""What is measured on a probe: how many windows go through the model at a time, what happens when memory runs out, and
where states and gradients are kept meanwhile."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import APART

import anisoscope as an
from anisoscope import scratch
from anisoscope.corpora import load_corpus
from anisoscope.errors import ModelError, SpecError, StoreError
from anisoscope.gradients import capture_gradients
from anisoscope.layout import select_sites
from anisoscope.models import Model, load_model
from anisoscope.passes import PassSize
from anisoscope.probed import Probed
from anisoscope.probes import draw_probe
from anisoscope.scratch import Matrices

FAMILIES = ("alignment", "pinning", "curvature", "concepts")
WINDOWS = 32
LINEARS = {"gradients": ("virtual", "activation", "linear:*.0.attention.dense", "embedding")}


def spec_for(*metrics: str, **changes: Any) -> an.Spec:
    """32 windows of 32 tokens in each half."""
    given: dict[str, Any] = {"tokens": 2 * WINDOWS * 32, "seq_len": 32, "rank": 4, "sites": ("embed", "block.2")}
    return an.Spec(**{"model": "pocket-decoder", "metrics": metrics, **given, **changes})


@pytest.fixture(scope="module")
def decoder() -> Model:
    return load_model("pocket-decoder", device="cpu")


@pytest.fixture(scope="module")
def encoder() -> Model:
    return load_model("pocket-encoder", device="cpu")


# An encoder reads the fit half twice for alignment: as plain text and as for its loss.
CASES = [*(("decoder", family) for family in FAMILIES), ("encoder", "alignment")]


@contextmanager
def watched(model: Model, most: int | None = None) -> Iterator[list[tuple[int, bool]]]:
    """Windows of every pass and whether it is one for gradients; above so many windows memory runs out."""
    passes: list[tuple[int, bool]] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if most is not None and len(ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        passes.append((len(ids), torch.is_grad_enabled()))

    handle = model.module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def numbers(unit: an.Unit) -> list[str]:
    """Every record without the time it took; NaN equals NaN."""
    return [repr(replace(one, seconds=0.0)) for one in unit.records]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_every_family_takes_as_many_windows_as_asked_for(
    name: str, family: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    with watched(model) as passes:
        an.measure(spec_for(family, model=model.name), model=model, progress=False, batch_size=5)
    # Six passes of five windows and one of two, over each half that is read.
    assert {count for count, _ in passes} == {5, 2}
    assert sum(count for count, _ in passes) % WINDOWS == 0
    assert any(gradients for _, gradients in passes) == (family in ("alignment", "concepts"))


def test_shuffled_targets_linear_modules_and_embeddings_too(decoder: Model) -> None:
    model = decoder
    spec = spec_for("alignment", controls=("shuffled_targets",), **LINEARS)
    with watched(model) as passes:
        an.measure(spec, model=model, progress=False, batch_size=8)
    assert [count for count, _ in passes] == [8] * len(passes)
    # States of the fit half; gradients of the test half, of both halves at modules, and with shuffled targets.
    assert [gradients for _, gradients in passes].count(True) == 4 * WINDOWS // 8
    assert [gradients for _, gradients in passes].count(False) == WINDOWS // 8


def test_a_scope_hands_its_batch_size_on(decoder: Model, tmp_path: Path) -> None:
    given = {"tokenizer": decoder.tokenizer, "store": tmp_path, "preset": None, "batch_size": 5}
    with an.Scope(decoder.module, spec_for("pinning"), **given) as scope, watched(decoder) as passes:
        scope.step(0)
    assert [count for count, _ in passes] == [5] * 6 + [2]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_where_memory_runs_out_passes_are_halved_and_numbers_stay(
    name: str, family: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    spec = spec_for(family, model=model.name, **(LINEARS if (name, family) == ("decoder", "alignment") else {}))
    plain = an.measure(spec, model=model, progress=False, batch_size=2)
    with watched(model, most=3) as passes:
        halved = an.measure(spec, model=model, progress=False, batch_size=16)
    assert {count for count, _ in passes} == {2}
    notes = [note for note in halved.provenance["notes"] if note.startswith("memory ran out")]
    # Concepts read gradients first.
    what = "forward and backward pass" if family == "concepts" else "forward pass"
    assert notes == [f"memory ran out: windows in a {what} halved to {size}" for size in (8, 4, 2)]
    # The passes that went through are the same: so is every digit.
    assert numbers(halved) == numbers(plain)


def test_a_backward_pass_that_runs_out_is_halved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the gradients of embedding rows, which add up over passes: nothing is added twice."""
    model = load_model("pocket-decoder", device="cpu")
    probe = draw_probe(spec_for("alignment"), model.tokenizer, load_corpus("pydoc"))
    plain = capture_gradients(model, probe.test, linears=("*.0.attention.dense",), embedding=True, batch_size=2)
    whole = torch.autograd.grad

    def limited(outputs: Any, inputs: Any, given: Any = None, **settings: Any) -> Any:
        # The rows of the table come last in a pass, when other gradients are made already.
        if given is not None and len(given) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return whole(outputs, inputs, given, **settings)

    monkeypatch.setattr(torch.autograd, "grad", limited)
    size = PassSize(8)
    found = capture_gradients(model, probe.test, linears=("*.0.attention.dense",), embedding=True, batch_size=size)
    assert size.notes == [f"memory ran out: windows in a forward and backward pass halved to {n}" for n in (4, 2)]
    assert plain.embedding is not None
    assert found.embedding is not None
    for name in ("read", "predicted"):
        assert torch.equal(getattr(found.embedding, name), getattr(plain.embedding, name)), name
    for path, pair in plain.linears.items():
        assert torch.equal(found.linears[path].gradients, pair.gradients)
    assert torch.equal(found.tokens.losses.nan_to_num(), plain.tokens.losses.nan_to_num())  # type: ignore[union-attr]


def test_one_window_that_is_too_much_is_a_clear_error() -> None:
    model = load_model("pocket-decoder", device="cpu")
    with watched(model, most=0), pytest.raises(ModelError, match="memory ran out at one window of 32 tokens: CUDA out"):
        an.measure(spec_for("pinning"), model=model, progress=False)


def test_memory_that_runs_out_in_an_analysis_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("anisoscope.pinning.pin_types", full)
    with pytest.raises(ModelError, match=r"memory ran out in pinning.*2,048 tokens.*2 sites.*try fewer --tokens"):
        an.measure(spec_for("pinning"), model=load_model("pocket-decoder", device="cpu"), progress=False)


def test_other_errors_are_not_taken_for_memory() -> None:
    tried = []

    def fail(part: slice) -> None:
        tried.append(part)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        PassSize(4).run(fail, stop=8, default=2, seq_len=16)
    assert len(tried) == 1
    with pytest.raises(SpecError, match="batch_size is at least 1; came 0"):
        PassSize(0)


def test_matrices_come_back_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: torch.randn(10, width, dtype=dtype) for name, width, dtype in SHAPES}
    for most in (0, 10 * 3 * 4, 1 << 20):
        monkeypatch.setattr(scratch, "KEPT_BYTES", most)
        monkeypatch.setattr(scratch, "BLOCK_BYTES", 64)
        stored: Matrices[str] = Matrices(10)
        for rows in (slice(4, 10), slice(0, 4), slice(0, 4)):
            for name, matrix in given.items():
                stored.write(name, rows, matrix[rows])
        assert list(stored) == list(given)
        for name, matrix in given.items():
            assert torch.equal(stored[name], matrix)
            assert stored[name].dtype == matrix.dtype
            assert stored.width(name) == matrix.shape[1]


SHAPES = [("a", 3, torch.float32), ("b", 1, torch.float64), ("c", 40, torch.float32)]


def test_a_file_of_matrices_leaves_nothing_behind(tmp_path: Path) -> None:
    """Not even after SIGKILL."""
    program = (
        "import os, signal, torch\n"
        "from anisoscope.scratch import Matrices\n"
        "stored = Matrices(1 << 16)\n"
        "stored.write('a', slice(0, 1 << 16), torch.ones(1 << 16, 100))\n"
        "assert float(stored['a'].sum()) == 100 << 16\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "KEPT_BYTES", 0)
    stored: Matrices[str] = Matrices(8)
    stored.write("a", slice(0, 4), torch.ones(4, 2))

    class Full:
        def seek(self, _: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stored, "_file", Full())
    with pytest.raises(StoreError, match=r"is full: .* in the environment variable TMPDIR, or take fewer --tokens"):
        stored.write("a", slice(4, 8), torch.ones(4, 2))


def test_where_matrices_are_kept_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = load_model("pocket-decoder", device="cpu"), spec_for(*FAMILIES)
    found = []
    for most in (0, 1 << 30):
        monkeypatch.setattr(scratch, "KEPT_BYTES", most)
        found.append(an.measure(spec, model=model, progress=False))
    assert numbers(found[0]) == numbers(found[1])
    assert found[0].attachments.keys() == found[1].attachments.keys()


def test_states_and_gradients_of_all_sites_are_never_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up reads a matrix of its own, which goes when it is no longer held."""
    monkeypatch.setattr(scratch, "KEPT_BYTES", 0)
    model, spec = load_model("pocket-decoder", device="cpu"), spec_for("alignment")
    probe = draw_probe(spec, model.tokenizer, load_corpus("pydoc"))
    probed = Probed(model=model, probe=probe, sites=select_sites(model.layout, spec.sites), spec=spec)
    site = probed.sites[0]
    for look in (lambda: probed.fit_states[site], lambda: probed.gradients.sites[site].gradients):
        assert look().data_ptr() != 0
        first, second = look(), look()
        assert first is not second
        assert torch.equal(first, second)
    assert len(probed.gradients.sites) == len(probed.fit_states) == 2


PEAK = """
import json, resource, sys
import torch
torch.set_num_threads(1)
import anisoscope as an
metrics, tokens = sys.argv[1].split("+"), int(sys.argv[2])
spec = an.Spec(model="pocket-decoder", metrics=tuple(metrics), tokens=tokens, seq_len=128)
an.measure(spec, progress=False)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


@pytest.mark.slow(reason="ten processes of up to half a minute")
@pytest.mark.parametrize("families", [*FAMILIES, "+".join(FAMILIES)])
def test_memory_hardly_grows_with_the_number_of_tokens(families: str) -> None:
    peaks = []
    for tokens in (8192, 65536):
        command = [*APART, sys.executable, "-c", PEAK, families, str(tokens)]
        peaks.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    assert peaks[1] <= 1.2 * peaks[0], peaks
