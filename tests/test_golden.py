"""Numbers, verdicts and figure data compared with stored ones: a change of structure must change none of them.

`ANISOSCOPE_GOLDEN=write pytest tests/test_golden.py` stores what the code gives now. Do that only for a change that is
meant to change numbers, and name the change in CHANGELOG.md under Numbers.
"""

import hashlib
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import anisoscope as an

STORED = Path(__file__).parent / "golden"
RUNS = Path(__file__).parent.parent / "docs" / "runs"
WRITE = os.environ.get("ANISOSCOPE_GOLDEN") == "write"
# Processors and thread counts round sums in another order. Iterative fits amplify that more than closed forms do.
CLOSE = {"rel": 1e-4, "abs": 1e-6}
ITERATED = {"rel": 2e-2, "abs": 2e-3}

SMALL: dict[str, Any] = {"tokens": 4096, "seq_len": 64, "batch_points": 1024, "sites": ("block.2", "block.3")}
MEASUREMENTS: dict[str, dict[str, Any]] = {
    "anisotropy": {},
    "isotropy": {"sites": ("block.3",)},
    "intrinsic_dimension": {},
    "linearity": {},
    "contextuality": {"populations": ("content",)},
    "drift": {"metrics": ("rogue_share", "rogue_r2_3", "query_drift", "key_drift", "attention_entropy")},
    "final_norm": {"sites": ("block.5", "final_norm*")},
    "output": {},
    "alignment": {"sites": ("block.3",), "populations": ("typical",)},
    "pinning": {"populations": ("content",)},
    "curvature": {"sites": ("block.3",)},
    "concepts": {"sites": ("block.3",)},
}
ROW = ("site", "population", "metric", "gradient", "proxy", "rank", "bin", "variant", "control")
NUMBERS = ("value", "spread", "null", "points", "dropped", "excluded", "control_value", "p", "low", "high")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sixty documents of words in sentences, the frequent ones in most, the same on every machine."""
    return write_documents(tmp_path_factory.mktemp("golden") / "words.jsonl", documents=60, sentences=60)


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As many words in more documents: alignment takes windows from 32 documents of each half."""
    return write_documents(tmp_path_factory.mktemp("golden") / "short.jsonl", documents=180, sentences=20)


def write_documents(path: Path, *, documents: int, sentences: int) -> str:
    chooser = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfglmprst" for b in "aeiou" for c in ("n", "r", "lly", "ck", "sts")]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    with path.open("w") as file:
        for _ in range(documents):
            text = (" ".join(chooser.choices(words, weights, k=chooser.randint(4, 14))) for _ in range(sentences))
            file.write(json.dumps({"text": ". ".join(text)}) + "\n")
    return str(path)


def compare(name: str, found: Any) -> Any:
    """What was stored under a name; with ANISOSCOPE_GOLDEN=write, store what was found instead."""
    path = STORED / f"{name}.json"
    if WRITE:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in found)
        path.write_text(f"[\n{lines}\n]\n", "utf-8")
    stored = json.loads(path.read_text("utf-8"))
    assert stored
    assert len(found) == len(stored)
    return stored


def digits(value: Any) -> Any:
    """A number with seven digits, None for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.7g}")
    return value


@pytest.mark.parametrize("model", ["pocket-decoder", "pocket-encoder"])
@pytest.mark.parametrize("family", MEASUREMENTS)
def test_a_small_measurement_gives_the_stored_numbers(
    family: str, model: str, corpus: str, short_documents: str
) -> None:
    settings = SMALL | {"metrics": (family,)} | MEASUREMENTS[family]
    text = short_documents if family == "alignment" else corpus
    unit = an.measure(an.Spec(model=model, corpus=text, **settings), progress=False)
    rows = [
        [[getattr(row, name) for name in ROW], [digits(getattr(row, name)) for name in NUMBERS]] for row in unit.records
    ]
    close = ITERATED if family == "concepts" else CLOSE
    for (names, numbers), (stored_names, stored) in zip(rows, compare(f"{model}-{family}", rows), strict=True):
        assert names == stored_names
        tolerance = ITERATED if "seminmf" in names else close
        for name, one, other in zip(NUMBERS, numbers, stored, strict=True):
            assert (one is None) == (other is None), (names, name)
            if one is not None:
                assert one == pytest.approx(other, **tolerance), (names, name)


JUDGED = ("large", "large-shares", "pocket", "pocket-alignment", "pocket-curvature-encoder", "pocket-sites")


@pytest.mark.parametrize("run", JUDGED)
def test_the_verdicts_on_a_stored_run_are_the_stored_ones(run: str) -> None:
    found = [
        [one.claim, one.subject, one.holds, digits(one.effect), one.text]
        for one in an.judge(an.Store(RUNS / run).table())
    ]
    for one, stored in zip(found, compare(f"verdicts-{run}", found), strict=True):
        assert one[:3] + one[4:] == stored[:3] + stored[4:]
        assert one[3] == (None if stored[3] is None else pytest.approx(stored[3], rel=1e-6))


@pytest.mark.parametrize("run", [*JUDGED, "pocket-concepts"])
def test_the_figures_of_a_stored_run_show_the_stored_data(run: str) -> None:
    table = an.Store(RUNS / run).table()
    figures = an.figures.catalogue(table, verdicts=an.judge(table))
    found = [[one.name, one.section, one.title, one.caption, one.data.num_rows, summary(one.data)] for one in figures]
    assert found == compare(f"figures-{run}", found)


def summary(table: pa.Table) -> str:
    """A hash over the names of the columns and over all values, floats with five digits."""
    digest = hashlib.sha256()
    for name in table.column_names:
        values = (f"{one:.5g}" if isinstance(one, float) else str(one) for one in table[name].to_pylist())
        digest.update(f"{name}:{'|'.join(values)}\n".encode())
    return digest.hexdigest()[:16]
