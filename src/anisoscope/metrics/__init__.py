"""The mathematics: one view of a cloud in, one number out. Importing this registers every metric."""

from anisoscope.metrics import (
    alignment,
    angles,
    concepts,
    contextuality,
    curvature,
    drift,
    final_norm,
    linearity,
    neighbors,
    output,
    pinning,
    rogue,
    spectrum,
    updates,
    weights,
)
from anisoscope.metrics.declaration import Metric, all_metrics, find_metrics, metric

__all__ = [
    "Metric",
    "alignment",
    "all_metrics",
    "angles",
    "concepts",
    "contextuality",
    "curvature",
    "drift",
    "final_norm",
    "find_metrics",
    "linearity",
    "metric",
    "neighbors",
    "output",
    "pinning",
    "rogue",
    "spectrum",
    "updates",
    "weights",
]
