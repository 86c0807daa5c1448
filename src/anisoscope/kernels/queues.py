"""How a GPU and its host work side by side.

What a GPU is given it does in the order in which it was given, and a number that the host asks for comes after all of
it. Large work that nobody waits for yet goes on a second queue: it runs beside what is given later, and only `rejoin`
puts it before what follows. The host has only small things to do beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


# One for each GPU: freed memory goes back to the queue it was taken for.
@cache
def _second(device: torch.device) -> torch.cuda.Stream | None:
    """None where there is but one queue."""
    return torch.cuda.Stream(device) if device.type == "cuda" and torch.cuda.is_available() else None


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Give the second queue what is asked for inside, after all that was given before.

    What it reads must live until `rejoin`, and results are not to be read before.
    """
    second = _second(device)
    if second is None:
        yield
        return
    second.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(second):
        yield


def rejoin(device: torch.device) -> None:
    """What follows comes after all that the second queue was given."""
    second = _second(device)
    if second is not None:
        torch.cuda.current_stream(device).wait_stream(second)


@contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """Beside a GPU the host has only small things to do: waking many threads for them takes longer than they do."""
    if device.type == "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
