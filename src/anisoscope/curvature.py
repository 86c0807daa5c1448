"""Curvature at every site: draws from uniform over types to as in text, one reading of each.

States are the `content` tokens of the fit half of the probe: no gradient is needed, so no backward pass is made, and
the test half would come as a masked model reads it. A draw takes a quarter of them, so that uniform draws do not run
out of rare types at once. Frequencies are counted in the documents outside the test half.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.curvature import Curved
from anisoscope.probed import Probed, ProbeRow
from anisoscope.records import Site
from anisoscope.tangent.attenuation import EXPONENTS, FrequencyResponse, measure_frequency_response
from anisoscope.tangent.curvature import Bounded, Curvature, CurvatureSettings

VIEWS = ("curved",)
# Five draws of 2,048 points at width 112 then take a second or two on one core. p is never below 1/80, where .025 is
# asked for; shuffled coordinates are another check, which is not reported.
ANCHORS, FLIPS, SHUFFLES = 64, 79, 1
# Of the points in a draw, and the most points.
DRAWN_SHARE, MOST_DRAWN = 4, 4096
NO_SURFACE = 1.0
_PARTS = {
    "curvature_visibility": "visibility",
    "second_fundamental_form": "form",
    "frequency_attenuation": "attenuation",
}


def curvature_rows(probed: Probed, names: Collection[str]) -> Iterator[ProbeRow]:
    """Every metric of curvature among `names`, at every site."""
    asked = [item for item in all_metrics().values() if item.needs in VIEWS and item.name in names]
    for site in probed.sites if asked else ():
        for population in probed.spec.populations or asked[0].populations:
            states, types = probed.fit_cloud(site, population)
            yield from rows_of_surface(
                states,
                types,
                probed.log_frequency(types).exp(),
                asked,
                site=site,
                population=population,
                rank=probed.spec.curvature_rank,
                seed=probed.spec.seed,
            )
            # Before the next ones are read.
            del states


def rows_of_surface(
    states: Float[Tensor, "n d"],
    types: Int[Tensor, " n"],
    frequencies: Float[Tensor, " n"],
    metrics: Sequence[Metric],
    *,
    site: Site,
    population: str,
    rank: int,
    seed: int,
) -> Iterator[ProbeRow]:
    """The rows of one cloud, whose points have these frequencies of their types."""
    asked = {item.name: item for item in metrics}
    place = {"site": site, "population": population, "dim": states.shape[1], "rank": rank}
    settings = CurvatureSettings(rank=rank, anchors=ANCHORS, flips=FLIPS, shuffles=SHUFFLES, seed=seed)
    only_ends = not asked.keys() & {"curvature_visibility", "second_fundamental_form"}
    exponents = (EXPONENTS[0], EXPONENTS[-1]) if only_ends else EXPONENTS
    found = _respond(states, types, frequencies, exponents, settings)
    for name, metric in asked.items():
        if name == "frequency_attenuation":
            yield from _attenuations(metric, found, place)
            continue
        for exponent, reading in zip(found.exponents, found.curvatures, strict=True):
            yield _reading(metric, reading, f"exponent={exponent:g}", place)


def _respond(
    states: Tensor, types: Tensor, frequencies: Tensor, exponents: Sequence[float], settings: CurvatureSettings
) -> FrequencyResponse:
    if not len(states):
        empty = Curvature(note="cannot tell: there are no points")
        return FrequencyResponse(
            exponents=tuple(exponents),
            curvatures=tuple(empty for _ in exponents),
            frequency_attenuation=Bounded(),
            reweighted_attenuation=Bounded(),
            note=empty.note,
        )
    drawn = max(1, min(len(states) // DRAWN_SHARE, MOST_DRAWN))
    return measure_frequency_response(
        states, types, frequencies, draw_points=drawn, exponents=exponents, settings=settings
    )


def _reading(metric: Metric, reading: Curvature, variant: str, place: dict[str, Any]) -> ProbeRow:
    of_variance = metric.name == "curvature_visibility"
    found = reading.curvature_visibility if of_variance else reading.second_fundamental_form
    notes = [reading.note] if reading.note else []
    if found.value > NO_SURFACE and of_variance:
        notes.append("more variance from curvature than along the tangent: no surface of this rank, at this scale")
    p = {"p": reading.p} if of_variance else {}
    row = _row(metric, found, reading.points, "; ".join(notes) or None, variant, place, **p)
    return row._replace(answer=replace(row.answer, dropped=reading.dropped))


def _attenuations(metric: Metric, found: FrequencyResponse, place: dict[str, Any]) -> Iterator[ProbeRow]:
    points, missing = found.curvatures[0].points, math.isnan(found.reweighted_attenuation.value)
    yield _row(metric, found.reweighted_attenuation, points, found.note if missing else None, None, place)
    yield _row(metric, found.frequency_attenuation, points, found.note, "drawn", place)


def _row(
    metric: Metric,
    found: Bounded,
    points: int,
    note: str | None,
    variant: str | None,
    place: dict[str, Any],
    **columns: Any,
) -> ProbeRow:
    view = Curved(**{_PARTS[metric.name]: found.value})
    row = ProbeRow.of(metric, view, points=points, variant=variant, low=found.low, high=found.high, **columns, **place)
    # The reason says more than the declaration does.
    return row._replace(answer=replace(row.answer, note=note or row.answer.note))
