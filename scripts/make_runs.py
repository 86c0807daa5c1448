"""Make the stored runs of the documentation again: train the models, then measure them.

python scripts/make_runs.py build/runs --jobs 8                     everything; enwik8 must be found (docs/lab.md)
python scripts/make_runs.py build/runs --only pocket-gradients      one run, with the trainings it needs
python scripts/make_runs.py build/runs --tiny --only pocket         the same commands with a few steps, to try them

Trainings are written to build/runs/trained, runs to build/runs/measured. Every command resumes, so the script can be
stopped and started again. On one NVIDIA H200 with 16 cores everything takes about 25 minutes with --jobs 14.
"""

import argparse
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LAYOUTS = {"decoder": "gpt_neox", "encoder": "eurobert"}
SEEDS = (0, 1, 2, 3, 4)
EXPONENTS = ("1.0", "0.5")
POCKET_STEPS = (0, 16, 64, 256, 1024, 4096)
POCKET = "--corpus enwik8 --layers 6 --width 112 --heads 7 --vocabulary 2048 --seq-len 256"
LARGE = "--corpus enwik8 --layers 12 --width 512 --heads 8 --vocabulary 8192 --seq-len 512"
# Without a limit on the time that measuring may take, every seed is measured at the same steps.
LIVE = "--budget inf --watch standard"
# The exit code of a training that was told to end before its last step.
PARTLY = 3


@dataclass(frozen=True)
class Training:
    """A model to train; `text` names the trainings that can share its tokenised text."""

    name: str
    flags: str
    text: str


@dataclass(frozen=True)
class Measurement:
    """Commands that write one stored run; `{}` in a command is the folder of the training it needs."""

    run: str
    command: str
    training: str | None = None


def trainings() -> list[Training]:
    """Every model that a stored run needs."""
    found = []
    for kind, layout in LAYOUTS.items():
        shape = f"--kind {kind} --layout {layout}"
        schedule = "--batch-size 128 --steps 3816 --learning-rate 1e-3 --warmup 200 --compile --checkpoints 14"
        found.append(Training(f"large-{kind}", f"{shape} {LARGE} {schedule} {LIVE} --watch-steps 26", f"large-{kind}"))
        schedule = "--batch-size 64 --steps 4096 --learning-rate 2e-3 --warmup 100 --checkpoints 14"
        found += [
            Training(
                f"pocket-{kind}-seed{seed}",
                f"{shape} {POCKET} {schedule} {LIVE} --watch-steps 40 --seed {seed}",
                f"pocket-{kind}",
            )
            for seed in SEEDS
        ]
        schedule = "--batch-size 8 --steps 768 --learning-rate 2e-3 --warmup 50 --checkpoints 13 --watch none"
        found += [
            Training(
                f"pocket-{kind}-a{exponent}-seed{seed}",
                f"{shape} {POCKET} {schedule} --sampling-exponent {exponent} --seed {seed}",
                f"pocket-{kind}",
            )
            for exponent in EXPONENTS
            for seed in SEEDS
        ]
    # The longest first.
    return sorted(found, key=lambda one: ("-a" in one.name, not one.name.startswith("large")))


def measurements() -> list[Measurement]:
    """Every stored run, command by command."""
    found = []
    gradients = "--metrics alignment,pinning,leading_variance,loss --populations typical --controls shares"
    for training in trainings():
        if "-a" in training.name:
            command = f"sweep {{}} --corpus heldout:enwik8 --follow {gradients} --sites block.*"
            settings = "--tokens 8192 --seq-len 128 --batch-points 2048"
            found.append(Measurement("pocket-gradients", f"{command} {settings}", training.name))
        elif training.name.startswith("large"):
            found.append(Measurement("large", "live", training.name))
            command = f"sweep {{}} --corpus heldout:enwik8 --follow {gradients} --sites block.*,final_norm"
            found.append(Measurement("large-gradients", f"{command} --tokens 16384 --seq-len 128", training.name))
        else:
            found.append(Measurement("pocket", "live", training.name))
    for kind in LAYOUTS:
        model, long = f"pocket-{kind}", "--tokens 16384 --seq-len 256"
        families = "--metrics anisotropy,isotropy,intrinsic_dimension,final_norm,loss"
        found.append(Measurement("pocket-sites", f"measure {model} {long} --owners {families}"))
        matrices = "--metrics leading_variance,mean_cosine --sites embed.weight,unembed.weight"
        found.append(Measurement("pocket-sites", f"measure {model} --tokens 8192 --seq-len 256 {matrices}"))
        for length in (16, 32, 64, 128):
            command = f"measure {model} --tokens 16384 --seq-len {length} --metrics leading_variance --sites block.*"
            found.append(Measurement("pocket-sites", command))
        folder = "pocket-alignment" if kind == "decoder" else "pocket-alignment-encoder"
        for step in POCKET_STEPS:
            short = f"measure {model}@step{step} --tokens 8192 --seq-len 128 --sites block.*"
            found.append(Measurement(folder, f"{short} --metrics alignment,loss --populations all"))
            shuffled = "--metrics tangent_energy,tangent_excess,normal_ratio --populations typical"
            found.append(Measurement("pocket-shuffled", f"{short} {shuffled} --controls shuffled_targets"))
    command = "sweep pocket-decoder --corpus enwik8 --seq-len 128"
    found.append(Measurement("pocket-concepts", f"{command} --metrics concepts --sites block.3 --tokens 8192"))
    blocks = "--populations content --sites block.0,block.2,block.5"
    found.append(Measurement("pocket-curvature", f"{command} --metrics curvature {blocks} --tokens 32768"))
    command = "measure {} --revision checkpoint-768 --corpus heldout:enwik8 --seq-len 128"
    command = f"{command} --metrics curvature,concepts {blocks} --tokens 16384"
    found.append(Measurement("pocket-curvature-encoder", command, "pocket-encoder-a1.0-seed2"))
    return found


class Maker:
    """Runs the commands, several at a time, each training before what is measured on it."""

    def __init__(self, folder: Path, jobs: int, tiny: bool, device: str) -> None:
        self.folder, self.tiny, self.device = folder, tiny, device
        self.pool = ThreadPoolExecutor(jobs)
        self.begun, self.said = time.time(), threading.Lock()
        self.failed: list[str] = []

    def run(self, name: str, words: Sequence[str], *, partly: bool = False) -> bool:
        """One command, of which `partly` allows to end early; what it prints goes to a log file."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.time()
        with log.open("ab") as stream:
            code = subprocess.run([sys.executable, "-m", "anisoscope", *words], stdout=stream, stderr=stream).returncode
        code = 0 if partly and code == PARTLY else code
        with self.said:
            state = "done" if code == 0 else f"exit code {code}, see {log}"
            elapsed = time.time() - self.begun
            print(f"{elapsed:6.0f} s  {name}: {state} after {time.time() - begun:.0f} s", flush=True)
            if code:
                self.failed.append(name)
        return code == 0

    def train(self, training: Training, tokens: Path) -> bool:
        """Train one model, on text that was tokenised once for several."""
        target = self.folder / "trained" / training.name
        if not tokens.exists():
            # The failure is in the list already; without the text there is nothing to train on.
            return False
        if not (target / "tokens").exists():
            shutil.copytree(tokens, target / "tokens")
        return self.run(training.name, self.command(training, target))

    def command(self, training: Training, target: Path) -> list[str]:
        """The words that train a model."""
        words = ["train", *training.flags.split(), "--device", self.device, "-o", str(target)]
        if self.tiny:
            words += ["--steps", "16", "--checkpoints", "4", "--watch-steps", "4", "--batch-size", "4", "--warmup", "4"]
            words = [word for word in words if word != "--compile"]
        return words

    def tokenise(self, training: Training) -> Path:
        """The tokenised text that several trainings share: what a training of no time leaves."""
        target = self.folder / "trained" / f"text-{training.text}"
        if not (target / "tokens").exists():
            self.run(target.name, [*self.command(training, target), "--max-seconds", "0.001"], partly=True)
        return target / "tokens"

    def measure(self, number: int, item: Measurement) -> None:
        """One command of a stored run; what was measured live is copied."""
        target = self.folder / "measured" / item.run
        source = self.folder / "trained" / item.training if item.training else Path()
        if item.command == "live":
            target.mkdir(parents=True, exist_ok=True)
            for file in source.glob("*.parquet"):
                shutil.copy(file, target / file.name)
            return
        words = item.command.replace("{}", str(source)).split()
        if self.tiny:
            words = [word.replace("checkpoint-768", "checkpoint-16") for word in words]
        words += ["--device", self.device, "-o", str(target)]
        self.run(f"{item.run}-{number}", words)

    def make(self, models: Sequence[Training], wanted: Sequence[Measurement]) -> None:
        """Everything, in an order in which the longest begin first."""
        texts = {one.text: one for one in models}
        tokenised = {text: self.pool.submit(self.tokenise, one) for text, one in texts.items()}
        trained: dict[str, Future[bool]] = {
            one.name: self.pool.submit(self.train, one, tokenised[one.text].result()) for one in models
        }

        # A measurement that waits for its training takes no place among the jobs.
        def begin(number: int, item: Measurement) -> None:
            if item.training is None or trained[item.training].result():
                self.pool.submit(self.measure, number, item).result()

        waiting = [threading.Thread(target=begin, args=pair) for pair in enumerate(wanted)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="Name of a stored run; may be repeated.")
    parser.add_argument("--jobs", type=int, default=2, help="Commands that run side by side.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="A few steps of each training.")
    arguments = parser.parse_args()
    wanted = [item for item in measurements() if not arguments.only or item.run in arguments.only]
    if unknown := set(arguments.only or ()) - {item.run for item in measurements()}:
        known = ", ".join(dict.fromkeys(item.run for item in measurements()))
        parser.error(f"no stored run is called {', '.join(sorted(unknown))}; there are {known}")
    needed = {item.training for item in wanted}
    maker = Maker(arguments.folder, arguments.jobs, arguments.tiny, arguments.device)
    maker.make([one for one in trainings() if one.name in needed], wanted)
    if maker.failed:
        sys.exit(f"these failed; the same command tries them again: {', '.join(maker.failed)}")


if __name__ == "__main__":
    main()
