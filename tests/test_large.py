"""Large runs: no more Python rows and figures than needed. Counted, not timed; scripts/bench.py has the seconds."""

import importlib.util
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from anisoscope import Store
from anisoscope.claims import judge
from anisoscope.figures import catalogue, catalogue_within
from anisoscope.listings import MOST_ROWS, print_status
from anisoscope.report import gather, gathering, page, render
from anisoscope.report.cautions import find_cautions
from anisoscope.report.reading import read_run
from anisoscope.status import Overview


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "large_store.py"
    spec = importlib.util.spec_from_file_location("large_store", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["large_store"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stores(generator: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models on two texts, at 10 checkpoints and at 40."""
    folders = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("large")
    for folder, checkpoints in zip(folders, (10, 40), strict=True):
        generator.make_store(folder, 4 * checkpoints, checkpoints=checkpoints, corpora=("one", "two"))
    return folders


def memory_of(work: Callable[[], Any]) -> int:
    """The largest amount of memory that Python objects and arrays of a call take at one time."""
    work()  # what is imported or kept the first time
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("work", "most"),
    [
        pytest.param(lambda run: judge(run.table, resamples=20), 450, id="claims"),
        pytest.param(find_cautions, 300, id="cautions"),
        pytest.param(lambda run: list(gathering._measured(run)), 50, id="measured"),
        pytest.param(lambda run: list(gathering._glance(run.table)), 150, id="glance"),
    ],
)
def test_rows_of_a_table_are_not_made_into_dicts(
    stores: tuple[Path, Path], work: Callable[[Any], Any], most: int
) -> None:
    """In bytes for each row more. As dicts of Python, 9,440 rows took 636, 480, 350 and 718 bytes each."""
    few, many = (read_run(folder) for folder in stores)
    peaks = [memory_of(lambda run=run: work(run)) for run in (few, many)]
    assert (peaks[1] - peaks[0]) / (many.table.num_rows - few.table.num_rows) < most


def test_a_report_has_a_bounded_number_of_figures_and_names_the_others(
    stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MOST_FIGURES", 6)
    report = gather([stores[0]])
    (shown,) = report.runs
    every = catalogue(report.table, verdicts=report.verdicts)
    drawn, named = [one.title for one in shown.figures], [title for some in shown.omitted.values() for title in some]
    assert len(shown.figures) == 6
    assert len(named) == len(every) - 6 > 6
    assert sorted(drawn + named) == sorted(one.title for one in every)
    text = render(report)
    # Every section is there, and what is left out is counted.
    assert {one.section for one in shown.figures} >= {"profiles", "dynamics", "populations", "alignment"}
    assert all(f"{len(titles):,}</h4>" in text for section, titles in shown.omitted.items() if section != "verdicts")
    assert next(title for title in shown.omitted["dynamics"]) in text


def test_a_run_of_few_figures_leaves_none_out(stores: tuple[Path, Path]) -> None:
    table = Store(stores[0]).table()
    found = catalogue_within(table, 1000)
    assert found.omitted == {}
    assert [one.name for one in found.figures] == [one.name for one in catalogue(table)]


def test_a_table_too_large_for_a_page_is_left_to_a_file(
    stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = gather([stores[0]], drawn=False)
    whole = render(report)
    monkeypatch.setattr(page, "MOST_TABLE_ROWS", report.table.num_rows - 1)
    short = render(report)
    assert 'id="blob-table"' in whole
    assert "too many for a page" not in whole
    assert 'id="blob-table"' not in short
    assert "They are too many for a page: <code>anisoscope report RUN --format csv</code>" in short


def test_a_number_missing_from_a_list_is_no_number(stores: tuple[Path, Path]) -> None:
    """A result whose values are missing is judged as one without numbers, and stops no other."""
    table = Store(stores[0]).table()
    model = table["model"].to_pylist()
    values = [None if name == "model-00" else row for name, row in zip(model, table["values"].to_pylist(), strict=True)]
    broken = table.set_column(
        table.column_names.index("values"), "values", pa.array(values, table.schema.field("values").type)
    )
    found = {one.subject: one for one in judge(broken, resamples=20) if one.claim == "bell"}
    assert "no batch has a value at every block" in found["model-00"].text
    assert found["model-01"].effect == found["model-01"].effect


def test_a_status_lists_what_is_not_done_and_counts_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    place = {"model": "m", "revision": None, "step": 1, "corpus": "pydoc", "told": ""}
    rows = [{**place, "key": f"done{number}", "state": "done"} for number in range(MOST_ROWS + 5)]
    rows.append({**place, "key": "late", "state": "failed"})
    print_status(Overview(rows=tuple(rows), seconds_left=None))
    shown = capsys.readouterr().out
    assert "late" in shown
    assert "6 more results are not listed" in shown
    assert f"{MOST_ROWS + 5} done, 1 failed" in shown
