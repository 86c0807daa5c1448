"""The report: what was measured, what it says of the papers' claims, figures, method, provenance, warnings, data.

reading     a run folder, whole or half written -> Run
cautions    what a reader should know before trusting a number
comparing   several runs, number by number
methods     what each metric says of itself, without loading the mathematics
packing     tables and charts as compact text for a page
gathering   runs -> Report: everything that is shown
page        Report -> one HTML file that opens offline
exporting   figures and tables as files
"""

from anisoscope.report.gathering import Report as Report
from anisoscope.report.gathering import gather as gather
from anisoscope.report.page import render as render

__all__ = ["Report", "gather", "render"]
