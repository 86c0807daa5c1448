"""Error rates and power of every claim: stored in docs/claim_rates.json, printed in docs/methods.md, run again here."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scipy import stats

from anisoscope.claims import CLAIMS

ROOT = Path(__file__).parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


script = load_script("claim_rates")
STORED = {(row["claim"], row["situation"]): row for row in json.loads(script.STORED.read_text("utf-8"))}
CASES = {(case.claim, case.situation): case for case in script.cases()}


def test_the_stored_rates_are_those_of_the_script_and_of_the_documentation() -> None:
    assert list(STORED) == list(CASES)
    assert [row["kind"] for row in STORED.values()] == [case.kind for case in CASES.values()]
    text = script.METHODS.read_text("utf-8")
    assert script.table(list(STORED.values())) in text, "run scripts/claim_rates.py --write"


def test_every_claim_has_a_rate_where_an_assumption_fails_and_a_power() -> None:
    for kind in (script.BROKEN, script.SIGNAL):
        assert {case.claim for case in CASES.values() if case.kind == kind} == set(CLAIMS)
    # The paper's control has no situation in which nothing is there and it says so: that is what is wrong with it.
    ours = {name for name in CLAIMS if not name.endswith(script.PAPER)}
    papers_own = {name for name in CLAIMS if name.startswith(("emerges early", "persists")) and name not in ours}
    assert {case.claim for case in CASES.values() if case.kind == script.NULL} == ours
    assert papers_own <= {case.claim for case in CASES.values() if case.kind == script.BROKEN}


@pytest.mark.parametrize("case", CASES, ids="/".join)
def test_rates_are_as_stored_and_keep_their_level(case: tuple[str, str]) -> None:
    found, stored = CASES[case].count(), STORED[case]
    assert stored["draws"] == script.DRAWS
    # Other processors round sums in another order, and a draw at the very edge may fall on the other side.
    assert abs(found - stored["count"]) <= 2
    if stored["kind"] == script.NULL:
        assert found <= stats.binom.isf(0.001, script.DRAWS, 0.05)
    if stored["kind"] == script.SIGNAL:
        assert found >= 0.95 * script.DRAWS


@pytest.mark.slow(reason="a minute: gradients of two models and 2,500 pairings of their windows")
@pytest.mark.parametrize("model", ["pocket-decoder", "pocket-decoder@step64", "pocket-encoder"])
def test_most_blocks_keeps_its_level_for_blocks_of_real_models(model: str) -> None:
    found = load_script("block_dependence").measure(model)
    assert found["correlation_high"] > 0.7
    limit = stats.binom.isf(0.001, 500, 0.05) / 500
    assert max(found["none_enriched"], found["half_enriched"]) <= limit
    assert 0.03 < found["one_block"] < 0.07
