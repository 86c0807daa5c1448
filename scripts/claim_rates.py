"""How often each claim is called true: where nothing is there, where an assumption fails, where a signal is planted.

    python scripts/claim_rates.py            print what the code gives now
    python scripts/claim_rates.py --write    store it in docs/claim_rates.json and in the table of docs/methods.md

Every case runs the code that `anisoscope claims` runs, 500 times, from fixed seeds. tests/test_claim_rates.py runs them
again and compares.
"""

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from anisoscope.claims.catalogue import CLAIMS, PAPER
from anisoscope.claims.enrichment import ENRICHED, Excess, _found
from anisoscope.claims.findings import on_side
from anisoscope.claims.learning import Course, _kinds_differ, _lasts, _trend, _when
from anisoscope.claims.pinned import _found as _pinned
from anisoscope.claims.profiles import Profile
from anisoscope.claims.resampling import Resampling, pool_numbers, student
from anisoscope.claims.shapes import bell, flat, judge_kinds
from anisoscope.claims.trainings import Series, _seeds_grow, _seeds_peak

ROOT = Path(__file__).parent.parent
STORED = ROOT / "docs" / "claim_rates.json"
METHODS = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- claim rates: begin -->", "<!-- claim rates: end -->"
DRAWS = 500
HOW = Resampling(resamples=200)
BATCHES, BLOCKS, STEPS = 16, 8, 21
LINEAR = np.linspace(0, 20_000, STEPS).astype(int)
LOG = np.unique(np.concatenate([[0], np.geomspace(1, 20_000, 24).round()])).astype(int)[-STEPS:]
LOG[0] = 0
BELL = np.sin(np.linspace(0, np.pi, BLOCKS))
NULL, BROKEN, SIGNAL = "no effect", "assumption fails", "planted effect"

Draw = Callable[[np.random.Generator], bool]


@dataclass(frozen=True)
class Case:
    """One simulated situation."""

    claim: str
    kind: str
    situation: str
    draw: Draw
    """Whether the claim is called true, once."""

    def count(self, draws: int = DRAWS) -> int:
        """In how many draws it is called true."""
        random = np.random.default_rng(zlib.crc32(f"{self.claim}/{self.situation}".encode()))
        return sum(bool(self.draw(random)) for _ in range(draws))


def profile(values: np.ndarray, model: str = "m", kind: str = "decoder") -> Profile:
    """A checkpoint with these values (batches, blocks)."""
    blocks = values.shape[1]
    return Profile(
        place=("leading_variance", "all", "text"),
        model=model,
        kind=kind,
        stack=None,
        stage=None,
        step=None,
        revision=None,
        sites=tuple(f"block.{k}" for k in range(blocks)),
        depths=(np.arange(blocks) + 1) / blocks,
        values=values,
    )


def pooled(random: np.random.Generator, spread: float) -> np.ndarray:
    """Noise of batches, 70 % of its variance shared by the batches of a pool."""
    pools = pool_numbers(BATCHES)
    shared = random.normal(size=(pools.max() + 1, BLOCKS))[pools]
    return spread * (math.sqrt(0.7) * shared + math.sqrt(0.3) * random.normal(size=(BATCHES, BLOCKS)))


def of_shape(test: Callable, shape: np.ndarray, *, spread: float = 0.02, text: float = 0.0) -> Draw:
    """One model; `text` is what another text would change, the same in all batches."""

    def draw(random: np.random.Generator) -> bool:
        moved = shape + text * random.normal(size=BLOCKS)
        return test(profile(moved + pooled(random, spread)), HOW).supported is True

    return draw


def of_kinds(
    claim: str, heights: dict[str, float], *, spread: float = 0.03, shared: float = 0.0, skewed: bool = False
) -> Draw:
    """Three recipes of each kind, whose bells have these mean heights; recipes of a kind may share a deviation."""

    def draw(random: np.random.Generator) -> bool:
        models = []
        for kind, height in heights.items():
            common = random.normal()
            for number in range(3):
                own = (random.lognormal() - math.exp(0.5)) / 2.16 if skewed else random.normal()
                level = height + spread * (math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
                values = level * BELL + 0.005 * random.normal(size=(8, BLOCKS))
                models.append(profile(values, f"{kind}{number}", kind))
        return any(found.claim == claim and found.supported is True for _, found in judge_kinds(models, HOW))

    return draw


def of_training(
    test: Callable,
    curve: Callable[[np.ndarray], np.ndarray],
    steps: np.ndarray,
    *,
    spread: float,
    metric: str = "twonn",
) -> Draw:
    """Three seeds of a training whose mean is a curve over the share of its steps."""

    def draw(random: np.random.Generator) -> bool:
        values = curve(steps / steps[-1]) + spread * random.normal(size=(3, len(steps)))
        series = Series(
            place=(metric, "all", "text"),
            model="m-seed0",
            variant=None,
            steps=steps,
            values=values,
            pools=np.array([], int),
            left_out=0,
        )
        return test(series, HOW).supported is True

    return draw


def saturating(level: float, late: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    """Growth that is complete at a fifth of the training, then goes on by `late` over the rest."""
    return lambda share: level * (1 - np.exp(-25 * share)) + late * np.clip((share - 2 / 3) * 3, 0, 1)


def course(*points: tuple[float, float]) -> Callable[[np.ndarray], np.ndarray]:
    """Straight lines between points of share and level."""
    shares, levels = zip(*points, strict=True)
    return lambda share: np.interp(share, shares, levels)


def of_seeds(effect: float, margin: float, *, skewed: bool = False) -> Draw:
    """Three seeds, one number each, as claims about older theories are tested."""

    def draw(random: np.random.Generator) -> bool:
        noise = (math.exp(0.5) - random.lognormal(size=3)) / 2.16 if skewed else random.normal(size=3)
        return on_side(student(effect + 0.05 * noise, margin=margin, level=HOW.level), margin, above=True) is True

    return draw


def block_p(random: np.random.Generator, shift: np.ndarray, shared: float) -> np.ndarray:
    """One-sided p of permutation tests with 199 draws, of blocks that share a part of their noise."""
    noise = math.sqrt(shared) * random.normal() + math.sqrt(1 - shared) * random.normal(size=len(shift))
    return (1 + np.floor(199 * stats.norm.sf(noise + shift))) / 200


def of_blocks(enriched: int, *, shared: float = 0.5, blocks: int = 12, bias: float = 0.0) -> Draw:
    """The first blocks truly enriched; `bias` is what a control that is no null adds to every block, in z."""
    shift = np.where(np.arange(blocks) < enriched, 6.0, bias)

    def draw(random: np.random.Generator) -> bool:
        p_values = block_p(random, shift, shared)
        found = [Excess(value=0.05, p=float(p)) for p in p_values]
        return _found(ENRICHED, "{}", found, [], HOW).supported is True

    return draw


def of_types(pinned: int, *, shared: float = 0.5, bias: float = 0.0, trend: bool = False, blocks: int = 6) -> Draw:
    """Correlations over types: of distance (two-sided p) or of tangent energy (one-sided)."""
    shift = np.where(np.arange(blocks) < pinned, 6.0, bias)

    def draw(random: np.random.Generator) -> bool:
        p = block_p(random, shift, shared)
        if trend:
            rows = {f"block.{k}": {"value": 0.3, "p": float(one)} for k, one in enumerate(p)}
            answer = _trend({"tangent_frequency_trend": rows}, HOW)
            return answer is not None and answer.supported is True
        two_sided = np.minimum(1.0, 2 * np.minimum(p, 1 - p + 1 / 200))
        signs = np.where(p < 0.5, -0.3, 0.3)
        rows = [{"value": float(value), "p": float(one)} for value, one in zip(signs, two_sided, strict=True)]
        return _pinned(rows, [], HOW).supported is True

    return draw


def of_course(
    claim: str,
    level: Callable[[np.ndarray], np.ndarray],
    *,
    steps: np.ndarray = LOG,
    bias: float = 0.0,
    paper: bool = False,
) -> Draw:
    """One training of six blocks: excess beyond the control over the share of its steps, error .02 a block."""
    error, blocks = 0.02, 6
    place = ("text", "all", None, "virtual", "pca", None)
    share = steps / steps[-1]

    def draw(random: np.random.Generator) -> bool:
        noise = error * (
            math.sqrt(0.5) * random.normal(size=(len(steps), 1))
            + math.sqrt(0.5) * random.normal(size=(len(steps), blocks))
        )
        excess = np.where(steps[:, None] > 0, level(share)[:, None] + bias * error, 0.0) + noise
        p = (1 + np.floor(199 * stats.norm.sf(excess / error))) / 200
        checkpoints = []
        for step, values, p_values in zip(steps.tolist(), excess, p, strict=True):
            reach = 1.959964 * error
            rows = {
                f"block.{k}": {"step": step, "value": float(v), "p": float(q)}
                for k, (v, q) in enumerate(zip(values, p_values, strict=True))
            }
            ends = {
                name: row | {"low": row["value"] - reach, "high": row["value"] + reach} for name, row in rows.items()
            }
            ratios = {name: row | {"value": 1 + 9 * max(0.0, row["value"])} for name, row in rows.items()}
            checkpoints.append({"tangent_excess": rows, "tangent_energy": ends, "normal_ratio": ratios})
        one = Course(model="m", kind="decoder", place=place, checkpoints=tuple(checkpoints), untrained=checkpoints[0])
        test = _when if claim == "emerges early" else _lasts
        found = one.by_paper if paper else one.by_ours
        return test(one, found, HOW, "none").supported is True

    return draw


def of_recipes(difference: float, *, recipes: int = 3, shared: float = 0.0) -> Draw:
    """Recipes of both kinds with two seeds each; recipes of a kind may share a part of what they deviate by."""
    place = ("text", "all", None, "virtual", "pca", None)

    def draw(random: np.random.Generator) -> bool:
        families = {}
        for kind, base in (("decoder", difference), ("encoder", 0.0)):
            common = random.normal()
            for recipe in range(recipes):
                level = base + math.sqrt(shared) * common + math.sqrt(1 - shared) * random.normal()
                for seed in range(2):
                    rows = {"block.0": {"value": level + 0.05 * random.normal()}}
                    families[kind, recipe, seed] = [
                        Course(
                            model=f"{kind}-r{recipe}-seed{seed}",
                            kind=kind,
                            place=place,
                            checkpoints=({"tangent_excess": rows},),
                            untrained=None,
                        )
                    ]
        ((_, found),) = _kinds_differ(families, HOW)
        return found.supported is True

    return draw


def of_attenuation(ratio: float, *, bias: float = 0.0) -> Draw:
    """Six blocks with this ratio of visibilities; the error of its logarithm is .1."""
    from anisoscope.claims.learning import _attenuated

    def draw(random: np.random.Generator) -> bool:
        rows = {}
        for block in range(6):
            log = math.log(ratio) + bias + 0.1 * random.normal()
            low, high = math.exp(log - 0.196), math.exp(log + 0.196)
            rows[f"block.{block}"] = {"step": 1, "value": math.exp(log), "low": low, "high": high}
        one = Course(
            model="m",
            kind="decoder",
            place=("text", "content", None, None, None, None),
            checkpoints=({"frequency_attenuation": rows},),
            untrained=None,
        )
        answer = _attenuated(one, HOW)
        return answer is not None and answer.supported is True

    return draw


BELL_AT_MARGIN = np.array([0.0, *[0.05] * (BLOCKS - 2), -1.0])
FLAT_AT_MARGIN = np.array([0.0, *[0.05] * (BLOCKS - 2), 0.1])
COLLAPSE = ((0, 30.0), (0.01, 12.0))
THEORIES = (
    "rows drift together",
    "centring restores isotropy",
    "rare rows drift farther",
    "states move into a cone",
    "queries and keys drift",
    "attention sharpens",
    "states become anisotropic",
)


def cases() -> list[Case]:
    """Every situation, in the order of the claims."""
    grows, peaks, differ = "grows then stabilises", "rises then falls", "encoders and decoders differ"
    made = [
        Case("bell", NULL, "height exactly .05, pools", of_shape(bell, BELL_AT_MARGIN)),
        Case(
            "bell",
            BROKEN,
            "height .03, another text moves blocks by .03",
            of_shape(bell, 0.6 * BELL_AT_MARGIN, text=0.03),
        ),
        Case("bell", SIGNAL, "height .3", of_shape(bell, 0.3 * BELL)),
        Case("flat", NULL, "range exactly .1, pools", of_shape(flat, FLAT_AT_MARGIN)),
        Case(
            "flat",
            BROKEN,
            "range .12, another text moves blocks by .03",
            of_shape(flat, 1.2 * FLAT_AT_MARGIN, spread=0.006, text=0.03),
        ),
        Case("flat", SIGNAL, "range .02", of_shape(flat, 0.02 * BELL, spread=0.006)),
        Case("decoders are bells", NULL, "mean height exactly .05", of_kinds("decoders are bells", {"decoder": 0.05})),
        Case(
            "decoders are bells",
            BROKEN,
            "the same, recipes share half of their variance",
            of_kinds("decoders are bells", {"decoder": 0.05}, shared=0.5),
        ),
        Case("decoders are bells", SIGNAL, "mean height .4, SD .03", of_kinds("decoders are bells", {"decoder": 0.4})),
        Case("encoders are flat", NULL, "mean range exactly .1", of_kinds("encoders are flat", {"encoder": 0.1})),
        Case(
            "encoders are flat",
            BROKEN,
            "the same, recipes share half of their variance",
            of_kinds("encoders are flat", {"encoder": 0.1}, shared=0.5),
        ),
        Case(
            "encoders are flat",
            SIGNAL,
            "mean range .02",
            of_kinds("encoders are flat", {"encoder": 0.02}, spread=0.005),
        ),
        Case(differ, NULL, "equal heights, SD .03", of_kinds(differ, {"decoder": 0.1, "encoder": 0.1})),
        Case(
            differ,
            BROKEN,
            "the same, SD .1, recipes share .8 of their variance",
            of_kinds(differ, {"decoder": 0.3, "encoder": 0.3}, spread=0.1, shared=0.8),
        ),
        Case(differ, SIGNAL, "heights .4 and .05", of_kinds(differ, {"decoder": 0.4, "encoder": 0.05}, spread=0.02)),
    ]
    for name, steps in (("evenly spaced", LINEAR), ("log-spaced", LOG)):
        made += [
            Case(
                grows,
                NULL,
                f"growth exactly .05, {name} steps",
                of_training(_seeds_grow, saturating(0.05), steps, spread=0.003),
            ),
            Case(
                grows,
                NULL,
                f"growth that goes on by a third late, {name} steps",
                of_training(_seeds_grow, saturating(0.4, 0.2), steps, spread=0.01),
            ),
            Case(
                grows,
                SIGNAL,
                f"saturating growth of .4, {name} steps",
                of_training(_seeds_grow, saturating(0.4), steps, spread=0.01),
            ),
            Case(
                peaks,
                NULL,
                f"collapse, then flat, {name} steps",
                of_training(_seeds_peak, course(*COLLAPSE, (1, 12.0)), steps, spread=0.5),
            ),
            Case(
                peaks,
                NULL,
                f"collapse, then rise, {name} steps",
                of_training(_seeds_peak, course(*COLLAPSE, (1, 20.0)), steps, spread=0.5),
            ),
            Case(
                peaks,
                NULL,
                f"collapse, then further fall, {name} steps",
                of_training(_seeds_peak, course(*COLLAPSE, (1, 4.0)), steps, spread=0.5),
            ),
            Case(
                peaks,
                SIGNAL,
                f"30, 12, 20, 14, {name} steps",
                of_training(_seeds_peak, course((0, 30.0), (0.06, 12.0), (0.5, 20.0), (1, 14.0)), steps, spread=0.3),
            ),
            Case(
                peaks,
                SIGNAL,
                f"8, 16, 10 without an early fall, {name} steps",
                of_training(_seeds_peak, course((0, 8.0), (0.4, 16.0), (1, 10.0)), steps, spread=0.3),
            ),
        ]
    made += [
        Case(
            grows,
            BROKEN,
            "a change between the last two checkpoints that returns before the last, which none shows",
            of_training(_seeds_grow, saturating(0.4), LOG, spread=0.01),
        ),
        Case(peaks, BROKEN, "seeds share a random walk that is no effect of training", shared_walk()),
    ]
    for name in THEORIES:
        margin = CLAIMS[name].smallest_effect
        made += [
            Case(name, NULL, "three seeds, effect exactly at the smallest", of_seeds(margin, margin)),
            Case(name, BROKEN, "the same, skewed seeds", of_seeds(margin, margin, skewed=True)),
            Case(name, SIGNAL, "ten standard deviations beyond it", of_seeds(margin + 0.5, margin)),
        ]
    for name in (ENRICHED, "tangent share of gradient anisotropy"):
        made += [
            Case(name, NULL, "no block of 12, independent", of_blocks(0, shared=0.0)),
            Case(name, NULL, "no block of 12, .9 of their noise shared", of_blocks(0, shared=0.9)),
            Case(name, NULL, "exactly half of 12 blocks, independent", of_blocks(6, shared=0.0)),
            Case(name, NULL, "exactly half of 12 blocks, half of their noise shared", of_blocks(6)),
            Case(name, BROKEN, "a control one standard error too low in every block", of_blocks(0, bias=1.0)),
            Case(name, SIGNAL, "nine of 12 blocks", of_blocks(9)),
        ]
        made.append(
            Case(name + PAPER, BROKEN, "its control is no null: three standard errors too low", of_blocks(0, bias=3.0))
        )
        made.append(Case(name + PAPER, SIGNAL, "nine of 12 blocks", of_blocks(9)))
    for name, planted in (
        ("emerges early", course((0, 0.0), (0.05, 0.2), (1, 0.2))),
        ("persists", course((0, 0.0), (0.05, 0.2), (1, 0.2))),
    ):
        made += [
            Case(name, NULL, "no excess at any of 21 checkpoints", of_course(name, lambda share: 0 * share)),
            Case(
                name,
                NULL,
                "an excess in the last tenth alone",
                of_course(name, course((0, 0.0), (0.9, 0.0), (0.95, 0.3), (1, 0.3))),
            ),
            Case(
                name,
                BROKEN,
                "a control three standard errors too low after step 0",
                of_course(name, lambda share: 0 * share, bias=3.0),
            ),
            Case(
                name,
                SIGNAL,
                "an excess of .2 from a twentieth on, evenly spaced",
                of_course(name, planted, steps=LINEAR),
            ),
            Case(name, SIGNAL, "an excess of .2 from a twentieth on, log-spaced", of_course(name, planted)),
        ]
    for name in ("emerges early", "persists"):
        made += [
            Case(
                name + PAPER,
                BROKEN,
                "its control is no null: three standard errors too low after step 0",
                of_course(name, lambda share: 0 * share, bias=3.0, paper=True),
            ),
            Case(
                name + PAPER,
                SIGNAL,
                "an excess of .2 from a twentieth on, log-spaced",
                of_course(name, course((0, 0.0), (0.05, 0.2), (1, 0.2)), paper=True),
            ),
        ]
    trend, kinds, pinned = (
        "grows with frequency",
        "encoders and decoders differ in enrichment",
        "frequent types are pinned",
    )
    attenuated = "curvature is attenuated by frequency bias"
    made += [
        Case(trend, NULL, "no block of six", of_types(0, trend=True)),
        Case(trend, NULL, "exactly half of six blocks", of_types(3, trend=True)),
        Case(trend, BROKEN, "position goes with frequency: one standard error", of_types(0, trend=True, bias=1.0)),
        Case(trend, SIGNAL, "five of six blocks", of_types(5, trend=True)),
        Case(kinds, NULL, "equal, recipe SD 1, two seeds each", of_recipes(0.0)),
        Case(kinds, NULL, "the same with one recipe of each kind", of_recipes(0.0, recipes=1)),
        Case(kinds, BROKEN, "recipes of a kind share .8 of their variance", of_recipes(0.0, shared=0.8)),
        Case(kinds, SIGNAL, "ten recipe SDs apart", of_recipes(10.0)),
        Case(attenuated, NULL, "ratio exactly .9", of_attenuation(0.9)),
        Case(attenuated, BROKEN, "roughness of types lowers every ratio by 15 %", of_attenuation(0.9, bias=-0.15)),
        Case(attenuated, SIGNAL, "ratio .5", of_attenuation(0.5)),
        Case(pinned, NULL, "no block of six", of_types(0)),
        Case(pinned, NULL, "exactly half of six blocks", of_types(3)),
        Case(pinned, BROKEN, "centroids of rare types scatter: one standard error", of_types(0, bias=1.0)),
        Case(pinned, SIGNAL, "five of six blocks", of_types(5)),
    ]
    order = list(CLAIMS)
    return sorted(made, key=lambda one: order.index(one.claim))


def shared_walk() -> Draw:
    """Three seeds of one run: the same random walk, little noise of their own."""

    def draw(random: np.random.Generator) -> bool:
        walk = 20 + random.normal(size=STEPS).cumsum()
        return of_training(_seeds_peak, lambda share: walk, LINEAR, spread=0.2)(random)

    return draw


def table(stored: list[dict]) -> str:
    """The table of docs/methods.md."""
    lines = [
        "| claim, smallest effect | assumes | breaks it | situation | called true |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, claim in CLAIMS.items():
        first = True
        for row in stored:
            if row["claim"] != name:
                continue
            head = f"**{name}**, {claim.smallest_effect:g} ({claim.effect})" if first else ""
            rest = (claim.assumes, claim.breaks) if first else ("", "")
            situation = f"{row['kind']}: {row['situation']}"
            rate = f"{row['count'] / row['draws']:.3f}"
            lines.append(f"| {head} | {rest[0]} | {rest[1]} | {situation} | {rate} |")
            first = False
    return "\n".join(lines)


def main() -> None:
    """Count, print and perhaps store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the counts and write the table")
    arguments = parser.parse_args()
    stored = []
    for case in cases():
        start = time.perf_counter()
        stored.append(
            {"claim": case.claim, "kind": case.kind, "situation": case.situation, "draws": DRAWS, "count": case.count()}
        )
        took = f"{time.perf_counter() - start:5.2f} s {stored[-1]['count']:4d}/{DRAWS}"
        print(f"{took} {case.claim} | {case.kind}: {case.situation}", file=sys.stderr)
    if arguments.write:
        rows = ",\n".join(json.dumps(row) for row in stored)
        STORED.write_text(f"[\n{rows}\n]\n", "utf-8")
        text = METHODS.read_text("utf-8")
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        METHODS.write_text(f"{text[:start]}\n{table(stored)}\n{text[end:]}", "utf-8")


if __name__ == "__main__":
    main()
