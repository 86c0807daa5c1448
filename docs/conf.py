"""The documentation as a site, by Sphinx: `make site`. Nothing is fetched while it is built, nor while it is read.

The pages are written to be read in the repository too, so two things are done to them here:

- A link to a file that is no page (source code, a stored run) becomes the file's name: a site has no such file.
- A notebook is a page: its text and code, without outputs.
"""

import json
import re
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)\)")

project = "anisoscope"
author = "The anisoscope authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["runs"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
html_theme = "furo"
html_title = "anisoscope"
html_copy_source = False
# In a block of text an arrow is an arrow; nothing is to be coloured by guessing.
highlight_language = "text"


class NotebookParser(MystParser):
    """Reads the cells of a notebook as a page."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        """Parse the page that the notebook makes."""
        super().parse(notebook_page(inputstring, Path(document["source"]).name), document)


def notebook_page(text: str, name: str) -> str:
    """Text and code of a notebook, in Markdown, with the file itself to take home."""
    shown = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        shown.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    shown.insert(1, f"This page is a notebook, {{download}}`{name}`; its outputs are yours to make.")
    return "\n\n".join(shown) + "\n"


def name_files(text: str, folder: Path) -> str:
    """Say the name of what is linked but is no part of the site. What is not there stays, and Sphinx warns of it."""

    def named(link: re.Match[str]) -> str:
        path = (folder / link[2]).resolve()
        outside = path.is_relative_to(ROOT) and (not path.is_relative_to(DOCS) or path.is_relative_to(DOCS / "runs"))
        return f"{link[1]} (`{path.relative_to(ROOT).as_posix()}`)" if outside and path.exists() else link[0]

    return _LINK.sub(named, text)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = name_files(source[0], Path(app.env.doc2path(name)).parent)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx."""
    app.add_source_parser(NotebookParser)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
