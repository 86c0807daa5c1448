"""Live measuring under Lightning."""

import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_live import make_model, spec_for, steps_in
from test_live import tokenizer as tokenizer
from test_live_shells import equal, examples

from anisoscope.errors import SpecError
from anisoscope.schedules import every

with warnings.catch_warnings():
    # Of the package itself, when it is loaded.
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    from anisoscope.shells import LightningCallback


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run_lightning(callbacks: list[Any], **changes: Any) -> Any:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    module = Lit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **{"max_steps": 6, "max_epochs": 3, **changes},
        )
        trainer.fit(module, torch.utils.data.DataLoader(examples(16), batch_size=2, shuffle=True))
    return module.losses, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("mode", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_lightning_trains_the_same_under_the_callback(
    mode: dict[str, Any], tokenizer: Any, corpus_file: Path, tmp_path: Path
) -> None:
    options = {"tokenizer": tokenizer, "store": tmp_path / "run", "when": every(2), "budget": 1e9}
    callback = LightningCallback(spec_for(corpus_file), **options)
    assert equal(run_lightning([], **mode), run_lightning([callback], **mode))
    assert callback.scope is not None
    assert callback.scope.summary["failed"] == 0
    assert steps_in(callback.scope) == [0, 2, 4, 6]


def test_a_gate_stops_lightning(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    gate = {"when": every(1), "budget": 1e9, "stop_if": "leading_variance[embed] > 0 for 3", "tokenizer": tokenizer}
    callback = LightningCallback(spec_for(corpus_file), store=tmp_path / "run", **gate)
    run_lightning([callback], max_steps=50)
    assert callback.scope is not None
    assert steps_in(callback.scope) == [0, 1, 2]


def test_lightning_ends_before_its_first_step_where_nothing_can_be_measured(corpus_file: Path, tmp_path: Path) -> None:
    batches: list[int] = []

    class Batches(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            batches.append(1)

    with pytest.raises(SpecError, match="a tokenizer is needed"):
        run_lightning([LightningCallback(spec_for(corpus_file), store=tmp_path / "run"), Batches()])
    assert not batches


def test_the_callback_can_be_sent_to_other_processes(corpus_file: Path) -> None:
    callback = LightningCallback(spec_for(corpus_file), preset="economy")
    assert pickle.loads(pickle.dumps(callback)).options == {"preset": "economy"}
    with pytest.raises(SpecError, match="unknown preset"):
        LightningCallback(spec_for(corpus_file), preset="luxury")


def test_without_lightning_one_sentence_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import anisoscope.shells\n"
        "anisoscope.shells.LightningCallback"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LightningCallback needs lightning: pip install 'anisoscope[lightning]'" in done.stderr
