"""The other packages, in an environment of their own: what scripts/parity.py and scripts/bench.py share with it."""

import hashlib
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Packages whose declared requirements cannot be met, and those that need a compiler and may be missing.
WITHOUT_DEPENDENCIES = ("llm-microscope", "overcomplete")
OPTIONAL = ("dadapy",)


def python_of(environment: Path) -> str:
    """The interpreter of an environment."""
    return str(environment / ("Scripts" if sys.platform == "win32" else "bin") / "python")


def make_environment(environment: Path, requirements: Path) -> None:
    """Create an environment unless it is there and made from the same lists."""
    constraints = ROOT / "constraints.txt"
    listed = requirements.read_text(encoding="utf-8")
    digest = hashlib.sha256(f"{listed}{constraints.read_text(encoding='utf-8')}{sys.version}".encode()).hexdigest()
    stamp = environment / ".ready"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return
    start = time.monotonic()
    print(f"making {environment.name} (a few minutes, once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    wanted = [line for line in listed.splitlines() if line and not line.startswith("#")]
    alone = [line for line in wanted if line.startswith(WITHOUT_DEPENDENCIES)]
    optional = [line for line in wanted if line.startswith(OPTIONAL)]
    install = [python_of(environment), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*install, *(line for line in wanted if line not in (*alone, *optional)), "torch"], check=True)
    subprocess.run([*install, "--no-deps", *alone], check=True)
    for line in optional:
        try:
            subprocess.run([*install, line], check=True, timeout=900)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            print(f"{line} does not install here and is left out", file=sys.stderr)
    stamp.write_text(digest, encoding="utf-8")
    print(f"{environment.name} took {time.monotonic() - start:.0f} s", file=sys.stderr)


def load_microscope() -> Any:
    """llm-microscope's functions from their file: importing the package fails. Called inside the environment."""
    found = importlib.util.find_spec("llm_microscope")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0]) / "functions.py"
    spec = importlib.util.spec_from_file_location("llm_microscope_functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
