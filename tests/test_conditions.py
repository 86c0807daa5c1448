"""Gates: what they say, when they close, and that none is silently without effect."""

import math
import subprocess
import sys
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.columns import SCHEMA
from anisoscope.conditions import Condition, parse, place_of
from anisoscope.errors import SpecError
from anisoscope.records import Record


def row(value: float, *, site: str = "block.0", metric: str = "leading_variance", **rest: object) -> Record:
    record = Record(
        key="k",
        model="m",
        revision=None,
        step=None,
        tokens=None,
        kind="decoder",
        stack=None,
        corpus="pydoc",
        population="all",
        site=site,
        depth=None,
        metric=metric,
        metric_version=1,
        value=value,
        spread=0.0,
        null=0.0,
        batches=1,
        points=1,
        dropped=0,
        excluded=0,
        dim=1,
    )
    return replace(record, **rest)  # type: ignore[arg-type]


def table(*records: Record) -> pa.Table:
    return pa.Table.from_pylist([asdict(record) for record in records], schema=SCHEMA)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("leading_variance[final_norm] > 0.9", ("leading_variance", "final_norm", None, ">", 0.9, 1, ())),
        ("twonn[block.3,types] <= 2", ("twonn", "block.3", "types", "<=", 2.0, 1, ())),
        ("  loss[output]>5  ", ("loss", "output", None, ">", 5.0, 1, ())),
        ("twonn[ block.* , typical ] >= .9 for 3", ("twonn", "block.*", "typical", ">=", 0.9, 3, ())),
        ("mean_cosine[embed] < -1.5e-2 for 1", ("mean_cosine", "embed", None, "<", -0.015, 1, ())),
        (
            "tangent_excess[block.*, typical, virtual ,mean=in] < 0",
            ("tangent_excess", "block.*", "typical", "<", 0.0, 1, ("virtual", "mean=in")),
        ),
    ],
)
def test_texts_that_are_conditions(text: str, wanted: tuple) -> None:
    found = parse(text)
    assert tuple(asdict(found).values()) == wanted
    assert parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss > 5",
        "loss[output]",
        "loss[output] = 5",
        "loss[output] == 5",
        "loss[output] => 5",
        "loss[output] > five",
        "loss[output] > nan",
        "loss[output] > 5 for",
        "loss[output] > 5 for x",
        "loss[output] > 5for 3",
        "loss[] > 5",
        "loss[output,] > 5",
        "loss[a,all,] > 5",
        "loss[a,all,b c] > 5",
        "loss[output] > 5 and loss[output] < 6",
    ],
)
def test_texts_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError, match=r"a condition reads METRIC\[SITE\].*; came .*for example") as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_unknown_populations_and_no_checkpoints_are_refused() -> None:
    with pytest.raises(SpecError, match="POPULATION must be one of all, content, typical"):
        parse("loss[output,some] > 5")
    with pytest.raises(SpecError, match="CHECKPOINTS must be 1 or more"):
        parse("loss[output] > 5 for 0")


@given(st.floats(allow_nan=False), st.floats(allow_nan=False, allow_infinity=False))
def test_one_value_is_compared_as_python_does(value: float, number: float) -> None:
    outcomes = {sign: Condition(metric="m", site="s", operator=sign, number=number).holds(value) for sign in "><"}
    assert outcomes == {">": value > number, "<": value < number}
    closed = {s: Condition(metric="m", site="s", operator=s, number=number).holds(value) for s in (">=", "<=")}
    assert closed == {">=": value >= number, "<=": value <= number}


def test_nan_never_satisfies() -> None:
    assert not any(
        Condition(metric="m", site="s", operator=s, number=0.0).holds(math.nan) for s in (">", ">=", "<", "<=")
    )
    assert parse("loss[output] > 5").matches(table(row(math.nan, site="output", metric="loss"))) == []


def test_rows_that_satisfy_come_back_in_the_order_of_sites() -> None:
    rows = table(
        row(0.95, site="block.10"), row(0.95, site="block.9"), row(0.5, site="block.1"), row(0.99, site="final_norm")
    )
    assert [found["site"] for found in parse("leading_variance[block.*] > .9").matches(rows)] == ["block.9", "block.10"]
    assert parse("leading_variance[final_norm] > .9").matches(rows)[0]["value"] == 0.99
    assert parse("leading_variance[block.1] > .9").matches(rows) == []


def test_population_metric_and_site_are_those_named() -> None:
    rows = table(
        row(0.95, population="typical"),
        row(0.1),
        row(9.0, metric="twonn"),
        row(7.0, metric="twonn", population="types"),
    )
    assert parse("leading_variance[block.0] > .9").matches(rows) == []
    assert len(parse("leading_variance[block.0,typical] > .9").matches(rows)) == 1
    assert [found["value"] for found in parse("twonn[block.*,types] > 1").matches(rows)] == [7.0]


def test_a_metric_that_is_not_measured_on_all_tokens_needs_no_population() -> None:
    rows = table(row(0.3, metric="tangent_excess", population="typical"), row(0.9, population="all"))
    assert len(parse("tangent_excess[block.0] > .2").matches(rows)) == 1
    assert parse("leading_variance[block.0] > .9").matches(rows) == []


def test_numbers_of_another_kind_are_left_out_unless_they_are_named() -> None:
    rows = table(
        row(-0.1, metric="centroid_distance"),
        row(6.0, metric="centroid_distance", variant="of=mean"),
        row(0.5, gradient="virtual", proxy="pca", variant="mean=in"),
        row(0.3, gradient="activation", proxy="pca", variant="mean=in"),
        row(0.1, gradient="activation", proxy="pca", variant="mean=in;log10_frequency=-3.00", bin=0),
        row(-0.2, gradient="virtual", proxy="pca", variant="mean=in;split=types"),
    )
    assert parse("centroid_distance[block.0] > 1").matches(rows) == []
    assert [one["value"] for one in parse("centroid_distance[block.0,all,of=mean] > 1").matches(rows)] == [6.0]
    for text, values in (
        ("[block.0] < 1", [0.5, 0.3]),
        ("[block.0,all,activation] < 1", [0.3, 0.1]),
        ("[block.0,all,virtual,split=types] < 1", [-0.2]),
        ("[block.0,all,bin=0] < 1", [0.1]),
    ):
        found = parse("leading_variance" + text).matches(rows)
        assert sorted(one["value"] for one in found) == sorted(values), text
    (found,) = parse("leading_variance[block.0,all,bin=0] < 1").matches(rows)
    assert place_of(found) == "block.0 (activation, bin=0, log10_frequency=-3.00, mean=in, pca)"
    with pytest.raises(SpecError, match="no measured value is concerned"):
        parse("leading_variance[block.0,all,embedding] < 1").matches(rows)


def test_only_the_last_checkpoint_counts_and_9_comes_before_10() -> None:
    rows = table(row(0.95, step=10), row(0.1, step=9), row(0.99, step=2))
    assert [found["step"] for found in parse("leading_variance[block.0] > .9").matches(rows)] == [10]
    assert parse("leading_variance[block.0] < .9").matches(rows) == []


def test_stages_come_before_steps() -> None:
    rows = table(row(0.1, stage="stage1", step=9000), row(0.95, stage="stage2", step=10))
    assert len(parse("leading_variance[block.0] > .9").matches(rows)) == 1


@pytest.mark.parametrize(("values", "closes"), [((1, 1, 1), True), ((0, 1, 1, 1), True), ((1, 1, 0, 1), False)])
def test_it_must_last(values: tuple[int, ...], closes: bool) -> None:
    rows = table(*(row(float(value), step=step) for step, value in enumerate(values)))
    found = parse("leading_variance[block.0] > .9 for 3").matches(rows)
    assert [one["step"] for one in found] == ([len(values) - 1] if closes else [])


def test_checkpoints_of_different_settings_are_not_one_series() -> None:
    """Two checkpoints in a row, but under windows of different lengths."""
    both = table(row(0.95, step=1, key="a"), row(0.95, step=2, key="b"))
    lasting = parse("leading_variance[block.0] > 0.9 for 2")
    assert len(lasting.matches(both.append_column("seq_len", pa.array([512, 512])))) == 1
    assert lasting.matches(both.append_column("seq_len", pa.array([512, 64]))) == []


def test_too_few_checkpoints_do_not_last() -> None:
    assert parse("leading_variance[block.0] > .9 for 3").matches(table(row(1.0, step=1), row(1.0, step=2))) == []


def test_models_corpora_and_stacks_are_judged_apart() -> None:
    rows = table(
        row(1.0, step=1),
        row(0.0, step=2),
        row(1.0, step=1, model="n"),
        row(1.0, step=1, corpus="c"),
        row(1.0, step=3, stack="encoder"),
    )
    found = parse("leading_variance[block.0] > .9").matches(rows)
    assert [(one["model"], one["corpus"], one["stack"]) for one in found] == [
        ("m", "c", None),
        ("m", "pydoc", "encoder"),
        ("n", "pydoc", None),
    ]


def test_a_checkpoint_measured_twice_is_one_checkpoint() -> None:
    rows = table(row(0.0, step=1, key="a"), row(1.0, step=2, key="b"), row(0.0, step=2, key="c"))
    assert [one["key"] for one in parse("leading_variance[block.0] > .9").matches(rows)] == ["b"]
    assert parse("leading_variance[block.0] > .9 for 2").matches(rows) == []


@pytest.mark.parametrize(
    "text", ["leading_varience[block.0] > 1", "leading_variance[block.7] > 1", "twonn[block.0,types] > 1"]
)
def test_a_gate_that_cannot_close_is_refused(text: str) -> None:
    rows = table(row(1.0), row(2.0, metric="twonn"))
    with pytest.raises(
        SpecError, match=r"no measured value is concerned.*metrics: leading_variance, twonn; sites: block.0"
    ):
        parse(text).matches(rows)
    with pytest.raises(SpecError, match="metrics: none"):
        parse(text).matches(table())


def test_gates_load_no_torch() -> None:
    code = "import sys, anisoscope.conditions; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
