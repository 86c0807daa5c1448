"""Make the pocket suite again: train it (a GPU, about five minutes), then pack one seed of each kind into the package.

python scripts/make_pocket.py train build/pocket
python scripts/make_pocket.py pack build/pocket
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
POCKET = ROOT / "src" / "anisoscope" / "pocket"
KINDS = ("decoder", "encoder")
SEEDS = (0, 1, 2)
SHIPPED = (16, 64, 256, 1024, 4096)
RECIPE = {
    "corpus": "enwik8",
    "layers": 6,
    "width": 112,
    "heads": 7,
    "vocabulary": 2048,
    "seq_len": 256,
    "batch-size": 64,
    "steps": 4096,
    "learning-rate": 2e-3,
    "warmup": 100,
    # Steps 0, 1, 2, 4, ... 4096.
    "checkpoints": 14,
    "watch-steps": 40,
    # Everything is to be measured here, whatever it costs.
    "budget": 1.0,
}


def run_name(kind: str, seed: int) -> str:
    return f"pocket-{kind}-seed{seed}"


def train(folder: Path) -> None:
    for kind in KINDS:
        # The text is tokenised once and copied to the other seeds.
        first = folder / run_name(kind, 0)
        if not (first / "tokens").exists():
            subprocess.run([*command(kind, 0, folder), "--max-seconds", "0.001"], check=False)
        for seed in SEEDS[1:]:
            target = folder / run_name(kind, seed) / "tokens"
            if not target.exists():
                shutil.copytree(first / "tokens", target)
    running = [subprocess.Popen(command(kind, seed, folder)) for kind in KINDS for seed in SEEDS]
    failed = [process.args for process in running if process.wait()]
    if failed:
        sys.exit(f"these failed or are not finished; run it again to go on: {failed}")


def command(kind: str, seed: int, folder: Path) -> list[str]:
    flags = [word for name, value in RECIPE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    # A post-norm BERT of this size was no better than a unigram model and a bit after as many tokens (docs/log.md).
    layout = ["--layout", "gpt_neox" if kind == "decoder" else "eurobert"]
    start = [sys.executable, "-m", "anisoscope", "train", "--kind", kind, *layout, "--seed", str(seed)]
    return [*start, *flags, "--json", "-o", str(folder / run_name(kind, seed))]


def pack(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from anisoscope.models import load_model

    shutil.rmtree(POCKET, ignore_errors=True)
    cards = []
    for kind in KINDS:
        run, target = folder / run_name(kind, 0), POCKET / f"pocket-{kind}"
        for step in (0, *SHIPPED):
            source, place = run / f"checkpoint-{step}", target / f"step{step}"
            place.mkdir(parents=True)
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "trainer_state.json"):
                shutil.copy(source / name, place / name)
            weights = load_file(source / "model.safetensors")
            if step:
                half = {name: value.half() for name, value in weights.items()}
                assert all(torch.isfinite(value).all() for value in half.values())
                save_file(half, place / "model.safetensors", metadata={"format": "pt"})
                continue
            (place / "seed.json").write_text(json.dumps({"seed": 0}), "utf-8")
            drawn: Any = load_model(f"pocket-{kind}", revision="step0", device="cpu").module
            for name, value in drawn.state_dict().items():
                assert name not in weights or torch.equal(value, weights[name]), name
        cards.append(card(kind, folder))
    (POCKET / "README.md").write_text("\n".join([HEAD, *cards]), "utf-8")
    size = sum(path.stat().st_size for path in POCKET.rglob("*") if path.is_file())
    print(f"{size / 1e6:.1f} MB")
    assert size <= 30e6


HEAD = """# The pocket suite

Two small models that come with the package, for demonstrations, tests and offline work: `pocket-decoder` and
`pocket-encoder` work wherever a model's name does, and `@STEP` picks a checkpoint. They are far too small to say
anything about large models.

Made with `scripts/make_pocket.py` on one GPU. Data: enwik8 (the first 100 MB of an English Wikipedia dump of 2006,
Mahoney), markup removed, every 50th article held out; a byte-level BPE of 2,048 entries learned from it. Weights are
float16; step 0 is its seed. Three seeds of each were trained and measured (docs/log.md); seed 0 is here.
"""


def card(kind: str, folder: Path) -> str:
    facts = json.loads((folder / run_name(kind, 0) / "training.json").read_text("utf-8"))
    recipe, rows = facts["recipe"], read_curve(folder / run_name(kind, 0))
    ends = [read_curve(folder / run_name(kind, seed))[-1]["held_out"] for seed in SEEDS]
    shape = f"{recipe['layers']} blocks of width {recipe['width']}, {recipe['heads']} heads"
    family = {
        "decoder": "GPT-NeoX layout, untied, next token",
        "encoder": "EuroBERT layout (pre-norm), untied, 15 % masked",
    }[kind]
    lines = [
        f"\n## pocket-{kind}\n",
        f"{family}; {shape}; {facts['parameters']:,} parameters; {recipe['steps']:,} steps of "
        f"{recipe['batch_size'] * recipe['seq_len']:,} tokens ({facts['passes']:.1f} passes), AdamW, learning rate "
        f"{recipe['learning_rate']:g}, cosine to a tenth, warm-up {recipe['warmup']}, bfloat16 autocast.\n",
        f"Held-out loss {ends[0]:.3f} nats per token (the other seeds {', '.join(f'{end:.3f}' for end in ends[1:])}); "
        f"a unigram model has {facts['unigram']:.3f}, a bigram model {facts['bigram']:.3f}.\n",
        "| step | held-out loss | here |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        here = "seed" if row["step"] == 0 else "yes" if row["step"] in SHIPPED else ""
        lines.append(f"| {row['step']} | {row['held_out']:.3f} | {here} |")
    return "\n".join(lines) + "\n"


def read_curve(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "losses.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if row["held_out"] is not None and math.isfinite(row["held_out"])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "pack"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    {"train": train, "pack": pack}[given.what](given.folder)
