"""The mathematics: one view of a cloud in, one number out. Importing this registers every metric."""

from anisoscope.metrics import angles, linearity, neighbors, output, spectrum
from anisoscope.metrics.declaration import Metric, all_metrics, find_metrics, metric

__all__ = ["Metric", "all_metrics", "angles", "find_metrics", "linearity", "metric", "neighbors", "output", "spectrum"]
