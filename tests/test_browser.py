"""The report in a real browser: what a reader sees, hears, clicks and downloads."""

import csv
import json
import math
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report import HOSTILE, stored, unit_of, with_rows

from anisoscope.report import gather, render
from anisoscope.serve import open_server
from anisoscope.store import Store

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Browsers share nothing between tests but their start, which takes longer than any test.
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """A page, and what it asked for and complained of."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce", **context}
        )
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        # A busy machine may not draw frames for a while, and both clicks and waits would wait for them.
        self.page.set_default_timeout(60_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on(
            "console", lambda message: self.complaints.append(message.text) if message.type == "error" else None
        )
        self.page.goto(address)

    def press(self, control: Any) -> None:
        """Use a control by keyboard: a click aims at a place, which charts drawn meanwhile may move away."""
        control.focus()
        self.page.keyboard.press("Enter")

    def draw(self, chart: Any) -> None:
        """Scroll to a chart, again wherever charts drawn meanwhile move it to, until it is drawn."""
        # Not Playwright's own way to scroll, which waits for two frames alike: a busy machine may not draw them.
        self.page.wait_for_function(
            # Newer browsers answer a scroll with a promise, which would count as drawn.
            "one => one.dataset.drawn || void one.scrollIntoView({behavior: 'instant', block: 'center'})",
            arg=chart.element_handle(),
            polling=50,
        )

    def draw_all(self) -> int:
        """Scroll past every chart; how many there are."""
        charts = self.page.locator(".chart").all()
        for chart in charts:
            self.draw(chart)
        return len(charts)


def owners_of(tokens: list[str]) -> dict[str, np.ndarray]:
    """Attachments that say which tokens own the leading axis at block.2."""
    texts = json.dumps([[token, f"document {HOSTILE}"] for token in tokens]).encode()
    arrays = {
        "shares": np.array([0.4, 0.2]),
        "positions": np.array([0, 7]),
        "texts": np.frombuffer(texts, dtype=np.uint8),
        "coordinates": np.array([3, 5]),
        "coordinate_shares": np.array([0.5, 0.1]),
        "first_position_share": np.array([0.4]),
    }
    return {f"owners//block.2.{name}": values for name, values in arrays.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with hostile names and absent numbers, and its report."""
    folder = tmp_path_factory.mktemp("browser") / "run"
    odd = with_rows(unit_of(f"evil/{HOSTILE}", step=3), value=math.nan, note=f'a "note", {HOSTILE}')
    odd = replace(odd, attachments=owners_of([f"token {HOSTILE}", " the"]))
    stored(folder, odd, unit_of("tame", step=1), unit_of("tame", step=10), unit_of("tame", step=100, shift=0.05))
    page = folder.parent / "report.html"
    page.write_text(render(gather([folder])), "utf-8")
    return folder, page


@pytest.fixture
def visit(browser: Any, written: tuple[Path, Path]) -> Iterator[Visit]:
    visit = Visit(browser, written[1].as_uri(), accept_downloads=True, color_scheme="light")
    yield visit
    visit.context.close()


def test_every_chart_is_drawn_without_the_network_or_a_complaint(visit: Visit, written: tuple[Path, Path]) -> None:
    assert visit.page.locator(".chart svg").count() < visit.page.locator(".chart").count(), "only what is near is drawn"
    count = visit.draw_all()
    assert count > 3
    for number in range(count):
        chart = visit.page.locator(".chart").nth(number)
        assert chart.get_attribute("data-drawn") == "light", chart.inner_text()
        assert chart.locator("svg .mark-symbol path, svg .mark-rect path, svg .mark-line path").count() > 0
    assert visit.complaints == []
    assert visit.requests == [written[1].as_uri()]


def test_names_from_outside_do_not_run(visit: Visit) -> None:
    visit.draw_all()
    for details in visit.page.locator("details").all():
        details.evaluate("one => { one.open = true; }")
    visit.page.wait_for_timeout(300)
    assert visit.page.locator("img").count() == 0
    assert visit.complaints == []
    shown = visit.page.locator("main").inner_text()
    assert f"evil/{HOSTILE}" in shown
    assert f"token {HOSTILE}".replace(" ", "␣") in shown, "spaces of tokens are made visible"
    assert f"document {HOSTILE}" in shown


def test_the_policy_stops_a_script_that_is_not_ours(visit: Visit) -> None:
    visit.page.evaluate(
        "() => { const one = document.createElement('script'); one.textContent = 'window.intruder = 1';"
        " document.body.append(one); }"
    )
    assert visit.page.evaluate("window.intruder === undefined")
    assert any("Content Security Policy" in text for text in visit.complaints)


def test_a_mark_answers_when_the_pointer_rests_on_it(visit: Visit) -> None:
    chart = visit.page.locator("figure[id*=profile-leading_variance] .chart").first
    visit.draw_all()
    visit.draw(chart)
    mark = chart.locator("svg .mark-symbol path[aria-roledescription=point], svg .mark-symbol.role-mark path").last
    mark.hover(force=True)
    tooltip = visit.page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert "value" in tooltip.inner_text()
    assert tooltip.locator("img").count() == 0


def background(page: Any) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_switch_changes_page_and_charts_and_is_remembered(visit: Visit) -> None:
    page = visit.page
    visit.draw(page.locator(".chart").first)
    assert page.locator(".chart").first.get_attribute("data-drawn") == "light"
    light = background(page)
    visit.press(page.locator("#theme"))
    page.wait_for_function("() => document.querySelector('.chart').dataset.drawn === 'dark'", polling=50)
    assert background(page) != light
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert visit.complaints == []


def test_the_system_decides_until_the_switch_is_used(browser: Any, written: tuple[Path, Path]) -> None:
    dark = Visit(browser, written[1].as_uri(), color_scheme="dark")
    light = Visit(browser, written[1].as_uri(), color_scheme="light")
    assert background(dark.page) != background(light.page)
    assert dark.page.locator("#theme").inner_text() == "Light"
    light.page.emulate_media(color_scheme="dark")
    assert background(light.page) == background(dark.page)
    dark.context.close()
    light.context.close()


@pytest.mark.parametrize("width", [320, 400, 900, 1600])
def test_nothing_scrolls_sideways(browser: Any, written: tuple[Path, Path], width: int) -> None:
    visit = Visit(browser, written[1].as_uri(), viewport={"width": width, "height": 800})
    visit.draw_all()
    for details in visit.page.locator("details:not(.chart details)").all():
        details.evaluate("one => { one.open = true; }")
    visit.page.wait_for_timeout(300)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.context.close()


def test_the_keyboard_reaches_everything(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(400):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("[document.activeElement.id, document.activeElement.dataset.blob ?? '']"))
        if reached[-1][1] == "table":
            break
    assert ["theme", ""] in reached
    assert reached[-1][1] == "table"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the keyboard is must be seen"
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "anisoscope.csv"


def test_the_download_is_the_table(visit: Visit, written: tuple[Path, Path], tmp_path: Path) -> None:
    with visit.page.expect_download() as download:
        visit.press(visit.page.locator("button[data-blob=table]"))
    download.value.save_as(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    wanted = Store(written[0]).table().drop_columns(["values"]).to_pylist()
    assert len(found) == len(wanted)
    for row, true in zip(found, wanted, strict=True):
        assert list(row) == list(true)
        for name, value in true.items():
            if value is None:
                assert row[name] == ""
            elif isinstance(value, float):
                assert float(row[name]) == value or (math.isnan(value) and row[name] == "nan")
            else:
                # As Arrow writes it: true and false.
                assert row[name] == (str(value).lower() if isinstance(value, bool) else str(value))


def test_a_chart_has_its_numbers_as_a_table(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    figure = page.locator("figure[id*=profile-leading_variance]").first
    visit.press(figure.locator("details.as-table > summary"))
    figure.locator("table").wait_for()
    heads = figure.locator("thead th").all_inner_texts()
    assert {"value", "site", "population"} <= set(heads)
    rows = figure.locator("tbody tr").count()
    with page.expect_download() as download:
        visit.press(figure.locator("details.as-table button"))
    download.value.save_as(tmp_path / "figure.csv")
    assert len((tmp_path / "figure.csv").read_text().splitlines()) == rows + 1


def test_printing_draws_every_chart_in_light_colours(visit: Visit) -> None:
    page = visit.page
    visit.press(page.locator("#theme"))
    page.evaluate(
        "() => { window.print = () => {"
        " window.printed = [...document.querySelectorAll('.chart')].map((one) => one.dataset.drawn); }; }"
    )
    visit.press(page.locator("#print"))
    page.wait_for_function("() => window.printed", polling=50)
    shown = page.evaluate("window.printed")
    assert shown
    assert set(shown) == {"light"}
    page.wait_for_function("() => document.querySelector('.chart').dataset.drawn === 'dark'", polling=50)


def test_a_served_page_follows_its_folder_and_keeps_the_place(browser: Any, tmp_path: Path) -> None:
    folder = stored(tmp_path / "run", unit_of(step=1))
    with open_server([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            visit = Visit(browser, server.address)
            page = visit.page
            assert "tiny on pydoc: 3 metrics, 25 numbers" in page.locator(".lead").inner_text()
            page.locator("#method").evaluate("one => one.scrollIntoView({behavior: 'instant'})")
            before = page.locator("#method").bounding_box()["y"]
            stored(folder, unit_of(step=2))
            page.wait_for_function(
                "() => document.querySelector('.lead').textContent.includes('50 numbers')", timeout=60_000, polling=50
            )
            page.wait_for_timeout(200)
            assert page.locator("#method").bounding_box()["y"] == pytest.approx(before, abs=60)
            assert {url.removeprefix(server.address) for url in visit.requests} <= {"", "status", "favicon.ico"}
            assert visit.complaints == []
            visit.context.close()
        finally:
            server.shutdown()
            thread.join()


def test_a_chart_that_fails_says_so_and_leaves_the_others(
    browser: Any, written: tuple[Path, Path], tmp_path: Path
) -> None:
    import pyarrow as pa

    report = gather([written[0]])
    shown = report.runs[0]
    figure = shown.figures[0]

    class Broken:
        def to_dict(self, **_: Any) -> dict[str, Any]:
            return {"mark": "nonsense", "data": {"values": [{"x": 1}]}, "encoding": {"x": {"field": "x"}}}

    broken = replace(figure, name="broken", draw=lambda: Broken(), data=pa.table({"x": [1]}))
    changed = replace(report, runs=(replace(shown, figures=(broken, figure)),))
    (tmp_path / "page.html").write_text(render(changed), "utf-8")
    visit = Visit(browser, (tmp_path / "page.html").as_uri())
    assert visit.draw_all() == 2
    assert visit.page.locator(".chart").nth(1).get_attribute("data-drawn") in ("light", "dark")
    told = visit.page.locator(".chart").nth(0)
    assert told.get_attribute("data-drawn") == "failed"
    assert "could not be drawn" in told.inner_text()
    visit.context.close()
