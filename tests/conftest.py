"""Small models and texts that several test files share."""

import os
from pathlib import Path
from typing import Any

import pytest

# Before torch is loaded: two workers with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


# Many small tests that share nothing dear: dealt out one by one, they even out what the other files leave.
SCATTERED = {
    *("test_architectures", "test_claims", "test_imports", "test_kernels"),
    *("test_metrics_common", "test_metrics_known", "test_nulls"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one worker, which builds their fixtures once.

    Not by marks: pytest-xdist 3.8 writes groups into a field that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if Path(file).stem in SCATTERED else file

    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow mark needs a reason."""
    for item in items:
        for mark in item.iter_markers("slow"):
            assert mark.kwargs.get("reason"), f"{item.nodeid} is marked slow without a reason"


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache folder."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("ANISOSCOPE_DATA", raising=False)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of ordinary and repeated words, in one folder."""
    import random

    folder = tmp_path_factory.mktemp("corpus")
    chooser = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfglmprst" for b in "aeiou" for c in ("n", "r", "lly", "ck", "sts")]
    for number in range(40):
        text = " ".join(chooser.choices(words, weights=[1 / (k + 1) for k in range(len(words))], k=900))
        (folder / f"document{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> dict[str, Path]:
    """A small decoder and a small encoder, saved as folders, with their tokenizers."""
    from anisoscope.corpora import load_corpus
    from anisoscope.lab import build_untrained

    corpus = load_corpus(str(corpus_file))
    folders = {}
    for kind in ("decoder", "encoder"):
        model = build_untrained(kind, corpus)
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.module.save_pretrained(folders[kind])
        model.tokenizer.save_pretrained(folders[kind])
    return folders
