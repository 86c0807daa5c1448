"""What to cite for a run: known without torch, and the same as the declarations say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_export import record
from typer.testing import CliRunner

from anisoscope import __version__
from anisoscope.citing import CORPORA, ITSELF, MODELS, as_bibtex, as_text, cite_run, metric_cites, read_references
from anisoscope.cli import app
from anisoscope.errors import StoreError
from anisoscope.protocols import load_protocol, protocol_names
from anisoscope.records import Spec, Unit
from anisoscope.reproductions import PAPERS
from anisoscope.reproductions.nouns import Paper
from anisoscope.reproductions.plans import published
from anisoscope.store import Store

ROOT = Path(__file__).parent.parent


def store_with(folder: Path, *metrics: str, model: str = "EleutherAI/pythia-70m", corpus: str = "enwik8") -> Store:
    spec = Spec(model=model, corpus=corpus)
    records = tuple(record(spec, "block.0", metric, 1.0) for metric in metrics)
    Store(folder).put(Unit(spec=spec, provenance={"notes": []}, records=records))
    return Store(folder)


def test_the_map_without_torch_is_that_of_the_declarations() -> None:
    from anisoscope.metrics import all_metrics

    declared = {name: metric.cite for name, metric in all_metrics().items()}
    assert dict(metric_cites()) == declared, "run `make docs`"
    assert set(declared.values()) <= set(read_references())


def test_every_key_that_can_be_cited_has_an_entry() -> None:
    keys = {*MODELS.values(), *CORPORA.values(), *(load_protocol(name).cite for name in protocol_names())}
    assert keys <= set(read_references())
    for entry in read_references().values():
        assert entry.count("{") == entry.count("}")
        assert re.search(r"^\s*title = \{.+\},?$", entry, re.MULTILINE), entry
        assert re.search(r"^\s*year = \{\d{4}\},?$", entry, re.MULTILINE), entry


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_every_model_of_the_papers_has_a_reference(paper: Paper, tmp_path: Path) -> None:
    for number, item in enumerate(published(paper)):
        name = item if isinstance(item, str) else item.model
        found = cite_run(store_with(tmp_path / str(number), "twonn", model=name))
        assert not found.unknown, name


@pytest.mark.parametrize("model", ["FacebookAI/xlm-roberta-base", "tiiuae/Falcon3-1B-Base", "LLM360/K2-V2"])
def test_a_model_of_a_like_name_does_not_get_another_models_paper(model: str, tmp_path: Path) -> None:
    assert cite_run(store_with(tmp_path, "twonn", model=model)).unknown == (model,)


def test_what_was_computed_is_cited_and_nothing_else(tmp_path: Path) -> None:
    found = cite_run(store_with(tmp_path, "leading_variance", "gride_128", "of_a_plugin"))
    assert [one.key for one in found.references] == [
        ITSELF,
        "denti2022generalized",
        "razzhigaev2024shape",
        "biderman2023pythia",
        "mahoney2011large",
    ]
    assert found.unknown == ("of_a_plugin",)
    text = as_bibtex(found)
    assert "% leading_variance\n@inproceedings{razzhigaev2024shape," in text
    assert text.endswith("% no reference known: of_a_plugin")
    assert "twonn" not in text


def test_a_reproduction_cites_its_paper(tmp_path: Path) -> None:
    store = store_with(tmp_path, "mean_cosine", model="pocket-decoder", corpus="pydoc")
    assert [one.key for one in cite_run(store).references] == [ITSELF, "ethayarajh2019contextual"]
    (tmp_path / "reproduction.json").write_text(json.dumps({"protocol": "machina2024"}))
    assert "machina2024anisotropy" in [one.key for one in cite_run(store).references]


def test_references_to_read_have_no_tex_in_them(tmp_path: Path) -> None:
    store = store_with(tmp_path, "common_drift", "query_drift", "mean_cosine")
    text = as_text(cite_run(store))
    assert "Biś et al. 2021. Too Much in Common" in text
    assert "Ethayarajh. 2019. How Contextual" in text
    assert "Comparing the Geometry of BERT, ELMo, and GPT-2" in text
    assert "\\" not in text
    assert "{" not in text


def test_anisoscope_is_cited_as_its_citation_file_says(tmp_path: Path) -> None:
    entry = cite_run(store_with(tmp_path, "twonn")).references[0].bibtex
    stated = (ROOT / "CITATION.cff").read_text()
    for name, value in (("title", "anisoscope"), ("version", __version__)):
        assert f"{name} = {{{value}}}" in entry
        assert f"\n{name}: {value}\n" in stated
    assert "author = {{The anisoscope authors}}" in entry
    assert "name: The anisoscope authors" in stated


def test_the_command_prints_bibtex_without_torch(tmp_path: Path) -> None:
    store_with(tmp_path, "twonn")
    code = (
        "import sys\nfrom anisoscope.cli import app\n"
        f"try:\n    app(['cite', {str(tmp_path)!r}])\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "@article{facco2017estimating," in done.stdout
    assert "anisoscope.citing" in done.stderr.split()
    assert not {"torch", "transformers"} & set(done.stderr.split())


def test_empty_runs_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no finished unit"):
        cite_run(Store(tmp_path))
    refused = CliRunner().invoke(app, ["cite", str(tmp_path), "--format", "word"])
    assert refused.exit_code == 2
    assert "bibtex or text" in refused.stderr


def test_the_package_ships_what_it_cites() -> None:
    """Whatever lies under src/anisoscope is in the wheel."""
    assert (ROOT / "src" / "anisoscope" / "references.bib").is_file()
