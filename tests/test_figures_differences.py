"""The difference of two runs as a figure: numbers that can be checked by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from test_figures import column, record, table_of

from anisoscope import figures
from anisoscope.errors import SpecError
from anisoscope.figures import contrast, difference_data
from anisoscope.records import Record
from anisoscope.store import Store

RUNS = Path(__file__).parent.parent / "docs" / "runs"
TWONN: dict[str, Any] = {"metric": "twonn"}


def blocks(*values: tuple[float, ...], **rest: Any) -> list[Record]:
    return [record(one, site=f"block.{k}", blocks=len(values), **rest) for k, one in enumerate(values)]


def test_a_difference_is_the_other_less_the_first_with_the_spread_of_the_batches_differences() -> None:
    first = table_of(*blocks((1.0, 3.0), (5.0, 5.0)), record((100.0, 100.0), site="embed"))
    other = table_of(*blocks((2.0, 6.0), (4.0, 4.0), null=13.0))
    data = difference_data(first, other, **TWONN, names=("a", "b"))
    one, two = data.to_pylist()
    assert (one["first_value"], one["other_value"], one["value"]) == (2.0, 4.0, 2.0)
    # The batches move together: 1 and 3, not what two separate spreads would give.
    assert one["spread"] == pytest.approx(math.sqrt(2))
    assert (one["low"], one["high"]) == (pytest.approx(2 - math.sqrt(2)), pytest.approx(2 + math.sqrt(2)))
    assert (two["value"], two["spread"], two["null"]) == (-1.0, 0.0, 3.0)
    assert column(data, "first", "other", "site", "depth") == [("a", "b", "block.0", 0.5), ("a", "b", "block.1", 1.0)]


def test_only_the_same_batches_give_a_spread() -> None:
    first, more = table_of(*blocks((1.0, 3.0))), table_of(*blocks((1.0, 2.0, 3.0)))
    elsewhere = first.set_column(first.column_names.index("corpus"), "corpus", pa.array(["another text"]))
    for other, value in ((more, 0.0), (elsewhere, 0.0), (table_of(*blocks((5.0,))), 3.0)):
        (row,) = difference_data(first, other, **TWONN).to_pylist()
        assert row["value"] == value
        assert math.isnan(row["spread"])


def test_a_training_is_compared_at_the_checkpoints_that_both_have() -> None:
    first = table_of(*(row for step in (0, 10, 100) for row in blocks((1.0, 2.0), (3.0, 6.0), step=step)))
    other = table_of(*(row for step in (10, 100, 500) for row in blocks((2.0, 2.0), (4.0, 8.0), step=step)))
    data = difference_data(first, other, **TWONN, axis="step")
    assert column(data, "step", "label", "blocks") == [(10, "10", 2), (100, "100", 2)]
    # Means of the blocks are 2, 4 and 3, 5.
    assert column(data, "first_value", "other_value", "value", "spread") == [(3.0, 4.0, 1.0, 0.0)] * 2
    # Over depth, the last of them and not each one's last.
    assert set(column(difference_data(first, other, **TWONN), "step")) == {100}


def test_checkpoints_without_one_in_common_are_compared_at_the_last_of_each() -> None:
    first, other = table_of(*blocks((1.0, 1.0), step=0), *blocks((2.0, 2.0), step=1)), table_of(*blocks((7.0, 7.0)))
    other = other.set_column(other.column_names.index("step"), "step", pa.array([9], pa.int64()))
    assert column(difference_data(first, other, **TWONN), "value") == [5.0]
    with pytest.raises(SpecError, match="there is none"):
        difference_data(first, other, **TWONN, axis="step")


def test_a_block_without_a_number_in_one_run_is_left_out_of_both_means() -> None:
    first = table_of(*blocks((1.0, 1.0), (math.nan, math.nan)))
    other = table_of(*blocks((2.0, 4.0), (50.0, 50.0)))
    (row,) = difference_data(first, other, **TWONN, axis="step").to_pylist()
    assert (row["blocks"], row["first_value"], row["other_value"]) == (1, 1.0, 3.0)
    nothing = table_of(*blocks((math.nan,), (math.nan,)))
    (row,) = difference_data(nothing, other, **TWONN, axis="step").to_pylist()
    assert row["blocks"] == 0
    assert math.isnan(row["value"])


def test_only_models_of_one_make_are_compared_and_single_ones_under_both_names() -> None:
    first, other = table_of(*blocks((1.0,)), *blocks((2.0,), model="n")), table_of(*blocks((5.0,), model="n"))
    assert column(difference_data(first, other, **TWONN), "model", "value") == [("n", 3.0)]
    alone = first.filter(pc.field("model") == "m")
    assert column(difference_data(alone, other, **TWONN), "model", "value") == [("n less m", 4.0)]
    with pytest.raises(SpecError, match="there is none"):
        difference_data(alone, table_of(*blocks((1.0,), (2.0,), model="n")), **TWONN)
    with pytest.raises(SpecError, match="versions 1, 2, which are different numbers"):
        difference_data(alone, table_of(*blocks((1.0,), metric_version=2)), **TWONN)
    with pytest.raises(SpecError, match="axis is one of depth, step, tokens, checkpoint; came 'time'"):
        difference_data(alone, other, **TWONN, axis="time")


def test_depths_must_agree_and_not_only_their_number() -> None:
    first = table_of(*(record((1.0,), site=f"block.{k}", blocks=4) for k in (0, 1)))
    assert len(difference_data(first, first, **TWONN)) == 2
    other = table_of(*(record((1.0,), site=f"block.{k}", blocks=4) for k in (2, 3)))
    with pytest.raises(SpecError, match="there is none"):
        difference_data(first, other, **TWONN)


def halves() -> tuple[pa.Table, pa.Table]:
    table = Store(RUNS / "pocket").table()
    one, two = (table.filter(pc.field("model") == f"pocket-decoder-seed{seed}") for seed in (0, 1))
    return one, two


def test_two_real_trainings_have_a_difference_over_depth_and_over_training_of_every_metric() -> None:
    first, other = halves()
    found = contrast(first, other, names=("zero", "one"))
    metrics = ("isoscore", "leading_variance", "mean_cosine", "participation_ratio", "twonn")
    assert [figure.name for figure in found] == [
        f"difference-{metric}-over-{axis}" for metric in metrics for axis in ("depth", "training")
    ]
    assert {figure.error for figure in found} == {None}
    figure = next(figure for figure in found if figure.name == "difference-leading_variance-over-depth")
    value = {row["site"]: row["value"] for row in figure.data.to_pylist() if row["population"] == "all"}["block.4"]
    ends = [
        row["value"]
        for table in (first, other)
        for row in table.to_pylist()
        if (row["metric"], row["population"], row["site"], row["step"]) == ("leading_variance", "all", "block.4", 4096)
    ]
    assert value == pytest.approx(ends[1] - ends[0])
    assert figure.caption.startswith("leading_variance of one less that of zero, 6 blocks: [all] -.0124 on average")
    picture = figures.rendered(figure.draw(), "svg").decode()
    assert "leading_variance, one less zero, at the" in picture


def test_zero_is_in_sight_and_nulls_are_drawn_where_they_differ() -> None:
    first, other = table_of(*blocks((1.0, 1.5), (1.2, 1.3))), table_of(*blocks((31.0, 32.0), (36.0, 37.0)))
    text = json.dumps(figures.difference(first, other, **TWONN).to_dict())
    assert '"y": {"axis": {"tickCount": 5}, "datum": 0' in text
    assert '"zero": true' in text
    assert '"log"' not in text
    assert "difference of the nulls" not in text
    moved = table_of(*blocks((31.0, 32.0), (36.0, 37.0), null=40.0))
    assert "difference of the nulls" in json.dumps(figures.difference(first, moved, **TWONN).to_dict())
    over = figures.difference(*halves(), metric="twonn", populations=["all"], axis="step").to_dict()
    assert "training step (log)" in json.dumps(over)


def test_runs_with_nothing_in_common_have_no_figure_of_a_difference() -> None:
    first, other = halves()
    assert contrast(first, other.filter(pc.field("site") == "embed")) == []
    assert contrast(first, other.filter(pc.field("depth").is_null())) == []
    shorter = other.filter(pc.field("site") != "block.5")
    assert contrast(first, shorter) == []
    assert contrast(first.slice(0, 0), other) == []
    renamed = other.filter(pc.field("metric") == "twonn").filter(pc.field("population") == "types")
    assert {len(set(column(one.data, "population"))) for one in contrast(first, renamed)} == {1}


def test_many_models_are_divided_by_the_colours_there_are() -> None:
    names = [f"m{k}" for k in range(11)]
    first, other = (
        table_of(*(row for name in names for row in blocks((level, level), model=name))) for level in (1.0, 2.0)
    )
    one, two = contrast(first, other)
    assert [len(set(column(figure.data, "model"))) for figure in (one, two)] == [8, 3]
    assert np.allclose(column(one.data, "value"), 1.0)
    assert one.caption.endswith("and 4 more lines.")
