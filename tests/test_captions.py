"""Numbers in the tutorials are those of the stored runs.

Each test builds the sentence or table row from docs/runs and looks for it in the page. After runs were measured again,
the message of a failing test is the text to paste.
"""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import anisoscope as an
from anisoscope.store import name_trainings

DOCS = Path(__file__).parent.parent / "docs"
SMALL_STEPS = (0, 16, 64, 256, 1024, 4096)


@functools.cache
def page(name: str) -> str:
    return re.sub(r"\s+", " ", (DOCS / f"{name}.md").read_text("utf-8"))


def says(name: str, text: str) -> None:
    assert text in page(name), f"docs/{name}.md should say: {text}"


@functools.cache
def rows(run: str, metric: str) -> tuple[dict[str, Any], ...]:
    """Blocks of one metric, without bins."""
    table = name_trainings(an.Store(DOCS / "runs" / run).table())
    kept = (pc.field("metric") == metric) & pc.field("depth").is_valid() & pc.field("bin").is_null()
    return tuple(table.filter(kept).sort_by("depth").to_pylist())


def blocks(run: str, metric: str, **wanted: Any) -> list[dict[str, Any]]:
    found = [row for row in rows(run, metric) if all(row[name] == value for name, value in wanted.items())]
    assert found, (run, metric, wanted)
    return found


def mean(run: str, metric: str, **wanted: Any) -> float:
    """Over blocks, of one checkpoint."""
    return float(np.mean([row["value"] for row in blocks(run, metric, **wanted)]))


def short(value: float, digits: int = 2) -> str:
    """`.05`, `-.013`, `2.00`."""
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def aligned(gradient: str, population: str = "all", **more: Any) -> dict[str, Any]:
    plain = {"gradient": gradient, "proxy": "pca", "variant": "mean=in"}
    return plain | {"population": population} | more


# docs/tutorials/tangent.md

RUNS = {"decoder": "pocket-alignment", "encoder": "pocket-alignment-encoder"}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("gradient", ["activation", "virtual"])
def test_the_table_of_excesses(kind: str, gradient: str) -> None:
    values = [mean(RUNS[kind], "tangent_excess", step=step, **aligned(gradient)) for step in SMALL_STEPS]
    says("tutorials/tangent", f"| {kind}, {gradient}: excess | | {' | '.join(short(one, 3) for one in values)} |")


@pytest.mark.parametrize("kind", RUNS)
def test_the_table_of_ratios(kind: str) -> None:
    values = [mean(RUNS[kind], "normal_ratio", step=step, **aligned("virtual")) for step in SMALL_STEPS]
    text = f"| times random normals | | {' | '.join(f'{one:.0f}' for one in values)} |"
    says("tutorials/tangent", text)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("gradient", ["activation", "virtual"])
def test_the_table_of_other_targets(kind: str, gradient: str) -> None:
    given = {"model": f"pocket-{kind}", "population": "typical", "gradient": gradient, "proxy": "pca"}

    true, shuffled = [], []
    for step in SMALL_STEPS:
        found = blocks("pocket-shuffled", "tangent_energy", step=step, variant="mean=in", **given)
        true.append(short(float(np.mean([row["value"] for row in found]))))
        shuffled.append(short(float(np.mean([row["control_value"] for row in found if row["control"] == "shuffled"]))))
    says("tutorials/tangent", f"| {kind}, {gradient}: energy | | {' | '.join(true)} |")
    says("tutorials/tangent", f"| with shuffled targets | | {' | '.join(shuffled)} |")


def test_the_small_decoder_has_its_excess_before_training() -> None:
    excess = {step: mean("pocket-alignment", "tangent_excess", step=step, **aligned("virtual")) for step in SMALL_STEPS}
    ratio = {step: mean("pocket-alignment", "normal_ratio", step=step, **aligned("virtual")) for step in SMALL_STEPS}
    says(
        "tutorials/tangent",
        f'the gradient is "enriched" {ratio[0]:.0f} times in a model that has learned nothing, {ratio[64]:.0f} times '
        f"at step 64. Read it by the orange line and the excess is {short(excess[0])} before training, "
        f"{short(excess[64])} at step 64 and {short(excess[4096])} at the end",
    )


def large(metric: str, kind: str, gradient: str, step: int, variant: str = "mean=in") -> list[dict[str, Any]]:
    given = aligned(gradient, "typical", model=f"large-{kind}", step=step) | {"variant": variant}
    return blocks("large-gradients", metric, **given)


def level(found: list[dict[str, Any]]) -> str:
    return short(float(np.mean([row["value"] for row in found])))


def beyond(found: list[dict[str, Any]]) -> int:
    """Blocks with a p of .05 or less, above their control."""
    return sum(row["value"] > 0 and row["p"] is not None and row["p"] <= 0.05 for row in found)


def test_the_larger_decoder() -> None:
    activation = {step: level(large("tangent_excess", "decoder", "activation", step)) for step in (31, 3816)}
    virtual = {step: large("tangent_excess", "decoder", "virtual", step) for step in (0, 31, 62, 123, 244, 3816)}
    words = {step: f"{level(found)} at step {step} ({beyond(found)} of 12 blocks)" for step, found in virtual.items()}
    says(
        "tutorials/tangent",
        f"stand {activation[31]} above the hardest control at step 31 and {activation[3816]} at the end. Bottom: the "
        f"virtual gradient has {level(virtual[0])} more than permuted pairs before the first step, then {words[31]}, "
        f"{words[62]}, {words[123]}, {words[244]} and {words[3816]}.",
    )


def test_the_larger_models_at_the_end() -> None:
    ends = [level(large("tangent_excess", kind, "activation", 3816)) for kind in ("decoder", "encoder")]
    starts = [level(large("tangent_excess", kind, "virtual", 0)) for kind in ("decoder", "encoder")]
    says("tutorials/tangent", f"activation gradients yes ({ends[0]} and {ends[1]} at the end")
    says(
        "tutorials/tangent", f"virtual ones before training, {starts[0]} in the decoder and {starts[1]} in the encoder"
    )


def test_shares_of_uneven_energy() -> None:
    """Beyond the hardest of our controls, mean over blocks, over the twelve small trainings."""
    found = an.judge(an.Store(DOCS / "runs" / "pocket-shares").table(), resamples=50)
    shares = [one for one in found if one.claim == "tangent share of gradient anisotropy"]
    of_activation = [one for one in shares if (one.variant or "").startswith("activation")]
    effects = [one.effect for one in of_activation]
    assert all(one.holds for one in of_activation)
    says("tutorials/tangent", f"(12 of 12, {short(min(effects), 3)} to {short(max(effects), 3)} of their uneven energy")


def test_readings_of_curvature() -> None:
    notes = [row["note"] or "" for row in rows("pocket-curvature-encoder", "curvature_visibility")]
    noisy = sum("noise" in note for note in notes)
    says("tutorials/tangent", f"gives {len(notes)} of {len(notes)} readings, {noisy} of them with the note that noise")


# docs/tutorials/shape-of-learning.md


def course(run: str, metric: str, model: str, population: str) -> dict[int, float]:
    found = blocks(run, metric, model=model, population=population)
    steps = sorted({row["step"] for row in found})
    return {step: float(np.mean([row["value"] for row in found if row["step"] == step])) for step in steps}


def test_leading_variance_over_training() -> None:
    courses = {kind: course("large", "leading_variance", f"large-{kind}", "all") for kind in ("decoder", "encoder")}
    peaks = {kind: max(one, key=lambda step, one=one: one[step]) for kind, one in courses.items()}
    assert set(peaks.values()) == {38}
    decoder, encoder = courses["decoder"], courses["encoder"]
    says(
        "tutorials/shape-of-learning",
        f"one axis takes {short(decoder[38])} of the variance in the decoder and {short(encoder[38])} in the encoder, "
        "both highest at step 38",
    )
    assert max(decoder[379], encoder[379]) < 0.09
    assert short(decoder[3816]) == short(encoder[3816])
    says(
        "tutorials/shape-of-learning",
        f"at the end both read {short(decoder[3816])}, the decoder a little above where it began "
        f"({short(decoder[0], 3)}), the encoder at half of it ({short(encoder[0], 3)})",
    )


def test_mean_cosine_over_training() -> None:
    decoder = course("large", "mean_cosine", "large-decoder", "all")
    assert max(decoder, key=lambda step: decoder[step]) == 14
    says("tutorials/shape-of-learning", f"is highest at step 14 ({short(decoder[14])})")
    says("tutorials/shape-of-learning", f"it is {short(decoder[101])} at step 101 and ends at {short(decoder[3816])}")
    encoder = course("large", "mean_cosine", "large-encoder", "all")
    says("tutorials/shape-of-learning", f"near its level before training ({short(encoder[0])})")
    assert short(encoder[3816]) == ".26"


def test_dimension_over_training() -> None:
    texts = []
    for kind in ("decoder", "encoder"):
        one = course("large", "twonn", f"large-{kind}", "types")
        lowest = min(one, key=lambda step: one[step])
        texts.append((one[0], one[lowest], lowest, one[3816]))
    (first, low, step, last), (other_first, other_low, _, other_last) = texts
    says(
        "tutorials/shape-of-learning",
        f"decoder {first:.0f}, {low:.0f} at step {step}, {last:.0f} at the end; encoder {other_first:.0f}, "
        f"{other_low:.0f} at steps 141 to 196, {other_last:.0f}.",
    )
    decoder = course("large", "twonn", "large-decoder", "all")
    says("tutorials/shape-of-learning", f"the decoder rises from {decoder[0]:.1f} to {decoder[3816]:.1f}")


def test_profiles_at_the_end() -> None:
    decoder = [
        row["value"] for row in blocks("large", "leading_variance", model="large-decoder", population="all", step=3816)
    ]
    says(
        "tutorials/shape-of-learning",
        f"highest at its second and third block ({short(decoder[1], 3)}, {short(decoder[2], 3)}), lowest in the middle "
        f"({short(min(decoder), 3)}) and goes up again to {short(decoder[-1], 3)}",
    )


def test_what_claims_says_of_the_pocket_series() -> None:
    """Rows of the tutorial that rested on steps 0 to 13 and 4,096 are withdrawn until the series has common steps."""
    found = [one for one in an.judge(an.Store(DOCS / "runs" / "pocket").table(), resamples=50) if one.steps]
    assert {one.holds for one in found if one.subject.endswith("*")} == {None}
    steps = ", ".join(map(str, next(one.steps for one in found if one.subject == "pocket-decoder-seed*")))
    says("tutorials/shape-of-learning", f"the decoders' seeds have only the steps {steps} in common")
