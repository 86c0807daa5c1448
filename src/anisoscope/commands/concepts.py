"""What reads concepts: `concepts`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anisoscope.commands.shared import Debug, Json, app, open_run, reporting
from anisoscope.errors import SpecError

if TYPE_CHECKING:
    from anisoscope.store import Store
    from anisoscope.tracks import Attached, Traced

# Tokens and contexts in a printed table; JSON has them all.
SHOWN_TOKENS, SHOWN_CONTEXTS = 6, 2


@app.command()
def concepts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    site: Annotated[str, typer.Option(help="Site, or glob over sites.")] = "*",
    model: Annotated[str | None, typer.Option(help="Only this model, or run.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the concepts of a run's sites, and how they were born, turned and died over its checkpoints.

    Example: anisoscope concepts runs/pythia --site block.3
    """
    with reporting(debug):
        from anisoscope.tracks import trace_concepts

        found = list(trace_concepts(_attached(open_run(run), model), site))
        if not found:
            raise SpecError(f"no concepts at {site} in {run}; measure with --metrics concepts")
        if as_json:
            print(json.dumps([one.as_json() for one in found], ensure_ascii=False))
        else:
            for one in found:
                print_concepts(one)


def _attached(store: "Store", model: str | None) -> Iterator["Attached"]:
    """The units of a store that have concepts."""
    from anisoscope.store import name_trainings
    from anisoscope.tracks import Attached

    names = ["model", "corpus", "stage", "step", "revision"]
    units: dict[str, dict[str, Any]] = {}
    for row in name_trainings(store.table()).select(["key", "metric", *names]).to_pylist():
        if row["metric"].startswith("concept_") and model in (None, row["model"]):
            units.setdefault(row["key"], row)
    for key, row in units.items():
        yield Attached(**{name: row[name] for name in names}, settings=store.spec(key), arrays=store.attachment(key))


def print_concepts(traced: "Traced") -> None:
    """The last checkpoint as a table and, where there are several, the tracks."""
    from rich.table import Table
    from rich.text import Text

    from anisoscope.printing import format_value, open_console

    console, history = open_console(), traced.history
    steps = history.steps
    where = f"{traced.model}, {traced.stack + ' ' if traced.stack else ''}{traced.site}, {traced.corpus}"
    console.print(f"\n{where}: concepts at step {steps[-1]}" if len(steps) > 1 else f"\n{where}")
    table = Table(box=None, pad_edge=False)
    for name in ("concept", "of gradients", "of codes", "sparsity", "replication", "tokens", "in context"):
        table.add_column(name)

    def number(value: float | None) -> str:
        return format_value(float("nan") if value is None else value)

    for row in history.concepts():
        names = ("share_of_energy", "share_of_codes", "sparsity", "replication")
        contexts = "  ".join(row["contexts"][:SHOWN_CONTEXTS])
        cells = [str(row["concept"]), *(number(row[name]) for name in names), _listed(row["top_tokens"]), contexts]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    chance = 1 / history.tables[-1].directions.shape[1]
    console.print(f"A direction that gradients do not know holds {format_value(chance)} of them.")
    if len(steps) < 2:
        return
    lives = Table(box=None, pad_edge=False)
    for name in ("track", "born", "died", "turned", "tokens"):
        lives.add_column(name)
    every = history.lives()
    lasting = [row for row in every if row["checkpoints"] > 1]
    for row in lasting:
        died = "–" if row["death"] is None else str(row["death"])
        cells = (
            str(row["track"]),
            str(row["birth"]),
            died,
            f"{row['turned_degrees']:.0f}°",
            _listed(row["top_tokens"]),
        )
        lives.add_row(*(Text(cell) for cell in cells))
    console.print(f"\nTracks over {len(steps)} checkpoints, steps {steps[0]} to {steps[-1]}:")
    console.print(lives)
    console.print(f"{len(every) - len(lasting)} more were seen at one checkpoint only; --json has them.")


def _listed(tokens: list[str]) -> str:
    return " ".join(repr(token.strip() or token)[1:-1] for token in tokens[:SHOWN_TOKENS])
