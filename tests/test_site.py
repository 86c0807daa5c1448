"""The documentation as readers meet it: the site builds, its links and pictures lead somewhere, the notebook runs."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from anisoscope.figures import dynamics_data
from anisoscope.store import Store

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "runs" not in path.relative_to(DOCS).parts]
NOTEBOOK = DOCS / "tutorials" / "first-look.ipynb"
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")

pytestmark = pytest.mark.xdist_group("site")


def build(source: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(DOCS, target)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return target


class Links(HTMLParser):
    """What a page points to, what it loads, and the places in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "src" in found or (tag == "link" and "href" in found):
            self.loads.append(found.get("src") or found["href"])


def lost(site: Path) -> list[str]:
    """Links and pictures of a site that lead nowhere, and whatever is loaded from elsewhere."""
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    found = []
    for page, links in pages.items():
        for link in [*links.links, *links.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in links.loads and parts.scheme != "data":
                    found.append(f"{page.name} loads {link}")
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = target.exists() and (not parts.fragment or unquote(parts.fragment) in pages[target].places)
            if not there:
                found.append(f"{page.name} -> {link}")
    return found


def test_the_site_has_every_page_and_the_notebook(site: Path) -> None:
    names = [path.relative_to(DOCS).with_suffix(".html") for path in [*PAGES, NOTEBOOK]]
    assert len(names) > 20
    assert [name for name in names if not (site / name).exists()] == []


def test_every_link_and_picture_of_the_site_leads_somewhere(site: Path) -> None:
    assert lost(site) == []


def test_lost_links_pictures_and_strangers_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#gone"></a><a href="c.html"></a><img src="d.png">'
        '<script src="https://example.org/e.js"></script><a href="https://example.org"></a>'
    )
    wanted = ["a.html -> b.html#gone", "a.html -> c.html", "a.html -> d.png", "a.html loads https://example.org/e.js"]
    assert sorted(lost(tmp_path)) == wanted


@pytest.mark.parametrize("fault", ["[gone](gone.md)", "![gone](gone.png)", "[gone](index.md#gone)"])
def test_a_fault_in_a_page_stops_the_build(tmp_path: Path, fault: str) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    shutil.copy(DOCS / "conf.py", source)
    (source / "index.md").write_text("# A page\n\nAll is well.\n")
    assert build(source, tmp_path / "good").returncode == 0
    (source / "index.md").write_text(f"# A page\n\n{fault}\n")
    done = build(source, tmp_path / "bad")
    assert done.returncode != 0
    assert "gone" in done.stderr


def load_make_figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / "scripts" / "make_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_the_script_from_a_stored_run() -> None:
    script = load_make_figures()
    made = {f"{script.file_name(run, name)}.png" for run, names in script.SHOWN.items() for name in names}
    assert {path.name for path in (DOCS / "figures").iterdir()} == made
    assert all((DOCS / "runs" / run).is_dir() for run in script.SHOWN)
    shown = 0
    for page in [*PAGES, ROOT / "README.md"]:
        for pair in _PICTURE.findall(page.read_text("utf-8")):
            picture = (page.parent / (pair[0] or pair[1])).resolve()
            assert picture.parent == DOCS / "figures", f"{page.name} shows {picture}"
            assert picture.name in made, f"{page.name} shows {picture.name}"
            shown += 1
    assert shown >= 18


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_a_picture_has_a_caption_below_it(page: Path) -> None:
    paragraphs = page.read_text("utf-8").split("\n\n")
    for picture, below in pairwise(paragraphs):
        if picture.startswith(("![", "<img")):
            assert re.fullmatch(r"\*.{80,}\*", below.strip(), re.DOTALL), f"{page.name}: {picture} has no caption"


def test_what_the_pages_say_of_the_large_runs_is_in_them() -> None:
    table = Store(DOCS / "runs" / "large").table()

    def course(metric: str, population: str) -> dict[tuple[str, int], float]:
        rows = dynamics_data(table, metric=metric, populations=[population]).to_pylist()
        return {(row["model"], row["step"]): row["value"] for row in rows}

    types, axis, cosine = course("twonn", "types"), course("leading_variance", "all"), course("mean_cosine", "all")
    for model, begin, low, end in (("large-decoder", 70, 19, 33), ("large-encoder", 48, 12, 22)):
        mine = {step: value for (name, step), value in types.items() if name == model}
        assert (round(mine[0]), round(min(mine.values())), round(mine[3816])) == (begin, low, end)
    for model, top, last in (("large-decoder", 0.36, 0.05), ("large-encoder", 0.76, 0.05)):
        mine = {step: value for (name, step), value in axis.items() if name == model}
        assert max(mine, key=lambda step: mine[step]) == 38
        assert (round(mine[38], 2), round(mine[3816], 2)) == (top, last)
        assert max(value for step, value in mine.items() if step >= 379) < 0.09
    assert (round(cosine["large-decoder", 14], 2), round(cosine["large-encoder", 3816], 2)) == (0.71, 0.26)


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 7
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


# In a process of its own: a kernel's client warns of things that are not ours.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
from pathlib import Path
path = Path(sys.argv[1])
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
nbformat.write(notebook, sys.argv[2])
"""


def run_notebook(path: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(path), str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_notebook_runs_and_says_what_its_text_says(tmp_path: Path) -> None:
    done = run_notebook(NOTEBOOK, tmp_path / "done.ipynb")
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "done.ipynb").read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
    said = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
    assert "“bell” is inconclusive: among as many claims as were judged, the evidence against it may be chance" in said
    assert "“flat” is inconclusive: the interval includes 0.1" in said
    assert "“bell” is inconclusive: an interval needs 8 batches" in said
    assert "large-encoder step   38: 0.761" in said
    assert "{'True': 0, 'False': 0, 'None': 55}" in said
    assert "step    0  hardest control  0.88, exceeded in 6 blocks of 6" in said
    assert "step   64  hardest control  0.98, exceeded in 0 blocks of 6" in said


def test_a_notebook_that_fails_is_seen(tmp_path: Path) -> None:
    broken = json.loads(NOTEBOOK.read_text("utf-8"))
    cell = next(cell for cell in broken["cells"] if cell["cell_type"] == "code")
    broken["cells"] = [{**cell, "source": ["1 / 0"]}]
    (tmp_path / "broken.ipynb").write_text(json.dumps(broken))
    done = run_notebook(tmp_path / "broken.ipynb", tmp_path / "done.ipynb")
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
