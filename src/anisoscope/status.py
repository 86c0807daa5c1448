"""What a run has done, is doing and has still to do, as its folder tells; for `status` and for a sweep's live table."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anisoscope.records import Spec
from anisoscope.revisions import training_order
from anisoscope.store import PLACE, Store

# A live table shows what is running and failed, and so many lines in all.
_SHOWN = 16

Announce = Callable[[Spec, str | None], None]
"""What a sweep calls for each unit: its Spec, and why it failed where it did."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The units of a run, by state."""

    rows: tuple[dict[str, Any], ...]
    """key, model, revision, step, corpus, state (done, running, failed, waiting), told (host, or the error)."""
    seconds_left: float | None
    """At the pace since the sweep began; None while there is no pace."""

    def count(self, state: str) -> int:
        """How many units are in a state."""
        return sum(row["state"] == state for row in self.rows)

    def sentence(self) -> str:
        """All of it in one line."""
        counts = {state: self.count(state) for state in ("done", "running", "failed", "waiting")}
        states = [f"{count} {state}" for state, count in counts.items() if count or state == "done"]
        left = "" if self.seconds_left is None else f", about {format_duration(self.seconds_left)} left"
        return ", ".join(states) + left


def survey(store: Store, keys: Sequence[str] | None = None) -> Overview:
    """The state of every unit that is stored, planned, running or failed; or of the keys given."""
    results, running, planned = store.results(), store.running(), store.planned()
    failed = {row["key"]: row for row in store.failures()}
    wanted = {**planned, **failed, **results} if keys is None else dict.fromkeys(keys)
    rows = []
    for key in wanted:
        if key in planned:
            about = planned[key]
        elif key in results:
            about = json.loads(results[key].spec)
        elif key in failed:
            about = failed[key]["spec"]
        else:
            continue
        if key in results:
            state, told = "done", ""
        elif key in running:
            who = running[key]
            state, told = "running", f"{format_duration(time.time() - who['since'])} on {who['host']}"
        elif key in failed:
            state, told = "failed", f"{failed[key]['error']}: {failed[key]['message']}"
        else:
            state, told = "waiting", ""
        rows.append({"key": key, **{name: about.get(name) for name in PLACE}, "state": state, "told": told})
    rows.sort(key=lambda row: (row["model"], training_order(None, row["step"], row["revision"]), row["corpus"]))
    begun, left = store.begun(), sum(row["state"] in ("running", "waiting") for row in rows)
    done = [results[row["key"]].finished for row in rows if row["state"] == "done"]
    return Overview(rows=tuple(rows), seconds_left=_time_left(begun, done, left))


def _time_left(begun: float | None, finished: Sequence[float], left: int) -> float | None:
    """At the pace of those that were finished since the sweep began."""
    since = 0 if begun is None else sum(when >= begun for when in finished)
    return None if begun is None or not left or not since else (time.time() - begun) / since * left


def format_duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def watch(store: Store, keys: Sequence[str], *, shown: bool) -> Iterator[Announce]:
    """A live table on a terminal, a line for each unit elsewhere, or nothing where it is not wanted."""
    if not shown:
        yield lambda spec, error: None
        return
    if not sys.stderr.isatty():
        yield lambda spec, error: _print_line(store, keys, spec, error)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        stop = threading.Event()

        def refresh() -> None:
            while True:
                live.update(_live_table(survey(store, keys)), refresh=True)
                if stop.wait(1.0):
                    return

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield lambda spec, error: None
        finally:
            stop.set()
            thread.join()
    print(survey(store, keys).sentence(), file=sys.stderr)


def _print_line(store: Store, keys: Sequence[str], spec: Spec, error: str | None) -> None:
    seen = survey(store, keys)
    name = f"{spec.model}@{spec.revision}" if spec.revision else spec.model
    state = "done" if error is None else f"failed: {error}"
    print(f"{name} on {spec.corpus}: {state} ({seen.sentence()})", file=sys.stderr, flush=True)


def _live_table(seen: Overview) -> Any:
    """Running and failed units first, then the last that were done."""
    from rich.console import Group
    from rich.text import Text

    order = {"running": 0, "failed": 1, "waiting": 2, "done": 3}
    rows = sorted(seen.rows, key=lambda row: order[row["state"]])[:_SHOWN]
    return Group(as_table(rows), Text(seen.sentence(), style="bold"))


def as_table(rows: Sequence[dict[str, Any]]) -> Any:
    """Units as a rich table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    columns = ("model", "revision", "corpus", "state", "key")
    for name in columns:
        table.add_column(name, overflow="fold")
    table.add_column("")
    for row in rows:
        table.add_row(*(Text(str(row[name] or "")) for name in columns), Text(row["told"]))
    return table
