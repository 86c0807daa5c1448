"""A progress bar with time left, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """What long work reports to."""

    def advance(self, steps: int) -> None:
        """So many more steps are done."""
        ...


class _Silent:
    def advance(self, steps: int) -> None:
        pass


@contextmanager
def show_progress(title: str, *, total: int, shown: bool) -> Iterator[Progress]:
    """A bar while the work inside lasts; nothing where it is not wanted or stderr is no terminal."""
    if not shown:
        yield _Silent()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Forward passes and measuring alternate: only the speed over the whole run says when it will end.
    with Bar(
        *columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True), speed_estimate_period=86400
    ) as bar:
        task = bar.add_task(escape(title), total=total)

        class _Shown:
            def advance(self, steps: int) -> None:
                bar.advance(task, steps)

        yield _Shown()
