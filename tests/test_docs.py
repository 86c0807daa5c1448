"""Documentation that cannot lie: generated pages are fresh, protocols are loadable, examples run."""

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from anisoscope.metrics import find_metrics
from anisoscope.protocols import load_protocol, protocol_names
from anisoscope.records import Spec

ROOT = Path(__file__).parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh_and_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_docs = load_script("make_docs")
    assert make_docs.stale() == []
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert sorted(make_docs.stale()) == ["cli.md", "metrics.md"]


def test_every_page_that_is_linked_exists() -> None:
    checked = 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
                checked += 1
    assert checked


@pytest.mark.parametrize("page", ["CHANGELOG.md", "docs/limits.md", "docs/log.md", "README.md"])
def test_no_sentence_stands_twice_on_a_page(page: str) -> None:
    lines = [line for line in (ROOT / page).read_text().splitlines() if len(line) > 80 and not line.startswith("|")]
    assert lines
    assert len(lines) == len(set(lines))


def test_the_readme_tree_names_every_room() -> None:
    tree = (ROOT / "README.md").read_text()
    modules = {path.name for path in (ROOT / "src" / "anisoscope").glob("*.py")}
    assert {"__init__.py", "cli.py"} <= modules
    for name in modules:
        assert name in tree, name


def test_the_readme_metric_example_works() -> None:
    """The metric a newcomer is shown is really accepted and measured."""
    import numpy as np

    import anisoscope as an
    from anisoscope.metrics import declaration

    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(# src/anisoscope/metrics.*?)```", text, re.DOTALL)
    try:
        exec(code, {})
        points = np.array([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        assert an.estimate(points, ["median_norm"])["median_norm"].value == 1.0
    finally:
        declaration._REGISTRY.pop("median_norm", None)


def test_no_page_names_a_private_place() -> None:
    words = re.compile(r"(^|[^A-Za-z0-9_.-])/(root|home|work)/|\.\./shared")
    pages = [path for part in ("src", "docs", "scripts") for path in (ROOT / part).rglob("*.*")]
    for path in [*pages, *ROOT.glob("*.*")]:
        if path.suffix in (".py", ".md", ".toml", ".txt", ".bib", ".cff"):
            assert not words.search(path.read_text()), path


@pytest.mark.parametrize("name", protocol_names())
def test_a_protocol_is_a_spec_with_the_papers_models(name: str) -> None:
    protocol = load_protocol(name)
    spec = Spec(model=protocol.models[0], **protocol.spec)
    assert find_metrics([item for item in spec.metrics if isinstance(item, str)])
    assert protocol.notes
    cited = re.findall(r"@\w+\{([^,]+),", (ROOT / "src" / "anisoscope" / "references.bib").read_text())
    assert protocol.cite in cited
    assert len(cited) == len(set(cited))


@pytest.mark.parametrize("name", ["razzhigaev2024-print", "razzhigaev2024-code"])
def test_the_shape_of_learning_lists_its_models(name: str) -> None:
    protocol = load_protocol(name)
    named = " ".join(protocol.models).lower()
    for family in ("bert-base", "roberta", "albert", "opt-125m", "opt-350m", "opt-13b", "llama-2-7b-hf", "llama-2-13b"):
        assert family in named
    for family in ("llama-2-7b-chat", "/gpt2", "gpt-j", "falcon-7b", "falcon-7b-instruct"):
        assert family in named
    assert all(part in " ".join(protocol.dynamics) for part in ("bloom", "pythia-2.8b", "TinyLlama"))


def test_machina_and_mercer_follow_eight_pythias_over_21_checkpoints() -> None:
    protocol = load_protocol("machina2024")
    assert len(protocol.dynamics) == 8
    assert set(protocol.models) - set(protocol.dynamics) == {
        *("EleutherAI/gpt-neox-20b", "tiiuae/falcon-7b", "facebook/opt-6.7b")
    }
    assert protocol.revisions == ("step0", *(f"step{int(i * 143 / 20) * 1000}" for i in range(1, 21)))


def test_print_and_code_differ_as_the_paper_and_its_code_do() -> None:
    printed, released = (load_protocol(f"razzhigaev2024-{name}").spec for name in ("print", "code"))
    assert printed["discard_fraction"] == 0.1
    assert released["discard_fraction"] == 0.8
    assert released["batch_points"] == released["tokens"]


def test_examples_in_docstrings_run() -> None:
    from anisoscope import estimates

    assert doctest.testmod(estimates).failed == 0
    assert doctest.testmod(estimates).attempted > 0
