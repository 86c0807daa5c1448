"""A progress bar with time left, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""What long work calls: so many more steps are done."""


@contextmanager
def show_progress(title: str, *, total: int, shown: bool) -> Iterator[Advance]:
    """A bar while the work inside lasts, or nothing where it is not wanted."""
    if not shown:
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    # Forward passes and measuring alternate: only the speed over the whole run says when it will end.
    with Progress(*columns, *left, console=Console(stderr=True), speed_estimate_period=86400) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda steps: bar.advance(task, steps)
