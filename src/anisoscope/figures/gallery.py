"""Every figure that a run has the rows for."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from anisoscope.claims.verdicts import Verdict
from anisoscope.errors import AnisoscopeError
from anisoscope.figures.differences import difference_plans
from anisoscope.figures.drawing import Chart, is_number
from anisoscope.figures.plans import Plan, Source, sources
from anisoscope.records import Unit

SECTIONS = (
    "difference",
    "profiles",
    "dynamics",
    "populations",
    "final norm",
    "dimension",
    "alignment",
    "curvature",
    "concepts",
    "weights",
    "verdicts",
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that can be drawn, with the numbers it shows and a sentence that says what they are."""

    name: str
    """For file names and links: `profile-leading_variance`."""
    section: str
    """One of SECTIONS."""
    title: str
    caption: str
    """What is to be seen, computed from the data."""
    data: pa.Table
    draw: Callable[[], Chart]
    """Altair is loaded when this is called."""
    error: str | None = None
    """Why it could not be made; then data is empty and draw raises."""


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Figures of a run, and what was left out."""

    figures: list[Figure]
    omitted: dict[str, list[str]]
    """By section, the titles of figures that were not made."""


def catalogue(table: pa.Table, *, units: Iterable[Unit] = (), verdicts: Sequence[Verdict] = ()) -> list[Figure]:
    """Every figure that a run has rows for, by section. Never raises: a figure that fails says so in its `error`.

    table     of `Store.table()`
    units     of `Store.get`, for owners of the leading axis, embedding matrices, concepts and window lengths
    verdicts  of `judge`

    Where a checkpoint was measured under several settings, the unit with most points is shown and the caption counts
    the others. Models are at most eight to a figure: that is how many colours can be told apart.
    """
    return catalogue_within(table, None, units=units, verdicts=verdicts).figures


def catalogue_within(
    table: pa.Table, most: int | None, *, units: Iterable[Unit] = (), verdicts: Sequence[Verdict] = ()
) -> Catalogue:
    """`catalogue` with at most so many figures: the same number of each kind, metric and corpus as far as they go."""
    planned: list[Plan | Figure] = []
    try:
        for source in sources(table, list(units), list(verdicts)):
            planned += _plans_of(source)
    except Exception as error:
        planned.append(_broken("figures", "profiles", "Figures of this run", error))
    chosen = _choose(planned, len(planned) if most is None else most)
    made = [one if isinstance(one, Figure) else _make(one) for one in chosen]
    omitted: dict[str, list[str]] = {}
    kept = set(map(id, chosen))
    for one in planned:
        if id(one) not in kept:
            omitted.setdefault(one.section, []).append(one.title)
    return Catalogue(
        figures=sorted(_with_own_names(made), key=lambda figure: SECTIONS.index(figure.section)), omitted=omitted
    )


def _choose(planned: Sequence[Plan | Figure], most: int) -> list[Plan | Figure]:
    """The first of every family, then the second of every family, until there are enough; in the order planned.

    Where not even the first ones are few enough, every section has its first family before one has its second.
    """
    members: Counter[str] = Counter()
    families: dict[str, dict[str, int]] = {}
    ranks = []
    for number, one in enumerate(planned):
        family = (one.family or one.name) if isinstance(one, Plan) else one.name
        place = families.setdefault(one.section, {}).setdefault(family, len(families[one.section]))
        ranks.append((members[family], place, number))
        members[family] += 1
    return [planned[number] for number in sorted(number for *_, number in sorted(ranks)[:most])]


def contrast(first: pa.Table, other: pa.Table, *, names: tuple[str, str] = ("first", "other")) -> list[Figure]:
    """Figures of the difference of two runs, where they share metric, population and blocks; never raises.

    first, other  of `Store.table()`
    names         of the runs
    """
    source = Source(section="difference", plans=partial(difference_plans, first, other, names))
    return list(_with_own_names(one if isinstance(one, Figure) else _make(one) for one in _plans_of(source)))


def _plans_of(source: Source) -> list[Plan | Figure]:
    found: list[Plan | Figure] = []
    try:
        found.extend(source.plans())
    except Exception as error:
        found.append(_broken(source.section, source.section, f"Other figures on {source.section}", error))
    return found


def _make(plan: Plan) -> Figure:
    try:
        data = plan.data()
        if plan.need and not any(is_number(value) for value in data[plan.need].to_pylist()):
            raise AnisoscopeError(f"none of {len(data)} rows has a number")
        caption = plan.caption(data)
    except Exception as error:  # one broken figure must not take the others down
        return _broken(plan.name, plan.section, plan.title, error)
    return Figure(
        name=plan.name,
        section=plan.section,
        title=plan.title,
        caption=caption,
        data=data,
        draw=partial(plan.draw, data),
    )


def _broken(name: str, section: str, title: str, error: Exception) -> Figure:
    said = str(error) if isinstance(error, AnisoscopeError) else f"{type(error).__name__}: {error}"

    def draw() -> Chart:
        raise AnisoscopeError(f"{name} could not be made: {said}")

    caption = f"Could not be made: {said}"
    return Figure(name=name, section=section, title=title, caption=caption, data=pa.table({}), draw=draw, error=said)


def _with_own_names(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Names as file names, each once."""
    seen: dict[str, int] = {}
    for figure in figures:
        name = re.sub(r"[^\w.+-]+", "-", figure.name).strip("-.") or "figure"
        seen[name] = seen.get(name, 0) + 1
        yield replace(figure, name=name if seen[name] == 1 else f"{name}-{seen[name]}")
