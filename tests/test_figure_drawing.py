"""Figures as pictures and pages, and the catalogue of a run. Numbers are checked in test_figures.py."""

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from PIL import Image
from test_figures import record, table_of

from anisoscope import figures
from anisoscope.claims import Verdict
from anisoscope.errors import AnisoscopeError, SpecError
from anisoscope.figures import captions, drawing
from anisoscope.records import Record, Spec, Unit
from anisoscope.store import Store

RUNS = Path(__file__).parent.parent / "docs" / "runs"
STRANGE = "</script><script>alert('ü')</script>\"日本\\"


def training(**rest: Any) -> list[Record]:
    """One model at three steps and two blocks, with sites around them and a loss."""
    found = []
    for step in (0, 10, 1000):
        for place, site in enumerate(("embed", "block.0", "block.1", "final_norm")):
            for population in ("all", "typical"):
                value = (0.1 + 0.01 * place + step / 5000, 0.12 + step / 5000)
                found.append(record(value, site=site, step=step, population=population, null=0.05, **rest))
        found.append(record((5.0, 5.5), site="output", step=step, **rest | {"metric": "loss"}))
    return found


LEADING = {"metric": "leading_variance"}


def verdict(holds: bool | None, **rest: Any) -> Verdict:
    given: dict[str, Any] = {
        "claim": "bell",
        "subject": "m",
        "metric": "leading_variance",
        "population": "all",
        "corpus": "pydoc",
        "variant": None,
        "holds": holds,
        "effect": 0.1,
        "interval": (0.05, 0.15),
        "p": 0.01,
        "p_adjusted": 0.02,
        "replicates": 8,
        "text": "a sentence",
        "details": {},
    }
    return Verdict(**given | rest)


def unit_with_attachments(model: str = "m", *, tokens: tuple[str, ...] = ("the", "<s>"), **spec: Any) -> Unit:
    texts = json.dumps([[text, "a document"] for text in tokens]).encode()
    attachments = {
        "owners//block.0.shares": np.array([0.6, 0.2][: len(tokens)]),
        "owners//block.0.token_ids": np.arange(len(tokens)),
        "owners//block.0.positions": np.array([0, 7][: len(tokens)]),
        "owners//block.0.documents": np.zeros(len(tokens), int),
        "owners//block.0.texts": np.frombuffer(texts, np.uint8).copy(),
        "owners//block.0.first_position_share": np.array([0.7]),
        "owners//block.0.coordinates": np.array([3, 1]),
        "owners//block.0.coordinate_shares": np.array([0.9, 0.05]),
        "weights/embed.weight.rows": np.arange(50),
        "weights/embed.weight.centred=no.coordinates": np.random.default_rng(0).normal(size=(50, 2)) + 3,
        "weights/embed.weight.centred=yes.coordinates": np.random.default_rng(0).normal(size=(50, 2)),
    }
    whole = Spec(**{"model": model, "step": 1} | spec)
    return Unit(spec=whole, provenance={}, records=(record(model=model),), attachments=attachments)


def aligned(step: int, site: str = "block.0", **rest: Any) -> list[Record]:
    how = {"gradient": "virtual", "proxy": "pca", "rank": 16, "variant": "mean=in", "site": site, "step": step}
    how |= {"population": "typical", **rest}
    hard = {"control": "permuted", "control_value": 0.4, "p": 0.01}
    return [
        record((0.7,), metric="tangent_energy", low=0.6, high=0.8, **how),
        record((0.3,), metric="tangent_excess", **hard, **how),
        record((7.0,), metric="normal_ratio", control="normal", control_value=0.1, p=0.005, **how),
    ]


CONCEPTS = pa.table(
    {
        "step": [0, 10, 100, 10, 100],
        "track": [0, 0, 0, 1, 1],
        "cosine": [None, 0.8, 0.9, None, 0.7],
        "share_of_energy": [0.2, 0.3, 0.4, 0.1, 0.1],
        "top_tokens": ["the, a", "the, a", "the, a", "of", "of"],
    }
)
STAGED = [
    record((0.1 + 0.1 * k, 0.2), site=site, blocks=2, **LEADING)
    for k, site in enumerate(("block.1", "final_norm.normed", "final_norm.gained", "final_norm"))
]
SCALED = [
    record((5.0 + k, 6.0), metric=f"gride_{2**k}", site=f"block.{b}", population=which)
    for k in (1, 2, 3)
    for b in (0, 1)
    for which in ("all", "types")
]
LENGTHS = {"m-1": 64, "long": 128}
LONG = table_of(record((0.3, 0.4), **LEADING), record((0.5, 0.6), key="long", **LEADING))
CURVED = table_of(
    *(
        record((0.2,), metric="curvature_visibility", variant=f"exponent={e};rank=4", key=str(e), low=0.1, high=0.4)
        for e in (0.25, 1.0)
    ),
    record((0.9,), metric="curvature_visibility", key="unstated"),
)
BINNED = [
    record((0.1 + 0.1 * k,), metric="tangent_energy", bin=k, gradient="virtual", proxy="pca", population="typical")
    for k in range(3)
]
M = {"model": "m"}

CHARTS: dict[str, Callable[[], Any]] = {
    "profile": lambda: figures.profile(table_of(*training(**LEADING)), metric="leading_variance"),
    "populations": lambda: figures.populations(table_of(*training(**LEADING)), **M),
    "steps": lambda: figures.steps(table_of(*training(**LEADING)), **M),
    "dynamics": lambda: figures.dynamics(table_of(*training(**LEADING)), populations=["all"], **LEADING),
    "heatmap": lambda: figures.heatmap(table_of(*training(**LEADING)), **M, **LEADING),
    "stages": lambda: figures.stages(table_of(*STAGED)),
    "scales": lambda: figures.scales(table_of(*SCALED), **M),
    "lengths": lambda: figures.lengths(LONG, LENGTHS, populations=["all"]),
    "owners": lambda: figures.owners(unit_with_attachments()),
    "embeddings": lambda: figures.embeddings(unit_with_attachments()),
    "alignment": lambda: figures.alignment(table_of(*aligned(0), *aligned(10)), **M),
    "alignment_bins": lambda: figures.alignment_bins(table_of(*BINNED), **M),
    "curvature": lambda: figures.curvature(CURVED),
    "concepts": lambda: figures.concepts(CONCEPTS),
    "verdicts": lambda: figures.verdicts([verdict(True), verdict(False), verdict(None)]),
}


def colours(png: bytes) -> set[tuple[int, ...]]:
    with Image.open(io.BytesIO(png)) as picture:
        return {colour for _, colour in picture.convert("RGB").getcolors(2**24) or []}


@pytest.mark.parametrize("name", CHARTS)
def test_every_figure_is_valid_and_not_blank(name: str) -> None:
    chart = CHARTS[name]()
    spec = chart.to_dict()
    assert spec["title"]["text"]
    assert spec["config"] == figures.theme()
    png = figures.rendered(chart, "png", scale=1)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(colours(png)) > 20
    assert "tooltip" in json.dumps(spec)


def test_a_picture_without_marks_would_be_seen_to_be_blank() -> None:
    altair = drawing.import_altair()
    empty = altair.Chart(drawing.inline([])).mark_point().properties(width=50, height=50)
    assert len(colours(figures.rendered(empty, "png", scale=1))) < 20


def test_svg_pdf_and_json_have_the_title_and_reach_for_nothing(tmp_path: Path) -> None:
    chart = CHARTS["profile"]()
    svg = figures.save(chart, tmp_path / "new" / "a.svg").read_text("utf-8")
    assert "leading_variance at the blocks" in svg
    assert not re.findall(r"(?:href|src)\s*=|url\((?!#)", svg)
    assert set(re.findall(r"https?://[^\"' ]+", svg)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert figures.save(chart, tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert json.loads(figures.save(chart, tmp_path / "a.json").read_text("utf-8")) == chart.to_dict()
    with pytest.raises(SpecError, match=r"saved as html, png, svg, pdf, json; came a\.gif"):
        figures.save(chart, tmp_path / "a.gif")


def test_a_page_holds_all_its_scripts_and_strange_names_stay_text(tmp_path: Path) -> None:
    table = table_of(*training(model=STRANGE, **LEADING))
    page = figures.save(figures.profile(table), tmp_path / "a.html").read_text("utf-8")
    outside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL)
    assert len(outside) < 400
    assert not re.findall(r"(?:src|href)\s*=|https?:", outside)
    # The library, the figure, and nothing that a name could add.
    assert page.count("<script") == page.count("</script>") == 2
    spec = json.loads(page.rsplit('vegaEmbed("#figure", ', 1)[1].rsplit(", {renderer", 1)[0])
    assert STRANGE in {row["series"] for rows in spec["datasets"].values() for row in rows}
    for figure in figures.catalogue(
        table, units=[unit_with_attachments(STRANGE)], verdicts=[verdict(None, text=STRANGE)]
    ):
        assert figure.error is None, figure.error
        assert re.fullmatch(r"[\w.+-]+", figure.name)
        assert figures.rendered(figure.draw(), "svg").startswith(b"<svg")


def test_the_dark_theme_takes_the_place_of_the_light_one() -> None:
    chart = CHARTS["profile"]()
    dark = figures.themed(chart, dark=True)
    assert dark.to_dict()["config"] == figures.theme(dark=True)
    assert chart.to_dict()["config"] == figures.theme()
    ground = colours(figures.rendered(dark, "png", scale=1))
    assert (21, 24, 29) in ground
    assert (255, 255, 255) not in ground
    # Colours that are not of the theme must be visible on both grounds.
    assert "#000000" not in json.dumps(dark.to_dict())


def test_numbers_in_a_chart_have_four_digits_and_missing_ones_are_counted() -> None:
    rows = [record((0.123456, 0.123458)), record((math.nan,), site="block.1", null=math.nan)]
    chart = figures.profile(table_of(*rows), metric="twonn", populations=["all"]).to_dict()
    assert "1 of 2 without a number left out" in " ".join(chart["title"]["subtitle"])
    (drawn,) = chart["datasets"].values()
    assert [row["value"] for row in drawn] == [0.1235]


def test_suspect_checkpoints_are_crossed_out() -> None:
    rows = [record(step=1), record(step=2, suspect="same weights as step 1")]
    chart = figures.dynamics(table_of(*rows), metric="twonn", populations=["all"]).to_dict()
    assert "crossed out: 1 suspect checkpoint" in chart["title"]["subtitle"][0]
    assert json.dumps(chart).count("isValid(datum.suspect)") == 1
    assert "suspect" not in json.dumps(
        figures.dynamics(table_of(rows[0]), metric="twonn", populations=["all"]).to_dict()
    )


def test_titles_name_estimator_site_and_population() -> None:
    for name, words in {
        "profile": ("leading_variance", "blocks", "all and typical"),
        "dynamics": ("leading_variance", "blocks", "population all"),
        "heatmap": ("leading_variance", "every site", "population all"),
        "alignment": ("tangent_energy", "blocks", "population typical"),
        "stages": ("leading_variance", "final norm", "population all"),
    }.items():
        title = " ".join(CHARTS[name]().to_dict()["title"]["text"])
        assert all(word in title for word in words), title


def test_step_zero_has_a_tick_and_the_loss_is_below_every_dynamics_curve() -> None:
    spec = CHARTS["dynamics"]().to_dict()
    curve, loss = spec["vconcat"]
    axis = loss["layer"][-1]["layer"][0]["encoding"]["x"]["axis"] if "layer" in loss["layer"][-1] else None
    axis = axis or loss["layer"][-1]["encoding"]["x"]["axis"]
    assert axis["values"][0] == 0.0
    assert "'0'" in axis["labelExpr"]
    assert "loss" in json.dumps(loss["title"])
    assert curve["width"] == loss["width"]


def test_ticks_of_wide_and_narrow_ranges() -> None:
    def ticks(*steps: int) -> list[float]:
        rows = [{"position": math.log10(step) if step else -1.0, "step": step} for step in steps]
        return drawing.step_axis(rows, "step").to_dict()["axis"]["values"]

    assert ticks(0, 1, 143_000) == [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [round(10**tick) for tick in ticks(100, 300)] == [100, 200]
    assert len(ticks(1, 10**12)) <= 7


def test_a_catalogue_of_the_pocket_run_is_whole_and_small() -> None:
    found = figures.catalogue(Store(RUNS / "pocket").table(), verdicts=[verdict(True)])
    assert [figure.error for figure in found if figure.error] == []
    names = [figure.name for figure in found]
    assert len(set(names)) == len(names)
    for wanted in ("profile-twonn", "dynamics-leading_variance", "heatmap-isoscore-pocket-encoder-seed2", "verdicts"):
        assert wanted in names
    places = [figures.SECTIONS.index(figure.section) for figure in found]
    assert places == sorted(places)
    profile = found[names.index("profile-leading_variance")]
    # The largest number a caption states is one of the data.
    value = max(profile.data["value"].to_pylist())
    assert captions.say(value) in profile.caption


def test_stored_runs_have_owners_matrices_scales_lengths_and_alignment() -> None:
    store = Store(RUNS / "pocket-sites")
    found = figures.catalogue(store.table(), units=[store.get(key) for key in sorted(store.keys())])
    assert not [figure.error for figure in found if figure.error]
    kinds = {figure.name.split("-")[0] for figure in found}
    assert kinds >= {"profile", "populations", "stages", "scales", "lengths", "owners", "embeddings"}
    owners = next(figure for figure in found if figure.name.startswith("owners-pocket-decoder"))
    assert len(owners.data) == 210
    assert "Not shown: 8 units" in next(f.caption for f in found if f.name == "profile-leading_variance")
    found = figures.catalogue(Store(RUNS / "pocket-alignment").table())
    assert {figure.section for figure in found} == {"alignment"}
    assert "random normals" in found[0].caption


def test_a_catalogue_never_raises_on_what_is_not_there() -> None:
    whole = table_of(*training(**LEADING), *STAGED, *SCALED, *aligned(1), *BINNED)
    for part in (
        table_of(),
        table_of(record(site="embed")),
        table_of(record((math.nan,), null=math.nan)),
        table_of(record(step=None, revision=None)),
        table_of(record(step=None, revision="main"), record(step=5)),
        table_of(record(key="a"), record((9.0, 9.0), key="b")),
        table_of(record(), record((9.0, 9.0), metric_version=2, step=2)),
        table_of(record(corpus="a"), record(corpus="b", key="b")),
        table_of(*aligned(1)[:1]),
        table_of(*aligned(1, site="embed")),
        table_of(record(metric="curvature_visibility", variant="exponent=much")),
        CURVED,
        *(whole.filter(pc.field("metric") == name) for name in whole["metric"].unique().to_pylist()),
        *(whole.filter(pc.field("site") == name) for name in whole["site"].unique().to_pylist()),
        pa.table({"nonsense": [1]}),
    ):
        for figure in figures.catalogue(part):
            if figure.error is None:
                assert figure.draw() is not None
                assert figure.caption
            else:
                with pytest.raises(AnisoscopeError, match=r".* could not be made: "):
                    figure.draw()


def test_a_broken_figure_says_so_and_leaves_the_others_alone() -> None:
    unit = unit_with_attachments()
    broken = replace(unit, attachments={**unit.attachments, "weights/embed.weight.centred=no.coordinates": np.zeros(0)})
    found = {figure.name: figure for figure in figures.catalogue(table_of(record()), units=[broken])}
    assert found["embeddings-embed.weight-m"].error
    assert found["owners-m"].error is None
    assert found["profile-twonn"].error is None
    nothing = figures.catalogue(table_of(record((math.nan,), null=math.nan)))
    assert [figure.error for figure in nothing] == ["none of 1 rows has a number"]


def test_models_beyond_the_palette_go_to_another_figure() -> None:
    found = figures.catalogue(table_of(*(record(model=f"m{k:02}") for k in range(11))))
    sizes = {figure.name: len(figure.data) for figure in found if figure.section == "profiles"}
    assert sizes == {"profile-twonn-1": 8, "profile-twonn-2": 3}


def test_a_large_sweep_stays_small() -> None:
    steps = [0, *range(1000, 60_000, 1000)]
    rows = [record((0.5,), step=step, site=f"block.{k}", blocks=40) for step in steps for k in range(40)]
    found = figures.catalogue(table_of(*rows))
    heatmap = next(figure for figure in found if figure.name.startswith("heatmap"))
    columns = set(heatmap.data["step"].to_pylist())
    assert len(columns) <= 48
    assert {0, 59_000} <= columns
    assert len(json.dumps(heatmap.draw().to_dict())) < 250_000


def test_drawing_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys; from anisoscope import figures; from anisoscope.store import Store\n"
        "assert len(figures.catalogue(Store(sys.argv[1]).table())) > 50\n"
        "assert not {'altair', 'vl_convert', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(RUNS / "pocket")], check=True)
