"""Embedding matrices in two dimensions: measured on a real model, coloured by how often tokens occur."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from typer.testing import CliRunner

from anisoscope import figures
from anisoscope.cli import app
from anisoscope.corpora import load_corpus
from anisoscope.figures import captions, embeddings_data
from anisoscope.models import load_model
from anisoscope.records import Unit
from anisoscope.report import gather
from anisoscope.store import Store

SITE = "unembed.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("weights")
    options = ["--metrics", "mean_cosine", "--sites", "embed.weight,unembed.weight", "--tokens", "2048"]
    done = CliRunner().invoke(app, ["measure", "pocket-decoder", *options, "--seq-len", "128", "-o", str(where)])
    assert done.exit_code == 0, done.output
    return where


@pytest.fixture(scope="module")
def unit(folder: Path) -> Unit:
    store = Store(folder)
    (key,) = store.keys()
    return store.get(key)


def colours(chart: Any) -> set[str]:
    """Every field that a colour goes by."""

    def walk(part: Any) -> set[str]:
        if isinstance(part, list):
            return set().union(*map(walk, part))
        if not isinstance(part, dict):
            return set()
        found = part.get("encoding", {}).get("color", {}).get("field")
        return set().union({found} - {None}, *map(walk, part.values()))

    return walk(chart.to_dict())


def test_a_measured_matrix_has_the_log_frequency_of_each_row_drawn(unit: Unit) -> None:
    rows, known = (unit.attachments[f"weights/{SITE}.{part}"] for part in ("rows", "log_frequency"))
    assert known.shape == rows.shape == (2000,)
    tokenizer = load_model("pocket-decoder").tokenizer
    text = load_corpus("pydoc").documents[:200]
    counts = Counter(token for ids in tokenizer(list(text), add_special_tokens=False)["input_ids"] for token in ids)
    often = [row for row, count in counts.items() if count > 300 and row in set(rows.tolist())]
    assert len(often) > 20
    mine = np.log([counts[row] / counts.total() for row in often])
    theirs = [known[rows.tolist().index(row)] for row in often]
    # Part of a text against most of it: shares agree to a factor, their order nearly.
    assert spearmanr(mine, theirs)[0] > 0.8
    assert np.abs(mine - theirs).mean() < 0.5
    assert known.max() < 0
    assert np.isfinite(known).all()


def test_the_figure_is_coloured_by_frequency_and_its_caption_tells_the_correlation(folder: Path) -> None:
    (shown,) = gather([folder]).runs
    (figure,) = [one for one in shown.figures if one.name.startswith(f"embeddings-{SITE}")]
    assert colours(figure.draw()) == {"log_frequency"}
    rows = [row for row in figure.data.to_pylist() if row["variant"] == "centred=no"]
    wanted = spearmanr([row["x"] for row in rows], [row["log_frequency"] for row in rows])[0]
    assert f"rank correlations {captions.say(wanted)} raw" in figure.caption
    assert abs(wanted) > 0.2


def test_a_store_from_before_frequencies_is_drawn_in_one_colour(unit: Unit) -> None:
    old = replace(
        unit, attachments={name: part for name, part in unit.attachments.items() if "log_frequency" not in name}
    )
    data = embeddings_data(old, site=SITE)
    assert all(math.isnan(value) for value in data["log_frequency"].to_pylist())
    assert colours(figures.embeddings(old, site=SITE)) == set()
    assert "correlation" not in captions.embeddings_caption(data)


def test_rows_that_no_token_has_are_hollow_and_counted(unit: Unit) -> None:
    known = unit.attachments[f"weights/{SITE}.log_frequency"].copy()
    known[:500] = math.nan
    padded = replace(unit, attachments={**unit.attachments, f"weights/{SITE}.log_frequency": known})
    data = embeddings_data(padded, site=SITE, most=2000)
    spec = figures.embeddings(padded, site=SITE, most=2000).to_dict()
    assert "hollow: 500 rows that no token has" in " ".join(spec["title"]["subtitle"])
    assert sum(math.isnan(value) for value in data["log_frequency"].to_pylist()) == 1000
    assert figures.rendered(figures.embeddings(padded, site=SITE, most=2000), "svg").count(b'stroke="#8a8a8a"') >= 1000
