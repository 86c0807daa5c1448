"""Install the lowest version of every dependency that pyproject.toml declares, and try what the package promises.

    python scripts/check_minimums.py [--torch VERSION] [--environment FOLDER] [--extras train]

In an environment of its own: measurements of both pocket models, a training of a few steps in each layout, a
measurement of what it saved, and the demo. `--torch` installs that version in place of the lowest: for Linux, old
wheels of torch come with gigabytes of CUDA, so where these cannot be installed the lowest torch is not checked.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from peers import python_of

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--tokens", "2048", "--seq-len", "256", "--batch-points", "512", "--metrics", "mean_cosine,twonn,loss"]
RECIPE = ["--steps", "3", "--layers", "2", "--width", "32", "--vocabulary", "300", "--seq-len", "64"]
LAYOUTS = {"gpt_neox": "decoder", "bert": "encoder", "eurobert": "encoder"}


def lowest_versions(extras: list[str]) -> dict[str, str]:
    """Package -> the lowest version declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = project["dependencies"] + [one for extra in extras for one in project["optional-dependencies"][extra]]
    found = {}
    for requirement in listed:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        if match is None:
            raise SystemExit(f"{requirement} in pyproject.toml declares no lowest version: NAME>=VERSION was wanted")
        found[match.group(1)] = match.group(2)
    return found


def commands(folder: Path) -> list[list[str]]:
    """What is tried, as words after `anisoscope`."""
    found = [["measure", model, *SMALL] for model in ("pocket-decoder", "pocket-encoder")]
    for layout, kind in LAYOUTS.items():
        run = folder / layout
        found.append(["train", "--kind", kind, "--layout", layout, *RECIPE, "-o", str(run)])
        settings = ["--tokens", "512", "--seq-len", "32", "--batch-points", "128", "--metrics", "mean_cosine,loss"]
        found.append(["measure", str(run), "--revision", "checkpoint-3", *settings])
    return [*found, ["demo", "--tokens", "2048", "-o", str(folder / "demo")]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="VERSION", help="install this torch in place of the lowest declared one")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-minimums", help="where it is made, anew")
    parser.add_argument("--extras", nargs="*", default=["train"], help="optional dependencies to install as well")
    arguments = parser.parse_args()
    versions = lowest_versions(arguments.extras)
    if arguments.torch:
        print(f"torch {arguments.torch} in place of the lowest declared one, {versions['torch']}", file=sys.stderr)
        versions["torch"] = arguments.torch
    python = python_of(arguments.environment)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(arguments.environment)], check=True)
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned], check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for words in commands(Path(folder)):
            command = [python, "-m", "anisoscope", *words]
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
            print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} anisoscope {' '.join(words)}", flush=True)
            if done.returncode != 0:
                failed += 1
                print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
