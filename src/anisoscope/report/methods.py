"""What each metric says of itself, for readers without torch: kept in assets/metrics.json, written by `make docs`."""

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Method:
    """One metric, as the report explains it."""

    name: str
    family: str
    summary: str
    equation: str
    """As the docstring has it; empty where there is none."""
    prose: str
    """What its ends mean, how it can mislead, where it leaves its source."""
    facts: Mapping[str, str]


def describe(metrics: Iterable[Any]) -> str:
    """The text of assets/metrics.json, from the declarations of `anisoscope.metrics.all_metrics()`."""
    rows = []
    for metric in metrics:
        low, high = metric.bounds
        rows.append(
            {
                "name": metric.name,
                "family": metric.family,
                "doc": _without_examples(inspect.cleandoc(metric.function.__doc__ or "")),
                "facts": {
                    "null": f"none: {metric.reason}" if metric.null == "none" else metric.null,
                    "range": f"{_bound(low)} to {_bound(high)}",
                    "no number when": metric.undefined,
                    "source": metric.cite,
                    "version": str(metric.version),
                },
            }
        )
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def methods_of(names: Iterable[str]) -> list[Method]:
    """Metrics by name; one that came with a plugin is named, and says that it is not described here."""
    text = files("anisoscope.report").joinpath("assets/metrics.json").read_text("utf-8")
    known = {row["name"]: row for row in json.loads(text)}
    return sorted((_method(name, known.get(name)) for name in names), key=lambda one: (one.family, one.name))


def _method(name: str, row: Mapping[str, Any] | None) -> Method:
    if row is None:
        missing = "This metric is not one of the package's own: whoever declared it describes it."
        return Method(name=name, family="other", summary=missing, equation="", prose="", facts={})
    summary, _, rest = row["doc"].partition("\n")
    lines = rest.strip("\n").split("\n")
    # The first indented lines are the equation that is computed.
    start = next((place for place, line in enumerate(lines) if line.startswith("    ")), len(lines))
    end = next((place for place in range(start, len(lines)) if lines[place][:1].strip()), len(lines))
    prose = "\n".join([*lines[:start], *lines[end:]]).strip()
    equation = inspect.cleandoc("\n" + "\n".join(lines[start:end]))
    return Method(name=name, family=row["family"], summary=summary, equation=equation, prose=prose, facts=row["facts"])


def _without_examples(doc: str) -> str:
    """A docstring up to its first doctest."""
    return doc.split("\n>>> ")[0].rstrip()


def _bound(value: float) -> str:
    return "∞" if math.isinf(value) and value > 0 else "−∞" if math.isinf(value) else f"{value:g}"
