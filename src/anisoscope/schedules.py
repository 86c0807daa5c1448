"""When to measure in a training, and what measuring may cost. No torch."""

import math
import statistics
from collections import deque
from collections.abc import Callable

import numpy as np

from anisoscope.errors import SpecError

When = Callable[[int], bool]
"""Whether a step is to be measured: a function of the step alone, so that a resumed training goes on as it began."""

# Beyond so many planned steps nobody counts which of them are due.
_COUNTED_STEPS = 1_000_000
_PACES = 51


def every(steps: int) -> When:
    """Steps 0, n, 2n, ...

    >>> [step for step in range(250) if every(100)(step)]
    [0, 100, 200]
    """
    if steps < 1:
        raise SpecError(f"every() wants a number of steps of at least 1; came {steps}")
    return lambda step: step % steps == 0


def log_spaced(count: int, until: int = 100_000) -> When:
    """`count` steps from 0 to `until`, dense at first, then in a constant ratio, which goes on after `until`.

    >>> [step for step in range(2000) if log_spaced(12, until=1000)(step)]
    [0, 1, 2, 4, 8, 16, 32, 63, 126, 251, 501, 1000, 1996]
    """
    if not 3 <= count <= until:
        raise SpecError(f"log_spaced() wants 3 <= count <= until; came count={count}, until={until}")
    # Small whole numbers coincide: more are asked for until enough are different.
    points = count - 1
    while len(steps := {0, *np.round(np.geomspace(1, until, points)).astype(int).tolist()}) < count:
        points += 1
    ratio = math.log(until) / (points - 1)

    def is_due(step: int) -> bool:
        if step <= until:
            return step in steps
        # Due where a multiple of the ratio lies between the step before and this one.
        ahead, behind = (math.floor(math.log(place / until) / ratio + 1e-9) for place in (step, step - 1))
        return ahead > behind

    return is_due


class Ledger:
    """What measuring has cost, held against the time that training has taken.

    A due step may be measured once `budget` times the training time covers what was spent and what one more
    measurement costs. Where the number of steps is known, due steps share the budget of the whole training evenly:
    the many early ones of a log-spaced schedule need not wait for the time that later ones will bring.
    """

    def __init__(self, budget: float, clock: Callable[[], float]) -> None:
        self.budget, self.clock = budget, clock
        self.begun = clock()
        self.ended: float | None = None
        self.spent = 0.0
        """Seconds of all measurements."""
        self.last_cost = 0.0
        self.due = 0
        self.steps = self.planned = 0
        self._paces = deque[float](maxlen=_PACES)
        self._left_at: tuple[int, float] | None = None

    def plan(self, when: When, steps: int | None) -> None:
        """So many steps are planned, where that is known; count which of them are due."""
        if steps is not None and steps <= _COUNTED_STEPS:
            self.steps, self.planned = steps, sum(map(when, range(steps + 1)))

    @property
    def trained(self) -> float:
        """Seconds since the beginning that were not spent on measuring."""
        return (self.clock() if self.ended is None else self.ended) - self.begun - self.spent

    def arrive(self, step: int) -> None:
        """Training has come to a step."""
        if self._left_at is not None and step > self._left_at[0]:
            self._paces.append((self.clock() - self._left_at[1]) / (step - self._left_at[0]))
        self._left_at = step, self.clock()

    def charge(self, seconds: float) -> None:
        """A measurement at this step has cost so much."""
        self.spent += seconds
        self.last_cost = seconds
        if self._left_at is not None:
            self._left_at = self._left_at[0], self.clock()

    def allows(self) -> bool:
        """Whether the budget covers one more measurement as dear as the last."""
        return self.spent + self.last_cost <= self.budget * self._earned()

    def _earned(self) -> float:
        """Seconds of training that due steps up to now may draw upon."""
        if not (self.planned and self._paces):
            return self.trained
        # The median: a first step that compiles says nothing about the others.
        whole = self.steps * statistics.median(self._paces)
        return max(self.trained, whole * min(self.due / self.planned, 1.0))
