"""What a metric says of itself. Documentation, `ls metrics`, the common tests and the walk read the declaration."""

import difflib
import functools
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from anisoscope.errors import SpecError

Null = Literal["isotropic", "independent", "exact", "control", "none"]

SPECTRAL = ("all", "typical")
DIMENSIONAL = ("all", "types", "matched")

# What a family brings along besides its members: the final norm is about what it does to these, stage by stage.
BRINGS = {"final_norm": ("mean_cosine", "isoscore", "leading_variance")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """A pure function from one view of a Cloud to one number, with its declaration."""

    name: str
    function: Callable[..., Any]
    """Gives a Tensor, with leading axes where its view has them; a float where the view is one of numbers."""
    family: str
    needs: str
    """The view of Cloud it takes; metrics that need the same view share one computation."""
    version: int
    """Raised with every change of a reported value, with a line in the changelog."""
    invariant_to: frozenset[str]
    """Out of translation, rotation, scale. What is not named here must change the value: both are tested."""
    bounds: tuple[float, float]
    cite: str
    null: Null
    closed_form: Callable[[int, int], float] | None
    """The null as a function of points and dimensions, for `exact` and `independent`."""
    control: Callable[[Any], Tensor] | None
    """The null as a function of the same view, for `control`: what the same points give with the effect undone."""
    reason: str
    """Why there is no null, for `none`."""
    populations: tuple[str, ...]
    """The populations it is measured on unless the Spec names others."""
    settings: tuple[str, ...]
    """Fields of the Spec that are handed to the function."""
    neighbors: int | Literal["neighbors"]
    """How many neighbours it reads: a number, or the Spec's `neighbors`."""
    min_points: Callable[[int, int], int]
    """The fewest points it can work with, from dimensions and neighbours."""
    undefined: str
    """What the data look like when the value is NaN."""
    default: bool
    """Whether asking for its family brings it along."""
    stacked: bool
    """Whether it takes views of many clouds at once: leading axes in, leading axes out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The number itself."""
        return self.function(*args, **kwargs)

    @property
    def summary(self) -> str:
        """The first sentence of its documentation."""
        return (self.function.__doc__ or "").strip().split("\n", 1)[0]


_REGISTRY: dict[str, Metric] = {}


def metric(
    *,
    family: str,
    needs: str,
    version: int,
    cite: str,
    null: Null,
    invariant_to: str = "translation rotation scale",
    bounds: tuple[float, float] = (0.0, float("inf")),
    closed_form: Callable[[int, int], float] | None = None,
    control: Callable[[Any], Tensor] | None = None,
    reason: str = "",
    populations: tuple[str, ...] = SPECTRAL,
    settings: tuple[str, ...] = (),
    neighbors: int | Literal["neighbors"] = 0,
    min_points: int | Callable[[int, int], int] = 2,
    undefined: str = "the points do not vary",
    name: str | None = None,
    default: bool = True,
    stacked: bool = False,
) -> Callable[[Callable[..., Tensor | float]], Metric]:
    """Declare and register a metric; third parties do the same in the entry-point group `anisoscope.metrics`."""
    if null in ("exact", "independent") and closed_form is None:
        raise TypeError(f"a metric with null {null!r} needs its closed form")
    if null == "control" and control is None:
        raise TypeError("a metric with null 'control' needs its control")
    if null == "none" and not reason:
        raise TypeError("a metric without a null needs a reason")

    def declare(function: Callable[..., Tensor | float]) -> Metric:
        declared = Metric(
            name=name or function.__name__,
            function=function,
            family=family,
            needs=needs,
            version=version,
            invariant_to=frozenset(invariant_to.split()),
            bounds=bounds,
            cite=cite,
            null=null,
            closed_form=closed_form,
            control=control,
            reason=reason,
            populations=populations,
            settings=settings,
            neighbors=neighbors,
            min_points=_as_function(min_points),
            undefined=undefined,
            default=default,
            stacked=stacked,
        )
        if declared.name in _REGISTRY:
            raise TypeError(f"two metrics are called {declared.name!r}")
        _REGISTRY[declared.name] = declared
        return declared

    return declare


def _as_function(count: int | Callable[[int, int], int]) -> Callable[[int, int], int]:
    return count if callable(count) else lambda d, k: count


@functools.cache
def _load_plugins() -> None:
    for entry in importlib.metadata.entry_points(group="anisoscope.metrics"):
        entry.load()


def all_metrics() -> dict[str, Metric]:
    """Every declared metric by name, those of installed plugins too."""
    _load_plugins()
    return dict(sorted(_REGISTRY.items(), key=lambda item: item[1].family))


def find_metrics(names: Iterable[str], *, gride_scales: Iterable[int] = ()) -> list[Metric]:
    """The metrics that names of estimators and families stand for, without repeats, in the order asked for."""
    known = all_metrics()
    families = {item.family for item in known.values()}
    scales = {f"gride_{k}" for k in gride_scales}
    found: dict[str, Metric] = {}
    for name in names:
        if name in known:
            found[name] = known[name]
        elif name in families:
            members = (item for item in known.values() if item.family == name)
            found |= {item.name: item for item in members if item.default or item.name in scales}
            found |= {other: known[other] for other in BRINGS.get(name, ())}
        else:
            close = difflib.get_close_matches(name, [*known, *sorted(families)], n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "`anisoscope ls metrics` lists them"
            raise SpecError(f"unknown metric {name!r}; {hint}")
    if not found:
        raise SpecError("no metrics were asked for; `anisoscope ls metrics` lists them")
    return list(found.values())
