"""The walls of the house: which room may look into which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "anisoscope"

# Each room may use rooms of earlier lines, in its own wing: computing (with torch), reading (without).
COMPUTING = (
    {"errors", "validation", "records", "progress", "revisions"},
    {"atomic", "columns", "grouping", "inputs", "terminal"},
    {"tables", "result_files"},
    {"merged"},
    {"store", "hub", "schedules", "sinks", "presets", "conditions", "undisturbed", "tracks"},
    {"status", "sources", "exporting"},
    {"kernels", "passes", "scratch"},
    {"cloud", "metrics"},
    {"tangent"},
    {"stack"},
    {"nulls"},
    {"estimates"},
    {"weights", "repairs"},
    {"wikitext", "large_files"},
    {"corpora"},
    {"lab", "sampling", "baselines", "penalties"},
    {"text", "trace", "tokens"},
    {"layout"},
    {"models", "norms"},
    {"taps", "probes"},
    {"capture", "owners", "rooms", "attention"},
    {"gauge"},
    {"gradients", "updates"},
    {"probed", "past"},
    {"held"},
    {"holding"},
    {"alignment", "pinning", "curvature", "concepts"},
    {"handed", "looks"},
    {"running"},
    {"walk"},
    {"counterfactuals", "drift", "live"},
    {"shells", "trainer"},
    {"training"},
    {"integrity"},
    {"checkpoints", "fetch"},
    {"jobs"},
    {"engines"},
    {"sweep"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
READING = (
    {"errors", "validation", "records", "progress", "revisions", "wikitext"},
    {"large_files"},
    {"atomic", "columns", "grouping", "inputs", "terminal"},
    {"tables", "result_files"},
    {"merged"},
    {"store", "protocols", "integrity", "flags", "corpora", "presets"},
    {"lab"},
    {"status", "claims", "conditions", "figures", "stages", "tracks", "citing"},
    {"printing"},
    {"listings", "report"},
    {"serve", "reproductions"},
    {"commands"},
    {"cli"},
)
# Inside a function these may be loaded by rooms of the reading wing, at the moment a command needs them.
TORCH_FREE = (
    "anisoscope",
    "errors",
    "atomic",
    "tables",
    "validation",
    "inputs",
    "terminal",
    "grouping",
    "records",
    "progress",
    "revisions",
    "result_files",
    "merged",
    "store",
    "status",
    "protocols",
    "integrity",
    "hub",
    "sources",
    "checkpoints",
    "fetch",
    "claims",
    "conditions",
    "figures",
    "stages",
    "flags",
    "printing",
    "listings",
    "report",
    "serve",
    "reproductions",
    "exporting",
    "citing",
    "tracks",
    "commands",
    "cli",
    "corpora",
    "text",
    "lab",
    "sampling",
    "baselines",
    "schedules",
    "sinks",
    "presets",
    "probes",
)


def imports_of(source: str, *, top_level: bool) -> set[str]:
    """Modules a source text imports; `top_level` leaves out what functions import when they are called."""
    tree = ast.parse(source)
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if top_level and node in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            if node.module == "anisoscope":
                found |= {f"anisoscope.{alias.name}" for alias in node.names}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_used(source: str) -> set[str]:
    names = imports_of(source, top_level=True)
    return {name.split(".")[1] for name in names if name.startswith("anisoscope.")} - {"__version__"}


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def wrong_turns(path: Path, source: str, floor: tuple[set[str], ...]) -> set[str]:
    room = room_of(path)
    level = next(number for number, rooms in enumerate(floor) if room in rooms)
    allowed = set().union(*floor[: level + 1])
    return rooms_used(source) - allowed


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_uses_only_rooms_to_its_left(path: Path) -> None:
    wings = [floor for floor in (COMPUTING, READING) if any(room_of(path) in rooms for rooms in floor)]
    assert wings, f"{path.name} is in no wing: add it to the plan above"
    assert any(not wrong_turns(path, path.read_text(), floor) for floor in wings)


def test_the_order_check_sees_a_room_that_looks_right() -> None:
    source = "from anisoscope.walk import measure\n"
    assert wrong_turns(PACKAGE / "cloud.py", source, COMPUTING) == {"walk"}
    assert wrong_turns(PACKAGE / "store.py", source, READING) == {"walk"}
    assert rooms_used("from anisoscope import walk\n") == {"walk"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "metrics").glob("*.py")), ids=lambda path: path.name)
def test_the_mathematics_imports_torch_and_kernels_only(path: Path) -> None:
    outside = foreign_to_metrics(path.read_text())
    assert not outside


def foreign_to_metrics(source: str) -> set[str]:
    allowed = {"torch", "jaxtyping", "anisoscope.kernels", "anisoscope.metrics", "anisoscope.errors", "anisoscope"}
    return {
        name
        for name in imports_of(source, top_level=False)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == fine or name.startswith(f"{fine}.") for fine in allowed - {"anisoscope"})
    }


def test_the_mathematics_check_sees_a_stranger() -> None:
    assert foreign_to_metrics("import transformers\nfrom anisoscope.store import Store\nimport math, torch") == {
        "transformers",
        "anisoscope.store",
    }


def loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("room", TORCH_FREE)
def test_the_reading_wing_never_loads_torch(room: str) -> None:
    name = room if room == "anisoscope" else f"anisoscope.{room}"
    loaded = loaded_after(f"import {name}")
    assert name in loaded
    assert not loaded & {"torch", "transformers", "ray", "lightning", "datasets"}


def test_the_torch_check_can_fail() -> None:
    assert "torch" in loaded_after("import anisoscope.cloud")


def test_help_is_torch_free() -> None:
    code = (
        "import anisoscope.cli, contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    anisoscope.cli.app(['measure', '--help'])"
    )
    assert "torch" not in loaded_after(code)


def test_public_names_are_those_promised() -> None:
    import anisoscope

    promised = (
        "AnisoscopeError Estimate LightningCallback Record Scope Spec Store TrainerCallback Unit Verdict __version__ "
        "estimate every figures judge log_spaced measure run_sweep"
    )
    assert sorted(anisoscope.__all__) == sorted(promised.split())
    for name in anisoscope.__all__:
        assert getattr(anisoscope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        anisoscope.nothing  # noqa: B018


def test_one_version_everywhere() -> None:
    import anisoscope

    root = PACKAGE.parent.parent
    assert f"version: {anisoscope.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"## {anisoscope.__version__}" in (root / "CHANGELOG.md").read_text()
