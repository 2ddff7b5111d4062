"""What the case tests share: Trainers on a CPU, the smallest models, fp16 with a scaler, and callbacks that look on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    Decision,
    LossScaleConfig,
    ScriptedController,
)

Loss = Callable[[nn.Module, Any, int], Tensor]


def cpu(**kwargs: Any) -> Trainer:
    """A Trainer on one CPU device that writes nothing and runs one epoch unless told otherwise."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **kwargs})


def loader(data: Any, bs: int | None = 8) -> DataLoader[Any]:
    """Batches of ``data`` in order; a tensor is taken row by row."""
    return DataLoader(data, batch_size=bs)


def fp16cpu(scale: float = 65536.0, **kwargs: Any) -> MixedPrecision:
    """fp16 with a scaler on a CPU; ``Trainer(precision="16-mixed")`` turns itself into bf16 there."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale, **kwargs))


def scripted(
    steps: Mapping[int, Action] | None = None, epochs: Mapping[int, Action] | None = None, **kwargs: Any
) -> AutoPrecisionCallback:
    """A callback that follows a script and otherwise lets everything be.

    The usual first loss scale of 65536 overflows as the gradient of an fp16 loss, which costs a step at the start.
    """
    config = kwargs.pop("config", AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=128.0)))
    return AutoPrecisionCallback(policy=ScriptedController(steps=steps, epochs=epochs), config=config, **kwargs)


class Climber(ScriptedController):
    """Moves every row up at each decision and keeps the observations."""

    def __init__(self) -> None:
        super().__init__()
        self.observations: list[Any] = []

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation)
        return np.ones(len(observation), dtype=np.int64)


def all_in(name: str) -> Action:
    """Every layer with a weight matrix in one format."""
    return Action(precision={"*": name})


def squares(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """Mean of the squared outputs."""
    output: Tensor = net(batch)
    return (output**2).mean()


def squares_but(net: nn.Module, batch: Tensor, index: int, *, bad: Iterable[int], factor: float = math.inf) -> Tensor:
    """The same, multiplied by ``factor`` in the batches named."""
    return squares(net, batch, index) * (factor if index in set(bad) else 1.0)


def mean_of(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """Its gradients are ones in every format, so that nothing but a wrong scale can change them."""
    output: Tensor = net(batch)
    return output.float().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


class Task(LightningModule):
    """Trains ``net`` on the rows of ``data``, in order.

    ``loss`` is called with net, batch and batch index; ``schedule`` with the optimizer, for Lightning's dictionary.
    """

    def __init__(
        self,
        net: nn.Module,
        data: Any,
        bs: int = 8,
        *,
        loss: Loss = squares,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
        schedule: Callable[[Optimizer], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.data = data
        self.bs = bs
        self._loss = loss
        self._make_optimizer = optimizer
        self._make_schedule = schedule

    def forward(self, batch: Any) -> Any:
        return self.net(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(self.net, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self.parameters())
        if self._make_schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": dict(self._make_schedule(optimizer))}

    def train_dataloader(self) -> Any:
        return loader(self.data, self.bs)


class Lin(Task):
    """One Linear(4 -> 1) on ``n`` rows of ones."""

    def __init__(self, n: int, bs: int, **kwargs: Any) -> None:
        super().__init__(nn.Linear(4, 1), torch.ones(n, 4), bs, **kwargs)


class Manual(Task):
    """The same loop under manual optimization; ``schedule`` makes the scheduler itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self._loss(self.net, batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        return loss.detach()


class Watch(Callback):
    """Keeps what a user would see: gradients before each step, and losses, rates and scales after each batch."""

    def __init__(self, ap: AutoPrecisionCallback | None = None) -> None:
        self.ap = ap
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.scales: list[float] = []
        self.maps: list[dict[str, str]] = []
        self.gradients: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.gradients.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else outputs
        self.losses.append(float(loss) if isinstance(loss, Tensor) else math.nan)
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])
        if self.ap is not None:
            self.scales.append(self.ap.loss_scale)
            self.maps.append(self.ap.precision_map())


class Ask(Callback):
    """Requests ``action`` in the ``call``-th call of a hook."""

    def __init__(self, ap: AutoPrecisionCallback, hook: str, call: int, action: Action) -> None:
        self.ap = ap
        self.action = action
        self.calls = -1
        self.call = call
        setattr(self, hook, self._on_hook)

    def _on_hook(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.call:
            self.ap.request(self.action)


def watch_dtypes(root: nn.Module) -> dict[str, list[torch.dtype]]:
    """Notes from now on the dtype of what every module without children returns, by name."""
    seen: dict[str, list[torch.dtype]] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            tensor = tensor.data if isinstance(tensor, PackedSequence) else tensor
            seen.setdefault(name, []).append(tensor.dtype)

        return hook

    for name, module in root.named_modules():
        if name and not any(True for _ in module.children()):
            module.register_forward_hook(hook_for(name))
    return seen


def rows(history: Sequence[Decision], knob: str, outcome: str | None = None) -> list[Decision]:
    """The decisions about one knob."""
    return [d for d in history if d.knob == knob and outcome in (None, d.outcome)]


def weights_of(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same_state(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert list(found) == list(expected)
    wrong = [k for k, v in expected.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)]
    assert not wrong, f"these differ: {wrong}"


def assert_finite(module: nn.Module) -> None:
    bad = [key for key, value in module.state_dict().items() if not bool(torch.isfinite(value).all())]
    assert not bad, f"not finite: {bad}"


@contextmanager
def stops_for_good() -> Iterator[pytest.ExceptionInfo[RuntimeError]]:
    """Training must give up low precision, and then stop by itself."""
    from autoprec import NonFiniteTrainingError

    with pytest.warns(UserWarning, match="everything runs in fp32"), pytest.raises(NonFiniteTrainingError) as caught:
        yield caught


def user_skipped(ap: AutoPrecisionCallback) -> int:
    """Windows without a loss."""
    assert ap.steering is not None
    return ap.steering.user_skipped_steps


def reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Lets the table that fit prints be read."""
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: "\n".join(r.getMessage() for r in caplog.records if "autoprec" in r.getMessage())
