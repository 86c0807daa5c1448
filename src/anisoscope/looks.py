"""The families that are measured on a probe, and what each makes of it: rows, and what to keep."""

from collections.abc import Callable, Collection

import numpy as np

from anisoscope import alignment, concepts, curvature, pinning
from anisoscope.metrics import find_metrics
from anisoscope.past import Past
from anisoscope.probed import Probed, ProbeRow

VIEWS = (*alignment.VIEWS, *pinning.VIEWS, *curvature.VIEWS, *concepts.VIEWS)
Look = Callable[[], tuple[list[ProbeRow], dict[str, np.ndarray]]]


def looks_at(
    probed: Probed, names: Collection[str], *, past: Past | None = None, decode: Callable[[int], str]
) -> dict[str, Look]:
    """What is to be done for the metrics named, by family; nothing is run yet."""
    views = {metric.needs for metric in find_metrics(list(names))}

    def look_at_gradients() -> tuple[list[ProbeRow], dict[str, np.ndarray]]:
        aligned = alignment.align(probed, names, past)
        return aligned.rows, aligned.attachments

    def look_at_types() -> tuple[list[ProbeRow], dict[str, np.ndarray]]:
        return list(pinning.pinning_rows(probed, names)), pinning.pinning_attachments(probed)

    looks: dict[str, tuple[tuple[str, ...], Look]] = {
        "alignment": (alignment.VIEWS, look_at_gradients),
        "pinning": (pinning.VIEWS, look_at_types),
        "curvature": (curvature.VIEWS, lambda: (list(curvature.curvature_rows(probed, names)), {})),
        "concepts": (concepts.VIEWS, lambda: concepts.concept_rows(probed, names, decode)),
    }
    return {family: look for family, (needs, look) in looks.items() if views & set(needs)}
