"""Case A-17: validation in the Trainer's own precision, where layers cannot run in it.

Time budget: 15 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, GuardConfig, LossScaleConfig
from autoprec.knobs import VALIDATED_SO
from tests.support import Task, cpu, fp16cpu, loader, scripted


class Wide(nn.Module):
    """``first`` returns what fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        nn.init.uniform_(self.first.weight, 2e4, 6e4)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(self.between(self.first(x))))
        return output


class Squared(Wide):
    """What ``first`` returns fits, its square does not."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.uniform_(self.first.weight, 200.0, 600.0)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * hidden


class Masked(Wide):
    """A constant that fp16 does not have: the operation itself raises."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.uniform_(self.first.weight, -1.0, 1.0)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden.masked_fill(hidden < 0, -1e9).softmax(-1)


class Before(Wide):
    """A product before the first layer, which no layer can be blamed for."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ (torch.eye(4) * 1e5)
        return super().forward(scores / 1e9)


class Validated(Task):
    """Keeps what validation computes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, torch.rand(32, 4, generator=torch.Generator().manual_seed(0)) + 0.5)
        self.first: list[torch.dtype] = []
        self.output = torch.empty(0)
        net.first.register_forward_hook(self._note)  # type: ignore[union-attr]

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.trainer.validating or self.trainer.evaluating:
            self.first.append(output.dtype)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.output = self.net(batch)
        self.log("val", (self.output.float() ** 2).mean())

    def val_dataloader(self) -> Any:
        return loader(self.data, 8)


CONFIG = AutoPrecisionConfig(
    loss_scale=LossScaleConfig(init_scale=128.0), guard=GuardConfig(max_consecutive_skips=4, hold=6)
)


def fitted(
    net: nn.Module, callback: AutoPrecisionCallback | None, *others: Any, **kwargs: Any
) -> tuple[Validated, dict[str, Any]]:
    torch.manual_seed(0)
    task = Validated(net)
    callbacks = [*others] if callback is None else [callback, *others]
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = cpu(plugins=fp16cpu(128.0), callbacks=callbacks, num_sanity_val_steps=0, **{"max_epochs": 3, **kwargs})
    trainer.fit(task, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return task, {**trainer.callback_metrics, "epochs": trainer.current_epoch}


def by_hand(task: Validated, is_last_in_base: bool) -> Tensor:
    """The last batch of validation: ``first`` and what follows in float32, ``last`` perhaps as under autocast."""
    net: Any = task.eval().net
    with torch.no_grad():
        hidden = net.norm(net.between(net.first(task.data[-8:])))
        with torch.autocast("cpu", torch.float16, enabled=is_last_in_base):
            output: Tensor = net.last(hidden)
    return output


@pytest.mark.parametrize(("make", "last"), [(Wide, "fp16"), (Squared, "fp32"), (Masked, "fp16")])
def test_a17_layers_that_fail_in_the_base_precision_are_validated_in_fp32(
    make: Callable[[], nn.Module], last: str
) -> None:
    """The layer behind a square is raised as well: only then what goes into layers is looked at."""
    ap = scripted(config=CONFIG)
    task, metrics = fitted(make(), ap)
    assert ap.precision_map() == {"net.first": "fp32", "net.norm": "fp32", "net.last": last}
    assert math.isfinite(metrics["val"])
    assert set(task.first) == {torch.float32}
    assert task.output.dtype is (torch.float16 if last == "fp16" else torch.float32)
    assert torch.equal(task.output, by_hand(task, last == "fp16"))
    raised = {row.unit: row.reason for row in ap.history if row.knob == "precision" and row.applied == "fp32"}
    assert set(raised) == ({"net.first"} if last == "fp16" else {"net.first", "net.last"})
    assert all(reason.endswith(VALIDATED_SO) for reason in raised.values())


@pytest.mark.parametrize("make", [Wide, Squared])
def test_a17_without_that_validation_is_not_finite(make: Callable[[], nn.Module]) -> None:
    with pytest.warns(UserWarning, match="no step was applied"):
        task, metrics = fitted(make(), scripted(config=CONFIG, knobs=()), max_epochs=1)
    assert not math.isfinite(metrics["val"])
    assert set(task.first) == {torch.float16}


def test_a17_where_no_layer_is_to_blame_all_of_validation_is_raised() -> None:
    net = Before()
    nn.init.uniform_(net.first.weight, -1.0, 1.0)
    ap = scripted(config=CONFIG)
    with pytest.warns(UserWarning, match="everything runs in fp32"):
        task, metrics = fitted(net, ap)
    assert math.isfinite(metrics["val"])
    assert task.output.dtype is torch.float32
    with torch.no_grad():
        assert torch.equal(task.output, task.eval().net(task.data[-8:]))


def test_a17_early_stopping_and_checkpoints_go_by_a_finite_loss(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", patience=10, check_finite=True)
    best = ModelCheckpoint(tmp_path, monitor="val", save_top_k=1)
    _, metrics = fitted(Wide(), scripted(config=CONFIG), stopping, best, enable_checkpointing=True, max_epochs=4)
    assert metrics["epochs"] == 4
    assert math.isfinite(float(stopping.best_score))
    assert best.best_model_score is not None
    assert math.isfinite(float(best.best_model_score))


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
def test_a17_a_resumed_run_validates_as_before(tmp_path: Path) -> None:
    def files(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename=f"{name}-{{epoch}}", save_top_k=-1)

    _, straight = fitted(Wide(), scripted(config=CONFIG), files("first"), enable_checkpointing=True)
    ap, path = scripted(config=CONFIG), tmp_path / "first-epoch=0.ckpt"
    task, resumed = fitted(Wide(), ap, files("second"), enable_checkpointing=True, ckpt_path=path)
    assert ap.skipped_steps == 1  # that of the first run: nothing overflows in the second one
    assert float(resumed["val"]) == float(straight["val"])
    assert set(task.first) == {torch.float32}


def test_a17_a_layer_that_is_lowered_again_is_validated_in_the_base_precision() -> None:
    """One batch was out of range, not the layer."""

    class Spike(Wide):
        def __init__(self) -> None:
            super().__init__()
            nn.init.uniform_(self.first.weight, 0.5, 1.0)

    net = Spike()
    ap = scripted({9: Action(precision={"net.first": "fp16"})}, config=CONFIG)
    task = Validated(net)
    task.data[:8] = 6e4
    trainer = cpu(plugins=fp16cpu(128.0), callbacks=[ap], num_sanity_val_steps=0, max_epochs=3, limit_train_batches=4)
    task.val_dataloader = lambda: loader(task.data[8:], 8)  # type: ignore[method-assign]
    dtypes = []

    class Look(EarlyStopping):
        def on_validation_end(self, *_: Any) -> None:
            dtypes.append(task.first[-1])
            task.data[:8] = 1.0

    trainer.callbacks.append(Look("val", patience=99))  # type: ignore[attr-defined]
    trainer.fit(task)
    assert dtypes == [torch.float32, torch.float32, torch.float16]
    assert ap.precision_map()["net.first"] == "fp16"


def test_a17_what_fails_in_another_format_is_validated_as_the_trainer_would() -> None:
    """Overflow in fp16 on a base of bf16 or fp32 says nothing about them."""
    for precision, expected in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        torch.manual_seed(0)
        ap, task = scripted({0: Action(precision={"*": "fp16"})}, config=CONFIG), Validated(Wide())
        trainer = cpu(precision=precision, callbacks=[ap], max_epochs=2)
        trainer.fit(task)
        assert ap.precision_map()["net.first"] == "fp32"
        assert set(task.first) == {expected}
        assert not [row for row in ap.history if VALIDATED_SO in row.reason]
