"""Shells around a Scope: for the Trainer of transformers, and for Lightning."""

from contextlib import chdir
from pathlib import Path
from typing import Any

import transformers

from anisoscope.errors import MissingPackageError, SpecError
from anisoscope.live import Scope
from anisoscope.records import Spec


class TrainerCallback(transformers.TrainerCallback):
    """`Trainer(..., callbacks=[TrainerCallback(spec, store="runs/live")])`: takes what `Scope` takes.

    The tokenizer is the Trainer's `processing_class`, and the run is named by its `run_name` or its output folder,
    unless others are given.
    """

    def __init__(self, spec: Spec, **options: Any) -> None:
        _check(spec, options)
        self.spec, self.options, self.directory = spec, options, Path.cwd()
        self.scope: Scope | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the weights as they are before the first update, or where a training is resumed."""
        given: dict[str, Any] = {
            "tokenizer": kwargs.get("processing_class"),
            "run": self.spec.run or args.run_name or Path(args.output_dir).name,
            "steps": state.max_steps,
        }
        # Relative paths are those of where the callback was made.
        with chdir(self.directory):
            self.scope = Scope(kwargs["model"], self.spec, **given | self.options)
        self.scope.open()
        self._step(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The update is made, and gradients are gone."""
        self._step(state, control)
        if self.scope is not None and (state.global_step >= state.max_steps or control.should_training_stop):
            # Here and not when training ends: by then the best checkpoint may have been loaded.
            self.scope.close(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last state, where training ended before its planned steps and the weights are still its own."""
        if self.scope is not None:
            self.scope.close(state.global_step, measure_last=not args.load_best_model_at_end)

    def _step(self, state: Any, control: Any) -> None:
        assert self.scope is not None
        self.scope.step(state.global_step, tokens=int(state.num_input_tokens_seen) or None)
        if self.scope.should_stop:
            control.should_training_stop = True


class _LightningShell:
    def __init__(self, spec: Spec, *, attribute: str = "model", **options: Any) -> None:
        _check(spec, options)
        self.spec, self.attribute, self.options, self.directory = spec, attribute, options, Path.cwd()
        self.scope: Scope | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the weights as they are before the first update, or where a training is resumed."""
        planned = trainer.estimated_stepping_batches
        given: dict[str, Any] = {"steps": int(planned) if 0 < planned < float("inf") else None}
        with chdir(self.directory):
            self.scope = Scope(getattr(pl_module, self.attribute, pl_module), self.spec, **given | self.options)
        self.scope.open()
        self._step(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count updates, not batches."""
        self._step(trainer)

    def on_train_end(self, trainer: Any, _: Any) -> None:
        """The last state."""
        if self.scope is not None:
            self.scope.close(trainer.global_step)

    def on_exception(self, *_: Any) -> None:
        """A training that broke off may be in the middle of an update."""
        if self.scope is not None:
            self.scope.close(measure_last=False)

    def _step(self, trainer: Any) -> None:
        assert self.scope is not None
        self.scope.step(trainer.global_step)
        if self.scope.should_stop:
            trainer.should_stop = True


def _check(spec: Spec, options: dict[str, Any]) -> None:
    """Refuse wrong requests when the callback is made, not when hours of preparation are over."""
    import torch

    try:
        Scope(torch.nn.Identity(), spec, **options)
    except TypeError as error:
        raise SpecError(f"a callback takes what Scope takes: {error}") from error


def __getattr__(name: str) -> Any:
    """`LightningCallback`, made when it is first asked for: Lightning is optional."""
    if name != "LightningCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingPackageError("lightning", extra="lightning", purpose="LightningCallback") from None
    documented = {"__doc__": _LIGHTNING, "__module__": __name__}
    globals()[name] = type(name, (_LightningShell, Callback), documented)
    return globals()[name]


_LIGHTNING = """`Trainer(callbacks=[LightningCallback(spec, tokenizer=tokenizer)])`: takes what `Scope` takes.

`attribute` is where the LightningModule keeps the model; without such an attribute, it is measured itself.
"""
