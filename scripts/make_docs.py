"""Write the generated pages: docs/metrics.md from the declarations, docs/cli.md from the help texts; and which paper
each estimator cites and what it says of itself, for readers without torch (data/cites.json, report/assets).

python scripts/make_docs.py            write them
python scripts/make_docs.py --check    fail when they are stale
"""

import inspect
import os
import sys
from pathlib import Path

# The help text is laid out for the width of a terminal: pin it before anything looks.
os.environ |= {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}

from typer.testing import CliRunner

from anisoscope.citing import cites_json
from anisoscope.cli import app
from anisoscope.metrics import all_metrics
from anisoscope.report.methods import describe

DOCS = Path(__file__).parent.parent / "docs"
CITES = Path(__file__).parent.parent / "src" / "anisoscope" / "data" / "cites.json"
METHODS = Path(__file__).parent.parent / "src" / "anisoscope" / "report" / "assets" / "metrics.json"
COMMANDS = "measure sweep train ls status doctor demo claims concepts report serve reproduce export cite"


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "Made by `make docs` from the declarations in src/anisoscope/metrics; do not edit. The words: docs/methods.md.",
        "",
    ]
    family = None
    for metric in all_metrics().values():
        if metric.family != family:
            family = metric.family
            lines += [f"## {family}", ""]
        low, high = metric.bounds
        facts = {
            "version": metric.version,
            "null": f"none: {metric.reason}" if metric.null == "none" else metric.null,
            "invariant to": ", ".join(sorted(metric.invariant_to)) or "nothing",
            "range": f"{low:g} to {high:g}",
            "populations": ", ".join(metric.populations),
            "settings": ", ".join(metric.settings) or "none",
            "NaN when": metric.undefined,
            "source": metric.cite,
        }
        lines += [f"### `{metric.name}`", "", "```text", inspect.cleandoc(metric.function.__doc__ or ""), "```", ""]
        lines += [" · ".join(f"{name}: {value}" for name, value in facts.items()), ""]
    return "\n".join(lines)


def cli_page() -> str:
    lines = ["# Command line", "", "Made by `make docs` from the help texts; do not edit.", ""]
    for command in ((), *((name,) for name in COMMANDS.split())):
        shown = CliRunner().invoke(app, [*command, "--help"], prog_name="anisoscope").output
        text = "\n".join(line.rstrip() for line in shown.strip().splitlines())
        lines += [f"## `{' '.join(('anisoscope', *command))}`", "", "```text", text, "```", ""]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    cites = cites_json((name, metric.cite) for name, metric in all_metrics().items())
    methods = describe(all_metrics().values())
    return {DOCS / "metrics.md": metrics_page(), DOCS / "cli.md": cli_page(), CITES: cites, METHODS: methods}


def stale() -> list[str]:
    return [path.name for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]


def main() -> None:
    if "--check" in sys.argv:
        if stale():
            sys.exit(f"stale: {', '.join(stale())}; run `make docs`")
        return
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
