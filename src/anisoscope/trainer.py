"""One part of a training: transformers' Trainer with our batches, loss and schedule, and what it leaves behind."""

import json
import math
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from anisoscope.errors import SpecError
from anisoscope.lab import Loss, Recipe, build_model, checkpoint_steps
from anisoscope.penalties import sum_penalties
from anisoscope.progress import Advance
from anisoscope.sampling import achieved_exponent, loss_weights, why_void
from anisoscope.tokens import IGNORED, Batches, Tokenised, cut_held_out, prepare

_WHOLE = "whole"
"""The file that marks a state as completely written."""


def read_curve(output: Path) -> list[dict[str, Any]]:
    """The rows of the loss curve; a last one that was cut off while it was written is left out."""
    path = output / "losses.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """A file that is whole or not there."""
    half = path.with_name(f"{path.name}.part")
    half.write_text(json.dumps(facts, indent=1), "utf-8")
    os.replace(half, path)


class _Ledger:
    """What is counted while training; on the device, so that no step waits for it."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Loss, penalty and steps since the last row of the loss curve."""
        self.mass = torch.zeros(vocabulary, dtype=torch.float64, device=device)
        """Weight of all targets of each type since the beginning."""
        self.seconds = 0.0

    def add(self, loss: Tensor, penalty: Tensor, targets: Tensor, weights: Tensor) -> None:
        self.sums += torch.stack([loss, penalty, torch.ones_like(loss)]).double()
        self.mass.index_add_(0, targets, weights.double())

    def save(self, path: Path) -> None:
        np.savez(path, sums=self.sums.cpu().numpy(), mass=self.mass.cpu().numpy(), seconds=np.array(self.seconds))

    def load(self, path: Path) -> None:
        with np.load(path) as kept:
            self.sums.copy_(torch.from_numpy(kept["sums"]))
            self.mass.copy_(torch.from_numpy(kept["mass"]))
            self.seconds = float(kept["seconds"])


class Run:
    """One part of a training: its folder, data, model and ledger."""

    def __init__(self, recipe: Recipe, output: Path, device: str) -> None:
        self.recipe, self.output = recipe, output
        self.arguments = _arguments(recipe, output / "state", device)
        self.data: Tokenised = prepare(recipe, output)
        self.batches = Batches(recipe, self.data)
        self.model = build_model(recipe, self.data.tokenizer)
        self.ledger = _Ledger(recipe.vocabulary, self.arguments.device)
        self.steps = checkpoint_steps(recipe.steps, recipe.checkpoints)
        self.resumed = self._last_state()
        self._begin()

    def _last_state(self) -> Path | None:
        """The newest state that was completely written; parts of others are removed."""
        whole = []
        for path in (self.output / "state").glob("checkpoint-*"):
            if (path / _WHOLE).exists():
                whole.append(path)
            else:
                shutil.rmtree(path)
        return max(whole, key=_step_of, default=None)

    def _begin(self) -> None:
        """Take back what was written after the state that training goes on from."""
        first = -1 if self.resumed is None else _step_of(self.resumed)
        if self.resumed is not None:
            self.ledger.load(self.resumed / "ledger.npz")
            # The Trainer loads a state by name and passes over what it does not know: GPT-NeoX saves its head under a
            # name that it does not have in memory, and would go on with a random one.
            self.model.load_state_dict(type(self.model).from_pretrained(self.resumed).state_dict())
        for path in self.output.glob("checkpoint-*"):
            if path.name.endswith(".part") or _step_of(path) > first:
                shutil.rmtree(path)
        rows = [row for row in read_curve(self.output) if row["step"] <= first]
        half = self.output / "losses.jsonl.part"
        half.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        os.replace(half, self.output / "losses.jsonl")

    def make_trainer(self, callbacks: list[transformers.TrainerCallback]) -> "_Trainer":
        """The Trainer of this part."""
        trainer = _Trainer(
            model=self.model, args=self.arguments, processing_class=self.data.tokenizer, callbacks=callbacks
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.run = self
        weights = np.ones(self.recipe.vocabulary)
        if self.recipe.kind == "decoder":
            weights = loss_weights(self.batches.counts, self.recipe.sampling_exponent)
        trainer.weights = torch.tensor(weights, dtype=torch.float32, device=self.arguments.device)
        return trainer

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss per predicted token on the held-out windows, unweighted; masks are the same at every checkpoint."""
        windows = cut_held_out(self.recipe, self.data.held_out)
        # As it is without compilation, which would begin anew for other shapes.
        model = self.model
        rng, was_training = np.random.default_rng(self.recipe.seed), model.training
        model.eval()
        total, count = 0.0, 0
        for start in range(0, len(windows), self.recipe.batch_size):
            batch = self.batches.pose(windows[start : start + self.recipe.batch_size], rng, natural=True)
            inputs, targets = (batch[name].to(self.arguments.device) for name in ("input_ids", "targets"))
            losses = _token_losses(model(input_ids=inputs).logits, targets)
            total += losses.double().sum().item()
            count += int((targets != IGNORED).sum())
        model.train(was_training)
        return total / count if count else math.nan

    def keep_checkpoint(self, step: int) -> None:
        """Weights, config, tokenizer and what led there, in a folder that is whole or not there."""
        folder = self.output / f"checkpoint-{step}"
        half = folder.with_name(f"{folder.name}.part")
        self.model.save_pretrained(half)
        self.data.tokenizer.save_pretrained(half)
        tokens = step * self.recipe.tokens_per_step
        write_json(half / "trainer_state.json", {"global_step": step, "num_input_tokens_seen": tokens})
        write_json(half / "training.json", self.facts(step))
        os.replace(half, folder)

    def add_row(self, row: Loss) -> None:
        """Add to the loss curve."""
        with (self.output / "losses.jsonl").open("a", encoding="utf-8") as curve:
            curve.write(json.dumps(asdict(row)) + "\n")

    def facts(self, step: int) -> dict[str, Any]:
        """What is known of the training at a step."""
        exponent = achieved_exponent(self.batches.counts, self.ledger.mass.cpu().numpy())
        known = not math.isnan(exponent)
        return {
            "recipe": asdict(self.recipe),
            "step": step,
            "tokens": step * self.recipe.tokens_per_step,
            "passes": step * self.recipe.batch_size / self.batches.windows,
            "parameters": sum(value.numel() for value in self.model.parameters()),
            "sampling_exponent": exponent if known else None,
            "void": why_void(self.recipe.sampling_exponent, exponent) if known else None,
            "corpus_hash": self.data.facts["corpus_hash"],
        }

    def summarise(self, step: int) -> None:
        """Write training.json."""
        facts = self.facts(step) | {
            "finished": step >= self.recipe.steps,
            "seconds": self.ledger.seconds,
            "unigram": self.data.facts["unigram"],
            "bigram": self.data.facts["bigram"],
            "checkpoints": [kept for kept in self.steps if (self.output / f"checkpoint-{kept}").exists()],
            "device": str(self.arguments.device),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        write_json(self.output / "training.json", facts)


def _step_of(path: Path) -> int:
    return int(path.name.removesuffix(".part").rpartition("-")[2])


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss at every position, 0 where nothing is predicted."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")


def check_device(device: str) -> bool:
    """Whether to train on a GPU; devices that are unknown or not there are refused."""
    if device not in ("auto", "cpu", "cuda"):
        raise SpecError(f"device is auto, cpu or cuda; came {device!r}")
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if device == "cuda" and not on_gpu:
        raise SpecError("device 'cuda' cannot be used here: no GPU was found")
    return on_gpu


def _arguments(recipe: Recipe, folder: Path, device: str) -> transformers.TrainingArguments:
    on_gpu = check_device(device)
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=recipe.gradient_clip,
        seed=recipe.seed,
        use_cpu=not on_gpu,
        torch_compile=recipe.compiled,
        bf16=recipe.dtype == "bfloat16" or (recipe.dtype == "auto" and on_gpu),
        dataloader_pin_memory=on_gpu,
        accelerator_config={"non_blocking": True},
        save_strategy="no",
        logging_strategy="no",
        # Looking for NaN would make every step wait for the GPU.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )


class _Trainer(transformers.Trainer):
    """The Trainer with our batches, loss and schedule."""

    run: Run
    weights: Tensor

    def get_train_dataloader(self) -> Any:
        loader = torch.utils.data.DataLoader(
            self.run.batches,  # pyright: ignore[reportArgumentType]
            batch_size=1,
            collate_fn=_unwrap,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            warmup, steps = self.run.recipe.warmup, self.run.recipe.steps

            def factor(step: int) -> float:
                # From 1/warmup on: at 0, the weights after the first step would be those before it.
                if step < warmup:
                    return (step + 1) / warmup
                return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)  # pyright: ignore[reportArgumentType]
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        regularize, states = self.run.recipe.regularize, []
        hook = None
        if regularize:
            inside: Any = self.model
            hook = inside.base_model.register_forward_hook(lambda *call: states.append(call[-1][0]))
        try:
            outputs = model(input_ids=inputs["input_ids"])
        finally:
            if hook is not None:
                hook.remove()
        targets = inputs["targets"].flatten()
        predicted = targets != IGNORED
        types = torch.where(predicted, targets, 0)
        weights = self.weights[types] * predicted
        losses = _token_losses(outputs.logits, inputs["targets"]) * weights
        loss = losses.sum() / predicted.sum().clamp(min=1)
        penalty = sum_penalties(states[0], regularize) if regularize else torch.zeros_like(loss)
        if model.training:
            self.run.ledger.add(loss.detach(), penalty.detach(), types, weights)
        total = loss + penalty
        return (total, outputs) if return_outputs else total


def _unwrap(items: list[dict[str, Any]]) -> dict[str, Any]:
    return items[0]


class Keeper(transformers.TrainerCallback):
    """Writes the loss curve, the checkpoints and the state to go on from; ends the part when its time is up."""

    advance: Advance

    def __init__(self, run: Run, begun: float, max_seconds: float | None, save_every: float) -> None:
        self.run, self.begun, self.max_seconds, self.save_every = run, begun, max_seconds, save_every
        self.clock = self.saved = time.monotonic()
        self.saved_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the weights before the first step."""
        self.clock = self.saved = time.monotonic()
        self.advance(state.global_step)
        if state.global_step == 0:
            self._record(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an update: is a row, a checkpoint, a state or the end due?"""
        step, recipe, now = state.global_step, self.run.recipe, time.monotonic()
        state.num_input_tokens_seen = step * recipe.tokens_per_step
        self.advance(1)
        if step in self.run.steps or step % recipe.log_every == 0:
            self._record(step)
            control.should_log = True
        control.should_training_stop |= self.max_seconds is not None and now - self.begun >= self.max_seconds
        control.should_save |= step in self.run.steps or now - self.saved >= self.save_every

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step of this part, whoever ended it."""
        control.should_save |= self.saved_step != state.global_step

    def _record(self, step: int) -> None:
        loss, penalty, steps = self.run.ledger.sums.tolist()
        kept = step in self.run.steps
        row = Loss(
            step=step,
            tokens=step * self.run.recipe.tokens_per_step,
            train=loss / steps if steps else None,
            held_out=self.run.evaluate() if kept else None,
            penalty=penalty / steps if steps and self.run.recipe.regularize else None,
        )
        self.run.ledger.sums.zero_()
        self.run.add_row(row)
        if kept:
            self.run.keep_checkpoint(step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the Trainer has written its state: add the ledger, mark it whole, remove the one before."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        now = time.monotonic()
        self.run.ledger.seconds += now - self.clock
        self.clock = self.saved = now
        self.saved_step = state.global_step
        self.run.ledger.save(folder / "ledger.npz")
        (folder / _WHOLE).touch()
        for path in Path(args.output_dir).glob("checkpoint-*"):
            if path != folder:
                shutil.rmtree(path)
