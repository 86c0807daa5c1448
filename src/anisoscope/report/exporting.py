"""A report as a file: the page, its figures as pictures, its table as CSV or Parquet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope import tables
from anisoscope.atomic import check_target, write_file
from anisoscope.errors import SpecError, StoreError
from anisoscope.report.gathering import Report, gather
from anisoscope.report.page import plain_name, render

PICTURES = ("png", "svg", "pdf")
FORMATS = ("html", *PICTURES, *tables.FORMATS)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What came of it."""

    report: Report
    path: Path
    """A file, or the folder of the pictures."""
    count: int
    """Files written."""
    failed: tuple[str, ...]
    """Figures that could not be drawn, each with its reason."""


def write_report(folders: Sequence[Path], output: Path | None = None, *, how: str = "html", seed: int = 0) -> Written:
    """Gather and write; `output` is a file, and for pictures a folder."""
    if how not in FORMATS:
        raise SpecError(f"a report is written as {', '.join(FORMATS)}; came {how!r}")
    path = output or Path("figures" if how in PICTURES else f"table.{how}" if how in tables.FORMATS else "report.html")
    if how not in PICTURES:
        check_target(path)
    report = gather(folders, seed=seed, drawn=how not in tables.FORMATS)
    if not report.table.num_rows:
        raise StoreError(f"there are no finished units in {', '.join(map(str, folders))}")
    if how in PICTURES:
        return _write_pictures(report, path, how)
    if how in tables.FORMATS:
        tables.write_table(report.table, path, to=how)
    else:
        write_file(path, render(report))
    return Written(report=report, path=path, count=1, failed=())


def _write_pictures(report: Report, folder: Path, how: str) -> Written:
    from anisoscope.figures import save

    count, failed = 0, []
    for name, figure in _named_figures(report):
        try:
            save(figure.draw(), folder / f"{plain_name(name)}.{how}")
            count += 1
        except Exception as error:  # one broken figure must not take the others down
            failed.append(f"{figure.name}: {error}")
    return Written(report=report, path=folder, count=count, failed=tuple(failed))


def _named_figures(report: Report) -> Iterator[tuple[str, Any]]:
    """Every figure with the name of its file: of several runs, each under the name of its own, then the differences."""
    for shown in report.runs:
        for figure in shown.figures:
            yield f"{shown.run.name}-{figure.name}" if len(report.runs) > 1 else figure.name, figure
    for one in report.comparisons:
        for figure in one.figures:
            yield f"{one.other}-less-{one.first}-{figure.name}", figure
