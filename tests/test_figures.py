"""What the figures show: numbers that can be checked by hand."""

import json
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anisoscope.claims import judge
from anisoscope.columns import SCHEMA
from anisoscope.errors import SpecError
from anisoscope.figures import (
    alignment_bins_data,
    alignment_data,
    catalogue,
    concepts,
    concepts_data,
    count_label,
    curvature_data,
    dynamics_data,
    embeddings_data,
    heatmap_data,
    lengths_data,
    owners_data,
    populations_data,
    profile_data,
    scales_data,
    stages_data,
    steps_data,
    verdicts_data,
)
from anisoscope.printing import _alignment_table
from anisoscope.records import Estimate, Record, Spec, Unit
from anisoscope.store import Store

NAN = math.nan


def record(
    values: tuple[float, ...] = (1.0, 3.0),
    *,
    model: str = "m",
    step: int | None = 1,
    revision: str | None = "",
    site: str = "block.0",
    blocks: int = 2,
    null: float = 10.0,
    **rest: Any,
) -> Record:
    """One row; the revision is the step's name unless given, the depth follows from the site."""
    estimate = Estimate.from_values(values, null=null, points=100, dropped=0, dim=8)
    number = int(site.removeprefix("block.")) if site.startswith("block.") else None
    return Record(
        **{
            "key": f"{model}-{step}",
            "model": model,
            "revision": f"step{step}" if revision == "" else revision,
            "step": step,
            "tokens": None,
            "kind": "decoder",
            "stack": None,
            "corpus": "pydoc",
            "population": "all",
            "site": site,
            "depth": None if number is None else (number + 1) / blocks,
            "metric": "twonn",
            "metric_version": 1,
            "value": estimate.value,
            "spread": estimate.spread,
            "null": null,
            "batches": len(values),
            "points": 100,
            "dropped": 0,
            "excluded": 0,
            "dim": 8,
            "values": values,
            **rest,
        }
    )


def table_of(*records: Record) -> pa.Table:
    """A run's table, in no order a figure could rely on."""
    rows = [asdict(row) for row in records]
    random.Random(0).shuffle(rows)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def column(table: pa.Table, *names: str) -> list[Any]:
    values = [table[name].to_pylist() for name in names]
    return values[0] if len(names) == 1 else list(zip(*values, strict=True))


ALL = {"metric": "twonn", "populations": ["all"]}


def test_a_profile_is_the_blocks_of_each_models_last_checkpoint() -> None:
    table = table_of(
        *(record(site=f"block.{k}", blocks=11, step=9, value=9.0) for k in (2, 10, 9)),
        *(record(site=f"block.{k}", blocks=11, step=10, value=10.0) for k in (2, 10, 9)),
        record(site="embed", step=10),
        record(site="final_norm", step=10),
        record(model="n", step=None, revision=None, stack="encoder"),
    )
    data = profile_data(table, **ALL)
    assert column(data, "model", "step", "block") == [("m", 10, 2), ("m", 10, 9), ("m", 10, 10), ("n", None, 0)]
    assert column(data, "depth") == [3 / 11, 10 / 11, 1.0, 0.5]
    assert column(data, "value") == [10.0, 10.0, 10.0, 2.0]
    assert column(data, "stack", "kind", "corpus", "points")[-1] == ("encoder", "decoder", "pydoc", 100)


def test_a_profile_has_its_spread_around_it() -> None:
    table = table_of(record((1.0, 3.0)), record((4.0,), site="block.1", suspect="same weights as step0"))
    data = profile_data(table, **ALL)
    two, one = data.to_pylist()
    assert (two["value"], two["low"], two["high"], two["null"]) == (2.0, 2 - math.sqrt(2), 2 + math.sqrt(2), 10.0)
    assert (one["value"], one["batches"], one["suspect"]) == (4.0, 1, "same weights as step0")
    assert math.isnan(one["low"])
    assert math.isnan(one["high"])


def test_a_profile_at_given_steps_and_populations_in_the_order_asked() -> None:
    table = table_of(
        *(record(step=step, population=which) for step in (9, 10, 11) for which in ("all", "types", "matched"))
    )
    data = profile_data(table, metric="twonn", populations=("types", "all"), steps=[10, 9])
    assert column(data, "step", "population") == [(9, "types"), (9, "all"), (10, "types"), (10, "all")]


def test_the_last_checkpoint_is_that_of_the_last_stage() -> None:
    table = table_of(
        record(step=900, stage="stage1", revision="stage1-step900"),
        record(step=5, stage="stage2", revision="stage2-step5"),
    )
    assert column(profile_data(table, **ALL), "revision") == ["stage2-step5"]


def test_each_corpus_has_its_own_last_checkpoint() -> None:
    table = table_of(*(record(step=step) for step in (1, 2)), record(step=1, corpus="enwik8", key="other"))
    assert column(profile_data(table, **ALL), "corpus", "step") == [("enwik8", 1), ("pydoc", 2)]


def test_dynamics_average_over_blocks_batch_by_batch() -> None:
    # Block means of the batches are 2, 4 and 9: what moves both blocks stays in the spread, what cancels does not.
    table = table_of(
        record((1.0, 6.0, 8.0), null=10.0),
        record((3.0, 2.0, 10.0), site="block.1", null=20.0),
        record((500.0, 500.0, 500.0), site="embed"),
    )
    (row,) = dynamics_data(table, **ALL).to_pylist()
    assert row["value"] == 5.0
    assert row["spread"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert row["null"] == 15.0
    assert (row["blocks"], row["batches"], row["low"]) == (2, 3, row["value"] - row["spread"])
    assert row["spread"] != pytest.approx(np.mean([np.std([1, 6, 8], ddof=1), np.std([3, 2, 10], ddof=1)]))


def test_dynamics_where_numbers_are_missing() -> None:
    # The third block has none at all; the second has none in the second batch, which is left out of the spread.
    table = table_of(
        record((1.0, 100.0, 3.0)),
        record((3.0, NAN, 9.0), site="block.1"),
        record((NAN, NAN, NAN), site="block.2", null=NAN),
        record((7.0,), step=2),
        record((NAN,), step=3, null=NAN),
    )
    some, one, none = dynamics_data(table, **ALL).to_pylist()
    assert some["value"] == pytest.approx((104 / 3 + 6) / 2)
    assert some["spread"] == pytest.approx(np.std([2, 6], ddof=1))
    assert (some["null"], some["blocks"]) == (10.0, 2)
    assert one["value"] == 7.0
    assert math.isnan(one["spread"])
    assert none["blocks"] == 0
    assert math.isnan(none["value"])
    assert math.isnan(none["null"])


def test_dynamics_keep_stacks_populations_and_corpora_apart() -> None:
    table = table_of(
        record((1.0,), stack="encoder"),
        record((2.0,), stack="decoder"),
        record((3.0,), stack="encoder", population="types"),
        record((4.0,), stack="encoder", corpus="enwik8", key="other"),
    )
    data = dynamics_data(table)
    assert column(data, "corpus", "population", "stack", "value") == [
        ("enwik8", "all", "encoder", 4.0),
        ("pydoc", "all", "encoder", 1.0),
        ("pydoc", "all", "decoder", 2.0),
        ("pydoc", "types", "encoder", 3.0),
    ]
    assert column(dynamics_data(table, corpus="enwik8", populations=["all"]), "value") == [4.0]


def test_dynamics_carry_the_loss_of_their_own_unit() -> None:
    loss = {"site": "output", "metric": "loss"}
    table = table_of(
        record(step=1),
        record((5.0, 7.0), step=1, **loss),
        record((9.0, 9.0), step=1, key="other settings", **loss),
        record(step=2, suspect="wrong"),
    )
    data = dynamics_data(table, **ALL)
    assert column(data, "loss", "suspect") == [(6.0, None), (None, "wrong")]
    assert column(data, "loss_spread")[0] == pytest.approx(math.sqrt(2))


def test_zero_stands_one_decade_left_of_the_smallest_step_of_the_figure() -> None:
    table = table_of(
        *(record(step=step) for step in (1000, 0, 10, 143_000)),
        *(record(model="n", step=step) for step in (0, 1000)),
    )
    data = dynamics_data(table, **ALL)
    assert column(data, "label") == ["0", "10", "1k", "143k", "0", "1k"]
    assert column(data, "position") == [0.0, 1.0, pytest.approx(3.0), math.log10(143_000), 0.0, pytest.approx(3.0)]
    assert column(dynamics_data(table_of(record(step=0)), **ALL), "position") == [0.0]


def test_steps_go_in_order_of_numbers_and_stages_before_steps() -> None:
    table = table_of(
        *(record(step=step, stage=stage, revision=f"{stage}-step{step}") for stage in ("stage10", "stage9")
          for step in (10, 9)),
    )  # fmt: skip
    wanted = ["stage9-step9", "stage9-step10", "stage10-step9", "stage10-step10"]
    assert column(dynamics_data(table, **ALL), "revision") == wanted
    assert column(dynamics_data(table, **ALL, axis="checkpoint"), "position", "label") == list(enumerate(wanted))


def test_an_axis_of_tokens_is_never_guessed() -> None:
    table = table_of(
        record(model="known", step=1, tokens=2_097_152),
        record(model="known", step=1000, tokens=2_097_152_000),
        record(model="unknown", step=1),
        record(model="partly", step=1, tokens=5),
        record(model="partly", step=None, revision="main"),
    )
    with pytest.raises(SpecError, match="wanted tokens for the axis; not known of partly, unknown, as at"):
        dynamics_data(table, **ALL, axis="tokens")
    with pytest.raises(SpecError, match="wanted step for the axis; not known of partly, as at partly@main"):
        dynamics_data(table, **ALL)
    known = dynamics_data(table, **ALL, axis="tokens", keys=["known-1", "known-1000"])
    assert column(known, "label") == ["2.1M", "2.1B"]
    assert column(known, "position") == [math.log10(2_097_152), math.log10(2_097_152_000)]


def test_a_series_without_steps_goes_by_its_index() -> None:
    names = ["ckpt_9", "ckpt_10", "ckpt_100"]
    table = table_of(*(record(step=None, revision=name, key=name) for name in names))
    data = dynamics_data(table, **ALL, axis="checkpoint")
    assert column(data, "label", "position") == [("ckpt_9", 0.0), ("ckpt_10", 1.0), ("ckpt_100", 2.0)]
    assert column(steps_data(table, model="m", metric="twonn"), "label") == names
    with pytest.raises(SpecError, match="axis is one of step, tokens, checkpoint; came 'time'"):
        dynamics_data(table, **ALL, axis="time")


PYTHIA = [0, *(2**k for k in range(10)), *range(1000, 144_000, 1000)]


def test_steps_are_spaced_in_the_logarithm_with_the_first_and_the_last() -> None:
    table = table_of(
        *(record(step=step, site=f"block.{k}") for step in PYTHIA for k in range(2)),
        record(step=None, revision="main"),
    )
    data = steps_data(table, model="m", metric="twonn")
    # Seven equal parts from -1, where zero stands, to log10(143000) = 5.155: the steps between lie nearest to
    # 10 to the powers -.12, .76, 1.64, 2.52, 3.40 and 4.28, or .76, 5.7, 43, 329, 2500 and 18900.
    assert column(data, "step")[::2] == [0, 1, 8, 32, 256, 3000, 19_000, 143_000]
    assert column(data, "block")[:4] == [0, 1, 0, 1]
    assert column(data, "label")[::2] == ["0", "1", "8", "32", "256", "3k", "19k", "143k"]
    assert column(steps_data(table, model="m", metric="twonn", most=2), "step")[::2] == [0, 143_000]
    assert column(steps_data(table, model="m", metric="twonn", steps=[512, 4]), "step")[::2] == [4, 512]
    assert len(steps_data(table, model="m", metric="twonn", most=1000)) == 2 * len(PYTHIA)
    with pytest.raises(SpecError, match="most is at least 2; came 1"):
        steps_data(table, model="m", metric="twonn", most=1)


def test_steps_that_start_again_in_each_stage_are_spaced_by_index() -> None:
    table = table_of(
        *(record(step=k, stage=f"stage{s}", revision=f"stage{s}-step{k}") for s in (1, 2) for k in range(5))
    )
    data = steps_data(table, model="m", metric="twonn", most=4)
    assert column(data, "stage", "step") == [("stage1", 0), ("stage1", 3), ("stage2", 1), ("stage2", 4)]


def test_a_heatmap_goes_a_tokens_way_and_with_the_training() -> None:
    sites = ["embed", "block.0", "block.9", "block.10", "final_norm"]
    table = table_of(
        *(record(step=step, site=site, stack=stack, blocks=11, value=float(step))
          for step in (10, 9) for site in sites for stack in ("decoder", "encoder")),
        record(model="n"),
    )  # fmt: skip
    data = heatmap_data(table, model="m", metric="twonn", population="all")
    way = [("encoder", site) for site in sites] + [("decoder", site) for site in sites]
    assert column(data, "stack", "site") == way + way
    assert column(data, "place") == [*range(10), *range(10)]
    assert column(data, "checkpoint", "label", "value") == [(0, "9", 9.0)] * 10 + [(1, "10", 10.0)] * 10
    assert column(data, "depth")[:2] == [None, 1 / 11]


def test_a_site_missing_at_one_checkpoint_keeps_its_place() -> None:
    table = table_of(record(step=1, site="block.1"), *(record(step=2, site=f"block.{k}") for k in range(2)))
    data = heatmap_data(table, model="m", metric="twonn", population="all")
    assert column(data, "step", "place") == [(1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    "figure",
    [
        lambda table, **rest: profile_data(table, **ALL, **rest),
        lambda table, **rest: dynamics_data(table, **ALL, **rest),
        lambda table, **rest: steps_data(table, model="m", metric="twonn", **rest),
        lambda table, **rest: heatmap_data(table, model="m", metric="twonn", population="all", **rest),
    ],
    ids=["profile", "dynamics", "steps", "heatmap"],
)
def test_one_number_under_two_settings_is_refused_until_one_is_chosen(figure: Any) -> None:
    table = table_of(record((1.0, 1.0), key="short"), record((3.0, 3.0), key="long"))
    with pytest.raises(SpecError, match=r"several settings: twonn \[all\] of m@step1 on pydoc .*key .*Choose .*keys="):
        figure(table)
    assert column(figure(table, keys=["long"]), "value") == [3.0]
    versions = table_of(record(step=1), record(step=2, metric_version=2))
    with pytest.raises(SpecError, match="twonn in versions 1, 2"):
        figure(versions)
    variants = table_of(record(variant="from=embed"), record(variant="from=block.3"))
    with pytest.raises(SpecError, match=r"variant from=.* and from="):
        figure(variants)


def test_blocks_of_different_units_are_not_averaged() -> None:
    table = table_of(record(key="short"), record(key="long", site="block.1"))
    with pytest.raises(SpecError, match="several settings"):
        dynamics_data(table, **ALL)


def test_what_is_not_there_is_told_with_what_is() -> None:
    table = table_of(record(), record(population="types"), record(site="embed", metric="isoscore"))
    for wanted, match in (
        ({"metric": "loss"}, "wanted metric loss; there is isoscore, twonn"),
        ({"metric": "twonn"}, "wanted population typical; there is all, types"),
        ({**ALL, "corpus": "enwik8"}, "wanted corpus enwik8; there is pydoc"),
        ({**ALL, "keys": ["x"]}, "wanted key x; there is m-1"),
        ({**ALL, "steps": [1, 7]}, "wanted step 7; there is 1"),
        ({**ALL, "metric": "isoscore"}, "wanted blocks; isoscore is there at embed"),
    ):
        with pytest.raises(SpecError, match=match):
            profile_data(table, **wanted)
    with pytest.raises(SpecError, match="wanted model n; there is m"):
        heatmap_data(table, model="n", metric="twonn", population="all")
    with pytest.raises(SpecError, match="wanted metric leading_variance; there is nothing"):
        profile_data(table_of())
    many = table_of(*(record(step=step) for step in range(20)))
    with pytest.raises(SpecError, match="wanted step 99; there is 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"):
        steps_data(many, model="m", metric="twonn", steps=[99])


def test_labels_of_counts() -> None:
    counts = {
        0: "0", 1: "1", 512: "512", 999: "999", 1000: "1k", 1024: "1.02k", 1500: "1.5k", 143_000: "143k",
        999_499: "999k", 999_600: "1M", 2_097_152: "2.1M", 2_097_152_000: "2.1B", 3 * 10**12: "3T",
    }  # fmt: skip
    assert {count: count_label(count) for count in counts} == counts


def test_a_run_on_disk_is_drawn_from_without_torch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (10, 9):
        spec = Spec(model="m", step=step)
        rows = tuple(replace(record(step=step, site=f"block.{k}"), key=spec.key) for k in range(2))
        store.put(Unit(spec=spec, provenance={"time": "now", "notes": []}, records=rows))
    assert column(dynamics_data(store.table(), **ALL), "step", "value") == [(9, 2.0), (10, 2.0)]
    code = (
        "import sys; from anisoscope.store import Store; from anisoscope.figures import profile_data\n"
        "print(len(profile_data(Store(sys.argv[1]).table(), metric='twonn', populations=['all'])))\n"
        "assert not {'torch', 'transformers', 'altair'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


RUNS = Path(__file__).parent.parent / "docs" / "runs"


def test_populations_of_one_model_stand_side_by_side() -> None:
    table = table_of(
        *(record((v, v), step=step, population=which, site=f"block.{k}")
          for step in (1, 2) for k in range(2) for v, which in ((9.0, "all"), (1.0, "typical"))),
        record((5.0, 5.0), model="n"),
    )  # fmt: skip
    data = populations_data(table, model="m", metric="twonn")
    assert column(data, "step", "population", "block", "value") == [
        (2, "all", 0, 9.0), (2, "all", 1, 9.0), (2, "typical", 0, 1.0), (2, "typical", 1, 1.0),
    ]  # fmt: skip


def test_a_thinned_heatmap_keeps_the_first_and_the_last() -> None:
    table = table_of(*(record(step=step, site=site) for step in PYTHIA for site in ("embed", "block.0")))
    data = heatmap_data(table, model="m", metric="twonn", population="all", most=8)
    assert sorted(set(column(data, "step"))) == [0, 1, 8, 32, 256, 3000, 19_000, 143_000]
    assert len(data) == 16


def test_stages_go_from_the_last_block_through_the_norm() -> None:
    sites = ["final_norm", "block.1", "final_norm.gained", "final_norm.normed", "block.0", "embed"]
    table = table_of(
        *(record((float(k), float(k)), site=site, metric="isoscore") for k, site in enumerate(sites)),
        *(record(site=site, metric="mean_cosine") for site in ("block.1", "final_norm")),
    )
    data = stages_data(table)
    assert column(data, "metric", "through", "site", "value") == [
        ("isoscore", "last block", "block.1", 1.0),
        ("isoscore", "normed", "final_norm.normed", 3.0),
        ("isoscore", "gained", "final_norm.gained", 2.0),
        ("isoscore", "final norm", "final_norm", 0.0),
    ]
    with pytest.raises(SpecError, match=r"wanted mean_cosine at final_norm\.normed; measure with the family"):
        stages_data(table, metrics=["mean_cosine"])


def test_scales_are_numbers_and_go_in_their_order() -> None:
    table = table_of(*(record((k, k), metric=f"gride_{k:.0f}") for k in (16.0, 2.0, 4.0)), record(metric="gride_no"))
    data = scales_data(table, model="m", populations=["all"])
    assert column(data, "scale", "value") == [(2, 2.0), (4, 4.0), (16, 16.0)]
    with pytest.raises(SpecError, match=r"wanted metrics gride_2, gride_4 \.\.\.; there is none"):
        scales_data(table_of(record()), model="m")


def test_window_lengths_are_compared_at_one_checkpoint() -> None:
    table = table_of(
        record((1.0, 1.0), key="short", step=5),
        record((3.0, 3.0), key="short", step=5, site="block.1"),
        record((6.0, 6.0), key="long", step=5),
        record((9.0, 9.0), key="early", step=1),
    )
    data = lengths_data(table, {"long": 512, "short": 64, "early": 128}, metric="twonn", populations=["all"])
    assert column(data, "seq_len", "value", "blocks") == [(64, 2.0, 2), (512, 6.0, 1)]
    with pytest.raises(SpecError, match="wanted lengths of the units early, long, short; they are given for other"):
        lengths_data(table, {"other": 1}, metric="twonn")


def aligned(energy: float, control: float, *, site: str = "block.0", p: float = 0.01, **rest: Any) -> list[Record]:
    how = {"gradient": "virtual", "proxy": "pca", "rank": 16, "variant": "mean=in", "site": site}
    how |= {"population": "typical", **rest}
    named = "permuted" if site == "block.0" else "signs"
    return [
        record((energy,), metric="tangent_energy", low=energy - 0.1, high=energy + 0.2, **how),
        record((energy - control,), metric="tangent_excess", control=named, control_value=control, p=p, **how),
        record((9.0,), metric="normal_ratio", control="normal", control_value=0.05, p=0.005, **how),
    ]


def test_alignment_is_averaged_over_blocks_with_every_control() -> None:
    table = table_of(
        *aligned(0.6, 0.4, step=10),
        *aligned(0.8, 0.7, step=10, site="block.1", p=0.2),
        # Beyond random spaces, and below the next directions, which have no p.
        *aligned(0.7, 0.8, step=10, site="block.2", p=0.005),
        *aligned(0.5, 0.5, step=0),
        *aligned(0.1, 0.1, step=10, variant="mean=out"),
        *aligned(0.1, 0.1, step=10, population="all"),
        *(row for row in aligned(0.9, 0.1, step=10, bin=3) if row.metric == "tangent_energy"),
    )
    data = alignment_data(table, model="m")
    found = {(row["step"], row["quantity"]): row for row in data.to_pylist()}
    assert len(found) == len(data) == 6
    energy, hardest, normals = (found[10, name] for name in ("tangent energy", "hardest control", "random normals"))
    assert energy["value"] == pytest.approx(0.7)
    assert (hardest["value"], hardest["control"]) == (pytest.approx(1.9 / 3), "permuted, signs")
    assert (hardest["blocks"], hardest["significant"]) == (3, 1)
    assert (normals["blocks"], normals["significant"]) == (3, 3)
    assert normals["value"] == pytest.approx(0.05)
    # Intervals of single blocks are none of their mean.
    assert energy["low"] is None
    # The printed table counts alike.
    printed = _alignment_table([*aligned(0.6, 0.4), *aligned(0.7, 0.8, site="block.2", p=0.005)])
    assert [list(one.cells) for one in printed.columns if one.header == "beyond chance"] == [["1/2"]]
    assert found[0, "tangent energy"]["low"] == pytest.approx(0.4)
    assert column(data, "label") == ["0", "10"] * 3
    dealt = [replace(row, control="shuffled", control_value=0.65) for row in aligned(0.6, 0.4)[:1]]
    data = alignment_data(table_of(*dealt, *aligned(0.6, 0.4)[1:]), model="m")
    found = {row["quantity"]: (row["value"], row["control"], row["low"]) for row in data.to_pylist()}
    assert found["tangent energy"] == (pytest.approx(0.6), None, pytest.approx(0.5))
    assert found["shuffled targets"] == (pytest.approx(0.65), "shuffled", None)
    assert len(found) == 4


def test_alignment_over_depth_is_that_of_the_last_checkpoint() -> None:
    table = table_of(
        *aligned(0.6, 0.4, step=10), *aligned(0.8, 0.7, step=10, site="block.1"), *aligned(0.5, 0.5, step=0)
    )
    data = alignment_data(table, model="m", axis="depth")
    assert column(data, "quantity", "position", "step")[:2] == [
        ("tangent energy", 0.5, 10),
        ("tangent energy", 1.0, 10),
    ]
    assert column(data, "low")[:2] == [pytest.approx(0.5), pytest.approx(0.7)]
    with pytest.raises(SpecError, match=r"wanted tangent_energy of m \[all, mean=in\] at blocks; there is none"):
        alignment_data(table, model="m", population="all")
    with pytest.raises(SpecError, match="several settings"):
        alignment_data(table_of(*aligned(0.6, 0.4), *aligned(0.6, 0.4, key="other")), model="m")
    with pytest.raises(SpecError, match=r"wanted tangent_energy of other \[any, mean=in\] at blocks; there is none"):
        alignment_data(table, model="other")
    others = table_of(*aligned(0.6, 0.4, population="all"))
    assert set(column(alignment_data(others, model="m"), "population")) == {"all"}


def test_bins_keep_the_intervals_of_their_rows() -> None:
    how = {"metric": "tangent_energy", "gradient": "activation", "proxy": "pca", "variant": "mean=in"}
    how |= {"population": "typical"}
    table = table_of(
        *(record((0.1 * k,), bin=k, low=0.0, high=1.0, step=step, **how) for k in (2, 0, 1) for step in (1, 5)),
        record((0.7,), step=5, **how),
    )
    data = alignment_bins_data(table, model="m")
    assert column(data, "bin", "step", "low", "high") == [(k, 5, 0.0, 1.0) for k in range(3)]
    assert column(data, "log10_frequency") == [None] * 3
    # As they are stored, each bin with its frequency in the variant: one figure of all bins, on an axis of frequency.
    of_bins = [
        record((0.1,), bin=k, step=5, **{**how, "variant": f"mean=in;log10_frequency={k - 4}.50"}) for k in (0, 1)
    ]
    stated = table_of(*of_bins)
    assert column(alignment_bins_data(stated, model="m"), "log10_frequency", "variant") == [
        (-4.5, "mean=in"),
        (-3.5, "mean=in"),
    ]
    without = record((0.3,), bin=0, step=5, **{**how, "variant": "mean=out;log10_frequency=-4.50"})
    both = table_of(*of_bins, without)
    (found,) = [one for one in catalogue(both) if one.name.startswith("alignment_bins")]
    assert len(found.data) == 2
    assert column(alignment_bins_data(both, model="m", variant="mean=out"), "value") == [0.3]


def test_curvature_goes_by_the_exponent_that_is_stated() -> None:
    curved = {"metric": "curvature_visibility", "low": 0.1, "high": 0.9}
    table = table_of(
        *(record((e,), key=str(e), variant=f"rank=4;exponent={e}", **curved) for e in (1.0, 0.25)),
        record((5.0,), key="unstated", **curved),
        record((5.0,), key="odd", variant="exponent=much", **curved),
    )
    assert column(curvature_data(table), "exponent", "value", "low") == [(0.25, 0.25, 0.1), (1.0, 1.0, 0.1)]
    with pytest.raises(SpecError, match="wanted curvature_visibility with exponent="):
        curvature_data(table_of(record()))


def test_concepts_are_ordered_by_how_long_they_live_and_then_by_their_largest_share() -> None:
    table = pa.table(
        {
            "step": [0, 100, 10, 100, 10],
            "track": [7, 7, 3, 3, 1],
            "cosine": [None, 0.9, None, 0.5, None],
            "share_of_energy": [0.1, 0.2, 0.6, 0.1, 0.9],
            "top_tokens": ["a", "a", "b", "b", "c"],
        }
    )
    data = concepts_data(table)
    assert column(data, "track", "step", "place", "position") == [
        (1, 10, 2, 1.0),
        (3, 10, 0, 1.0),
        (3, 100, 0, 2.0),
        (7, 0, 1, 0.0),
        (7, 100, 1, 2.0),
    ]
    assert set(column(concepts_data(table, most=1), "track")) == {3}
    for most, says in ((1, "the 1 of 3 concepts that live longest, at 2 checkpoints"), (3, "3 concepts, at 3 check")):
        assert says in json.dumps(concepts(table, most=most).to_dict())
    with pytest.raises(SpecError, match="there is no cosine, top_tokens"):
        concepts_data(table.drop_columns(["cosine", "top_tokens"]))


def test_the_life_of_concepts_is_drawn_where_units_have_them_at_several_checkpoints() -> None:
    store = Store(RUNS / "pocket-concepts")
    units = [store.get(key) for key in sorted(store.keys())]
    (found,) = [one for one in catalogue(store.table(), units=units) if one.section == "concepts"]
    assert found.name == "concepts-pocket-decoder-block.3"
    assert set(column(found.data, "step")) <= {0, 16, 64, 256, 1024, 4096}
    assert len(set(column(found.data, "track"))) == 40
    assert "pocket-decoder, block.3, enwik8" in found.draw().to_dict()["title"]["subtitle"]
    (alone,) = [[one for one in catalogue(store.table(), units=units[:1]) if one.section == "concepts"]]
    assert alone == []


def test_owners_and_matrices_are_read_from_a_stored_unit() -> None:
    store = Store(RUNS / "pocket-sites")
    units = [store.get(key) for key in sorted(store.keys())]
    unit = next(unit for unit in units if len(unit.owners()) == 10)
    data = owners_data(unit)
    entry = next(entry for entry in unit.owners() if entry["site"] == "block.3")
    shares = [row["share"] for row in data.to_pylist() if row["site"] == "block.3" and row["owner"] == "token"]
    assert shares == [token["share"] for token in entry["tokens"]]
    assert column(data, "site")[0] == "embed"
    assert column(data, "site")[-1] == "final_norm"
    with pytest.raises(SpecError, match="measure with --sites"):
        embeddings_data(unit)
    unit = next(unit for unit in units if "weights/embed.weight.rows" in unit.attachments)
    data = embeddings_data(unit, most=100)
    assert len(data) == 200
    row = data.to_pylist()[150]
    place = unit.attachments["weights/embed.weight.rows"].tolist().index(row["row"])
    assert row["variant"] == "centred=yes"
    assert row["x"] == pytest.approx(float(unit.attachments["weights/embed.weight.centred=yes.coordinates"][place, 0]))
    assert row["log_frequency"] == pytest.approx(float(unit.attachments["weights/embed.weight.log_frequency"][place]))
    with pytest.raises(SpecError, match="measure with --owners"):
        owners_data(replace(unit, attachments={}))


def test_verdicts_come_as_words_and_what_is_decided_comes_first() -> None:
    found = judge(Store(RUNS / "pocket-alignment").table(), resamples=50)
    data = verdicts_data(found)
    assert len(data) == len(found)
    words = column(data, "verdict")
    order = ["holds", "does not hold", "inconclusive"]
    assert words == sorted(words, key=order.index)
    assert words.count("inconclusive") == sum(one.holds is None for one in found)
    assert {"holds", "inconclusive"} <= set(words)
    one = next(one for one in found if one.holds)
    assert (one.claim, one.subject, one.effect) in column(data, "claim", "subject", "effect")


def test_the_pocket_run_gives_the_numbers_of_its_rows() -> None:
    table = Store(RUNS / "pocket").table()
    data = profile_data(table, metric="leading_variance")
    row = next(row for row in data.to_pylist() if (row["model"], row["site"]) == ("pocket-decoder-seed1", "block.3"))
    (same,) = (
        other
        for other in table.to_pylist()
        if all(other[name] == row[name] for name in ("model", "step", "site", "metric", "population"))
    )
    assert (row["value"], row["null"], row["step"]) == (same["value"], same["null"], 4096)
    blocks = dynamics_data(table, metric="twonn").to_pylist()
    assert {row["blocks"] for row in blocks} == {6}
    assert all(row["loss"] > 0 for row in blocks)
