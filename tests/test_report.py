"""The report: what it says is what was measured, and nothing that was measured can make it say or do something else."""

import base64
import gzip
import hashlib
import html
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from anisoscope.cli import app
from anisoscope.columns import SCHEMA
from anisoscope.errors import CheckpointError, StoreError
from anisoscope.records import Estimate, Record, Spec, Unit
from anisoscope.report import gather, render
from anisoscope.report.cautions import find_cautions
from anisoscope.report.comparing import compare
from anisoscope.report.exporting import write_report
from anisoscope.report.methods import describe, methods_of
from anisoscope.report.packing import Shelf, pack_json, pack_table
from anisoscope.report.reading import read_run
from anisoscope.store import Store

HOSTILE = "</script><img src=x onerror=alert(1)>"
BLOCKS = 6


def unit_of(
    model: str = "tiny", *, step: int | None = 3, shift: float = 0.0, batches: int = 16, **changes: Any
) -> Unit:
    """A model with a bell of leading variance, a dimension and a loss; `changes` go to its Spec or to every row."""
    in_spec: dict[str, Any] = {name: changes.pop(name) for name in list(changes) if name in Spec.__dataclass_fields__}
    revision = None if step is None else f"step{step}"
    spec = Spec(model=model, step=step, revision=revision, **{"corpus": "pydoc", **in_spec})
    rows = []
    for place, site in enumerate(["embed", *(f"block.{k}" for k in range(BLOCKS)), "final_norm"]):
        height = 0.2 + 0.4 * math.exp(-((place - 3.5) ** 2))
        for metric, population, level in (
            ("leading_variance", "all", height),
            ("leading_variance", "typical", height),
            ("twonn", "all", 12 + place),
        ):
            values = tuple(level + shift + 0.002 * ((7 * batch + place) % 5) for batch in range(batches))
            rows.append(row_of(spec, site, metric, population, values, **changes))
    rows.append(row_of(spec, "output", "loss", "all", tuple(3.0 + 0.01 * batch for batch in range(batches)), **changes))
    provenance = {
        "time": "2026-01-02T03:04:05+00:00",
        "seconds": 1.5,
        "versions": {"anisoscope": "0.1.0", "torch": "2.9"},
        "device": "a device",
        "windows": 64,
        "notes": [],
        "checks": ["The blocks were proven."],
    }
    return Unit(spec=spec, provenance=provenance, records=tuple(rows))


def row_of(spec: Spec, site: str, metric: str, population: str, values: tuple[float, ...], **changes: Any) -> Record:
    estimate = Estimate.from_values(values, null=0.1, points=4096 * len(values), dropped=0, dim=64)
    depth = (int(site[6:]) + 1) / BLOCKS if site.startswith("block.") else None
    given: dict[str, Any] = {
        **{name: getattr(spec, name) for name in ("model", "revision", "step", "corpus", "run")},
        **{
            name: getattr(estimate, name)
            for name in ("value", "spread", "values", "null", "batches", "points", "dropped", "dim")
        },
        "key": spec.key,
        "tokens": None,
        "kind": "decoder",
        "stack": None,
        "population": population,
        "site": site,
        "depth": depth,
        "metric": metric,
        "metric_version": 1,
        "excluded": 0,
    }
    return Record(**given | changes)


def with_rows(unit: Unit, **changes: Any) -> Unit:
    """The unit with the first row changed."""
    return replace(unit, records=(replace(unit.records[0], **changes), *unit.records[1:]))


def stored(folder: Path, *units: Unit) -> Path:
    store = Store(folder)
    for unit in units:
        store.put(unit)
    return folder


def blob(page: str, name: str) -> bytes:
    (text,) = re.findall(rf'<script type="application/octet-stream" id="blob-{name}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(text))


class Seen(HTMLParser):
    """The tags and the text of a page, as a browser would read them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.words.append(data)

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("runs") / "one", unit_of(step=3), unit_of(step=30, shift=0.01))


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return render(gather([run]))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments])


def test_the_page_says_what_was_measured_and_what_it_means(page: str) -> None:
    text = Seen(page).text
    assert "2 checkpoints of tiny on pydoc: 3 metrics, 50 numbers." in text
    assert "2, step 3 to step 30" in text
    assert "✓ Bell holds. tiny, leading_variance of all on pydoc:" in text
    assert text.index("Bell holds.") < text.index("inconclusive for"), "what is known comes first"
    for section in ("Verdicts", "What was measured", "Figures", "Warnings", "Method", "Provenance", "Data"):
        assert section in text
    assert "leading_variance = λ₁ / Σᵢ λᵢ" in text
    assert "A few tokens of very large norm can own it" in text
    assert "a device" in text
    assert "2026-01-02T03:04:05" in text


def test_a_claim_that_does_not_hold_is_not_called_one_that_does(tmp_path: Path) -> None:
    flat = unit_of()
    rows = [
        replace(row, value=0.3, values=(0.3,) * 16) if row.metric == "leading_variance" else row for row in flat.records
    ]
    text = Seen(render(gather([stored(tmp_path, replace(flat, records=tuple(rows)))], drawn=False))).text
    assert "✕ Bell does not hold." in text
    assert "✓ Flat holds." in text
    assert "Bell holds" not in text


def columns_of(page: str, name: str) -> dict[str, list[Any]]:
    """A packed table, as the page's script reads it."""
    packed = json.loads(blob(page, name))
    columns = {}
    for title, one in zip(packed["names"], packed["columns"], strict=True):
        if "all" in one:
            columns[title] = [one["all"]] * packed["length"]
        else:
            columns[title] = one["each"] if "each" in one else [one["of"][number] for number in one["at"]]
    return columns


def test_the_table_in_the_page_is_the_table_of_the_run(page: str, run: Path) -> None:
    wanted = Store(run).table().drop_columns(["values"])
    found = columns_of(page, "table")
    assert list(found) == wanted.column_names
    for name in wanted.column_names:
        assert found[name] == ["nan" if value != value else value for value in wanted[name].to_pylist()], name


def test_nothing_is_fetched_and_only_our_scripts_may_run(page: str) -> None:
    seen = Seen(page)
    (policy,) = [one["content"] or "" for one in seen.having("meta") if one.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    ours = [text for text in seen.scripts if len(text) > 5000 and "vega" in text.lower()]
    assert len(ours) == 2
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in ours}
    assert set(rules["script-src"].split()) == hashes
    assert not [attributes for _, attributes in seen.tags if {"src", "srcset", "onclick", "onload"} & attributes.keys()]
    assert all((one["href"] or "").startswith("#") for one in seen.having("a"))
    assert not seen.having("link")


def test_names_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    unit = unit_of(f"evil/{HOSTILE}", step=None, corpus=f"corpus {HOSTILE}")
    unit = with_rows(unit, note=f"note {HOSTILE}", value=math.nan, site=f"site {HOSTILE}", suspect=f"suspect {HOSTILE}")
    unit = replace(unit, provenance={**unit.provenance, "notes": [f"written {HOSTILE}"], "device": HOSTILE})
    folder = stored(tmp_path / "run <b>", unit)
    Store(folder).put_failure(replace(unit.spec, seed=7), CheckpointError(f"failure {HOSTILE}"))
    other = stored(tmp_path / "other", unit_of(f"other/{HOSTILE}", step=None))
    harmless = render(gather([other, stored(tmp_path / "plain", unit_of())]))
    page = render(gather([folder, other]))
    seen = Seen(page)
    assert not seen.having("img")
    assert not seen.having("b")
    assert len(seen.having("script")) == len(Seen(harmless).having("script"))
    assert not [text for text in seen.scripts if HOSTILE in text]
    assert seen.text.count(HOSTILE) > 8
    for word in ("note", "corpus", "suspect", "written", "failure"):
        assert f"{word} {HOSTILE}" in seen.text
    assert f"evil/{HOSTILE}" in columns_of(page, "table")["model"]


def test_the_check_of_markup_can_fail() -> None:
    assert Seen(f"<p>{HOSTILE}</p>").having("img")
    assert not Seen(f"<p>{html.escape(HOSTILE)}</p>").having("img")


def test_headings_go_down_one_step_at_a_time_and_landmarks_are_there(page: str) -> None:
    seen = Seen(page)
    levels = [int(tag[1]) for tag, _ in seen.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(seen.having(landmark)) == 1
    assert seen.having("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for one in seen.having("a"):
        assert (one["href"] or "")[1:] in ids
    charts = [one for one in seen.having("div") if one.get("role") == "img"]
    assert charts
    assert all(len(one["aria-label"] or "") > 20 for one in charts)
    tables = [one for one in seen.having("details") if one.get("class") == "as-table"]
    assert len(tables) == len(charts)


def test_every_chart_finds_its_data(page: str) -> None:
    held = json.loads(blob(page, "charts"))
    assert set(held["themes"]) == {"light", "dark"}
    assert held["charts"]
    for chart in held["charts"]:
        named = set(re.findall(r'"data": \{"name": "([0-9a-f]{16})"\}', json.dumps(chart["spec"])))
        assert named == set(chart["datasets"]) <= held["datasets"].keys()
        assert '"values": [{' not in json.dumps(chart["spec"]), "data that charts share are kept once"
    wanted = {one["data-table"] for one in Seen(page).having("details") if one.get("class") == "as-table"}
    assert wanted <= held["datasets"].keys()


def test_data_that_charts_share_are_kept_once_and_come_back_as_they_were() -> None:
    shelf = Shelf()
    rows = [{"x": number, "y": 0.1234567891, "who": "ab"[number % 2], "gone": math.nan} for number in range(20)]
    first = shelf.take_data({"layer": [{"data": {"values": rows}}, {"data": {"values": list(rows)}}]})
    second = shelf.take_data({"data": {"name": "named"}, "datasets": {"named": rows}})
    assert first["datasets"] == second["datasets"]
    assert len(shelf.datasets) == 1
    (held,) = shelf.datasets.values()
    columns = dict(zip(held["names"], held["columns"], strict=True))
    assert columns["x"] == {"each": list(range(20))}
    assert columns["y"] == {"all": 0.123457}
    assert columns["who"] == {"of": ["a", "b"], "at": [0, 1] * 10}
    assert columns["gone"] == {"all": None}
    pack_json(held)


def titles(folder: Path) -> dict[str, str]:
    return {one.title: " | ".join([one.text, *one.places]) for one in find_cautions(read_run(folder))}


def test_a_clean_run_has_no_warnings(run: Path) -> None:
    assert titles(run) == {}


@pytest.mark.parametrize(
    ("changes", "title", "words"),
    [
        ({"value": 0.9}, "A few tokens decide", "tiny, step 3, embed: leading_variance is 0.900 over all tokens"),
        (
            {"value": math.nan, "note": "all points are equal"},
            "No number",
            "leading_variance, 1 place: all points are equal",
        ),
        (
            {"dropped": 4096},
            "Duplicates dropped",
            "tiny, step 3, embed, population all: 4,096 points (5.9%) were dropped for leading_variance",
        ),
        ({"depth": 0.5, "dim": 2000}, "Few points for the width", "4,096 points a batch in 2,000 dimensions"),
        ({"suspect": "it has the weights of the end"}, "Suspicious checkpoints", "tiny@step3: it has the weights of"),
        ({"depth": 0.5, "batches": 1}, "Few batches", "Some numbers rest on 1 batch"),
        ({"metric_version": 2}, "Mixed settings", "leading_variance in versions [1, 2]"),
    ],
)
def test_what_a_reader_should_know_is_said(tmp_path: Path, changes: dict[str, Any], title: str, words: str) -> None:
    found = titles(stored(tmp_path, with_rows(unit_of(), **changes)))
    assert set(found) == {title}
    assert words in found[title]


def test_failed_mixed_and_noted_units_are_told(tmp_path: Path) -> None:
    noted = unit_of(step=4, seed=1)
    folder = stored(tmp_path, unit_of(), replace(noted, provenance={**noted.provenance, "notes": ["mind the gap"]}))
    Store(folder).put_failure(unit_of(step=5).spec, CheckpointError("it is broken"))
    found = titles(folder)
    assert "tiny@step5 on pydoc: CheckpointError: it is broken" in found["Failed units"]
    assert "several seeds drew the text: 0, 1" in found["Mixed settings"]
    assert "mind the gap" in found["Notes of the measuring"]


def test_a_half_written_folder_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = stored(tmp_path, unit_of())
    whole = next(folder.glob("*.parquet")).read_bytes()
    (folder / "aaaa.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "bbbb.parquet").write_bytes(b"")
    (folder / "cccc.parquet").mkdir()
    pq.write_table(pa.table({"other": [1]}), folder / "dddd.parquet")
    (folder / "eeee.failed.json").write_text('{"spec": ')
    (folder / "ffff.plan.json").write_text("[{}")
    (folder / "gggg.running.json").write_text("nothing")
    (folder / "readme.txt").write_text("garbage")
    report = gather([folder], drawn=False)
    assert report.table.num_rows == 25
    told = titles(folder)["Unreadable files"]
    assert all(name in told for name in ("aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff", "gggg"))
    assert "Bell holds." in Seen(render(report)).text


def test_a_folder_that_is_not_there_is_a_run_without_units(tmp_path: Path) -> None:
    text = Seen(render(gather([tmp_path / "nowhere"]))).text
    assert "Nothing has been measured here yet." in text
    assert "There are no units in this folder." in text


def test_several_runs_stand_side_by_side_with_their_difference(tmp_path: Path) -> None:
    one = stored(tmp_path / "before", unit_of("tiny", step=None))
    two = stored(tmp_path / "after", unit_of("tiny", step=None, shift=0.25, corpus="enwik8"))
    report = gather([one, two])
    (found,) = report.comparisons
    assert found.matched == ("corpus: pydoc and enwik8",)
    assert found.rows.num_rows == 25
    means = {(row["metric"], row["population"]): row["difference"] for row in found.summary()}
    assert means[("leading_variance", "all")] == pytest.approx(0.25)
    assert means[("loss", "all")] == pytest.approx(0.0)
    page = render(report)
    seen = Seen(page)
    assert "after less before" in seen.text
    assert "corpus: pydoc and enwik8" in seen.text
    assert "+0.250" in seen.text
    assert len(columns_of(page, "difference-0")["difference"]) == 25
    assert set(columns_of(page, "table")["source"]) == {"before", "after"}
    beside = [one for one in seen.having("div") if one.get("class") == "figures beside"]
    assert beside


def test_a_difference_has_the_spread_over_the_batches_both_saw(tmp_path: Path) -> None:
    first = unit_of("tiny", step=None)
    spec = replace(first.spec, seed=1)
    rows = (
        replace(row, key=spec.key, values=tuple(value + 0.1 * (k % 2) for k, value in enumerate(row.values)))
        for row in first.records
    )
    moved = replace(first, spec=spec, records=tuple(rows))
    runs = [read_run(stored(tmp_path / name, unit)) for name, unit in (("one", first), ("two", moved))]
    (found,) = compare(runs)
    spreads = found.rows["difference_spread"].to_pylist()
    assert spreads == pytest.approx([np.std([0.0, 0.1] * 8, ddof=1)] * 25)


def test_the_difference_of_two_runs_is_drawn_where_they_share_blocks(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", *(unit_of("tiny", step=step) for step in (3, 30)))
    two = stored(tmp_path / "two", *(unit_of("tiny", step=step, shift=0.25) for step in (3, 30)))
    page = render(gather([one, two]))
    wanted = [
        f"difference-1-difference-{metric}-over-{axis}"
        for metric in ("leading_variance", "twonn")
        for axis in ("depth", "training")
    ]
    found = [figure["id"] or "" for figure in Seen(page).having("figure")]
    assert [name for name in found if name.startswith("difference")] == wanted
    assert "leading_variance over depth: two less one" in Seen(page).text
    packed = json.loads(blob(page, "charts"))
    assert len(packed["charts"]) == len(found)
    done = write_report([one, two], tmp_path / "pictures", how="svg")
    assert not done.failed
    assert (tmp_path / "pictures" / "two-less-one-difference-twonn-over-training.svg").stat().st_size > 1000
    other = stored(tmp_path / "other", unit_of("tiny", step=3, depth=None))
    assert "difference-1-difference" not in render(gather([one, other]))
    assert "difference-" not in render(gather([one]))


def test_runs_that_share_nothing_say_so(tmp_path: Path) -> None:
    one = stored(tmp_path / "one", unit_of("a", step=1), unit_of("b", step=1))
    two = stored(tmp_path / "two", unit_of("c", step=1), unit_of("d", step=1))
    assert "They have no number in common" in Seen(render(gather([one, two], drawn=False))).text


def test_a_unit_that_lies_in_two_folders_is_judged_once(tmp_path: Path) -> None:
    one, two = (stored(tmp_path / name, unit_of()) for name in ("one", "two"))
    assert len(gather([one, two], drawn=False).verdicts) == len(gather([one], drawn=False).verdicts)


def test_the_metrics_are_described_as_they_declare_themselves() -> None:
    from anisoscope.metrics import all_metrics
    from anisoscope.report import methods

    kept = Path(methods.__file__).parent / "assets" / "metrics.json"
    assert kept.read_text("utf-8") == describe(all_metrics().values()), "stale: run `make docs`"
    for one in methods_of(all_metrics()):
        assert one.summary.endswith((".", ":", ";")), one.name
        assert one.equation, one.name
        assert ">>>" not in one.prose


def test_a_metric_from_elsewhere_is_named_and_not_described() -> None:
    (one,) = methods_of(["somebodys_own"])
    assert one.family == "other"
    assert "not one of the package's own" in one.summary


@pytest.mark.parametrize("how", ["csv", "parquet"])
def test_the_table_can_be_written_whole(run: Path, tmp_path: Path, how: str) -> None:
    done = call("report", run, "--format", how, "-o", tmp_path / f"table.{how}")
    assert done.exit_code == 0, done.stderr
    path, wanted = tmp_path / f"table.{how}", Store(run).table()
    assert done.stdout.strip() == str(path)
    if how == "parquet":
        assert pq.read_table(path).equals(wanted)
    else:
        found = pcsv.read_csv(path)
        assert found["value"].to_pylist() == wanted["value"].to_pylist()
        assert [json.loads(text) for text in found["values"].to_pylist()] == wanted["values"].to_pylist()


@pytest.mark.parametrize(("how", "start"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")])
def test_figures_can_be_written_one_by_one(tmp_path: Path, how: str, start: bytes) -> None:
    unit = unit_of(step=None)
    rows = tuple(row for row in unit.records if row.metric == "leading_variance" and row.population == "all")
    folder = stored(tmp_path / "run", replace(unit, records=rows))
    done = call("report", folder, "--format", how, "-o", tmp_path / "pictures")
    assert done.exit_code == 0, done.stderr
    written = list((tmp_path / "pictures").iterdir())
    assert written
    assert all(path.suffix == f".{how}" and path.read_bytes().startswith(start) for path in written)


def test_what_cannot_be_written_is_refused_with_a_sentence(run: Path, tmp_path: Path) -> None:
    assert call("report", run, "--format", "docx").exit_code == 2
    assert call("report", tmp_path / "nowhere").exit_code == 1
    with pytest.raises(StoreError, match="is a folder"):
        write_report([run], tmp_path)
    with pytest.raises(StoreError, match="no finished units"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_report([run], tmp_path / "file" / "table.csv", how="csv")


def test_a_report_needs_no_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from anisoscope.cli import app\n"
        f"app(['report', {str(run)!r}, '-o', {str(tmp_path / 'report.html')!r}, '--debug'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = Seen((tmp_path / "report.html").read_text("utf-8")).text
    assert "Bell holds." in text
    assert "leading_variance = λ₁ / Σᵢ λᵢ" in text


def sweep_table(checkpoints: int, sites: int, metrics: int) -> pa.Table:
    """Random numbers in the shape of a large sweep."""
    rng, rows = np.random.default_rng(0), checkpoints * sites * metrics
    index = np.arange(rows)
    names = np.array([f"block.{k}" for k in range(sites)])
    columns: dict[str, Any] = {name: pa.nulls(rows, SCHEMA.field(name).type) for name in SCHEMA.names}
    steps = 500 * (index // (sites * metrics))
    columns |= {
        "key": [f"{step:020x}" for step in steps],
        "model": ["a/model"] * rows,
        "revision": [f"step{step}" for step in steps],
        "step": steps,
        "kind": ["decoder"] * rows,
        "corpus": ["enwik8"] * rows,
        "population": ["all"] * rows,
        "site": names[index // metrics % sites],
        "depth": (index // metrics % sites + 1) / sites,
        "metric": [f"metric_{k}" for k in index % metrics],
        "metric_version": np.ones(rows, int),
        **{name: rng.random(rows) for name in ("value", "spread")},
        "null": np.full(rows, 0.1),
        "seconds": np.repeat(rng.random(rows // metrics), metrics),
        **{
            name: np.full(rows, count)
            for name, count in {"batches": 16, "points": 65536, "dropped": 0, "excluded": 0, "dim": 768}.items()
        },
        "values": list(rng.random((rows, 16))),
    }
    return pa.Table.from_pydict(columns, schema=SCHEMA)


def test_the_data_of_a_large_sweep_fit_into_a_page() -> None:
    """200 checkpoints, 40 sites and 12 metrics, all digits random: a third of the 8 MB that a page may have."""
    table = sweep_table(200, 40, 12)
    assert table.num_rows == 96_000
    assert len(pack_table(table)) < 2_700_000
