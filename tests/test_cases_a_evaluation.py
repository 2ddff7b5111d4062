"""Cases A-17 and A-19: evaluation after tuning, and averaged weights.

Time budget: 25 s.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import SGD

from autoprec import Action, AutoPrecisionConfig
from tests.support import (
    Lin,
    Task,
    all_in,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    loader,
    mean_of,
    scripted,
    state_of,
    user_skipped,
    weights_of,
)

# ---- evaluation and prediction ----


class Evaluated(Task):
    """Keeps what evaluation returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[torch.dtype] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(batch)
        self.seen.append(output.dtype)
        self.log("val", output.float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.net(batch).dtype)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)

    def val_dataloader(self) -> Any:
        return loader(self.data, self.bs)

    test_dataloader = predict_dataloader = val_dataloader


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 1),
    )


def evaluated(**kwargs: Any) -> Evaluated:
    return Evaluated(conv_net(), torch.rand(32, 1, 4), **kwargs)


LOW = ["bf16", "fp16", "int8"]


@pytest.mark.parametrize("name", LOW)
def test_a17_predictions_go_to_numpy_after_tuning(name: str) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=2)
    trainer.fit(task)
    assert ap.applied_steps == 8
    predictions: Any = trainer.predict(task)
    assert predictions[0].numpy().dtype == "float32"
    plain: Any = cpu().predict(task)
    assert torch.equal(predictions[0], plain[0])
    assert task.eval()(task.data[:8]).detach().numpy().dtype == "float32"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LOW)
def test_a17_evaluation_runs_in_the_base_precision_by_default(name: str, precision: Any) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}), evaluated()
    trainer = cpu(precision=precision, callbacks=[ap], max_epochs=2)
    trainer.fit(task)
    expected = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    assert set(task.seen) == {expected}
    task.seen.clear()
    trainer.validate(task, verbose=False)
    trainer.test(task, verbose=False)
    assert set(task.seen) == {expected}


def test_a17_metric_of_an_evaluation_is_that_of_the_plain_module() -> None:
    ap, task = scripted({0: all_in("bf16")}), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=2)
    trainer.fit(task)
    with torch.no_grad():
        expected = task.eval().net(task.data).mean()
    assert float(trainer.callback_metrics["val"]) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a17_evaluation_in_the_current_formats_is_a_setting(name: str) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}, eval_precision="current"), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(task)
    assert set(task.seen) == {getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[name])}
    assert trainer.predict(task)[0].dtype is torch.float32  # type: ignore[index, union-attr]


@pytest.mark.parametrize("eval_precision", ["base", "current"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LOW)
def test_a17_validation_between_steps_leaves_nothing_behind(
    eval_precision: Literal["base", "current"], precision: Any, name: str
) -> None:
    """After every second batch: no inference tensor may meet the backward that follows, and no value may change."""
    results = []
    for val_check_interval in (2, 1.0):
        torch.manual_seed(0)
        ap = scripted({0: Action(precision={"*": name})}, eval_precision=eval_precision, knobs=("precision",))
        task = evaluated()
        cpu(precision=precision, callbacks=[ap], max_epochs=2, val_check_interval=val_check_interval).fit(task)
        assert (ap.applied_steps, ap.skipped_steps) == (8, 0)
        results.append(state_of(task))
    assert_same_state(*results)


def test_a17_masked_constant_only_in_validation_under_current_formats() -> None:
    """Evaluation code need not be covered by what the training step tried."""

    class MasksInValidation(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            output = self.net(batch)
            self.log("val", output.masked_fill(output > 0, -1e9).float().mean())

    ap = scripted({0: Action(precision={"*": "fp16"})}, eval_precision="current")
    task = MasksInValidation(conv_net(), torch.rand(32, 1, 4))
    cpu(callbacks=[ap], num_sanity_val_steps=0).fit(task)
    assert ap.applied_steps == 4


def test_a17_module_is_its_plain_self_after_fit() -> None:
    ap, task = scripted({0: all_in("bf16")}), evaluated()
    cpu(callbacks=[ap], max_epochs=2).fit(task)
    plain = evaluated()
    assert [type(m) for m in task.modules()] == [type(m) for m in plain.modules()]
    assert [sorted(vars(m)) for m in task.net.modules()] == [sorted(vars(m)) for m in plain.net.modules()]
    with torch.inference_mode():
        assert task.net(task.data).dtype is torch.float32


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a17_module_is_its_plain_self_after_an_exception(error: type[BaseException]) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if args[-1] == 2:
                raise error("stop")

    ap, task = scripted({0: all_in("bf16")}), evaluated()
    trainer = cpu(callbacks=[ap, Stop()])
    plugin = trainer.strategy.precision_plugin
    with pytest.raises((error, SystemExit)):
        trainer.fit(task)
    assert trainer.strategy.precision_plugin is plugin
    assert [type(m) for m in task.modules()] == [type(m) for m in evaluated().modules()]
    assert task.eval()(task.data).dtype is torch.float32


def test_a17_training_goes_on_after_a_prediction() -> None:
    """fit, predict, fit again with the same callback and the same trainer."""
    ap, task = scripted({0: all_in("bf16")}), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=1)
    trainer.fit(task)
    trainer.predict(task)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task)
    assert ap.precision_map()["net.0"] == "bf16"
    assert_finite(task)


# ---- averaged weights ----


DECAY = 0.999


class OwnAverage(Callback):
    """An exponential moving average as users write it, of whatever dtype the weights have."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        weights = [p.detach() for p in pl_module.parameters()]
        if not self.average:
            self.average = [w.clone() for w in weights]
        for average, weight in zip(self.average, weights, strict=True):
            average.lerp_(weight, 1 - DECAY)


class Exact(Lin):
    """A gradient of one in every format, so that low precision must not show in the weights at all."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 1, loss=mean_of, optimizer=lambda p: SGD(p, lr=2.0**-10))


def average_in_fp32(weights: list[Tensor], steps: int) -> list[Tensor]:
    """The same run without a Trainer: every weight goes down by the learning rate in every step."""
    average: list[Tensor] = []
    for step in range(steps):
        weights = [w - 2.0**-10 for w in weights]
        average = [w.clone() for w in weights] if step == 0 else average
        average = [a.lerp(w, 1 - DECAY) for a, w in zip(average, weights, strict=True)]
    return average


@pytest.mark.parametrize(("name", "steps"), [("bf16", 2000), ("fp16", 200)])
def test_a19_average_moves_as_in_fp32(name: str, steps: int) -> None:
    average, task = OwnAverage(), Exact(steps)
    before = weights_of(task)
    ap = scripted({0: Action(precision={"*": name})}, knobs=("precision", "loss_scale"), verbose=False)
    cpu(callbacks=[ap, average]).fit(task)
    assert ap.applied_steps == steps
    for ours, expected, start in zip(average.average, average_in_fp32(before, steps), before, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        assert float((start - ours).min()) > 0.01  # it did move


def test_a19_averages_of_lightning() -> None:
    results = []
    for callbacks in ([], [scripted({0: all_in("bf16")}, knobs=("precision",), verbose=False)]):
        torch.manual_seed(0)
        task = Exact(200)
        cpu(callbacks=[*callbacks, EMAWeightAveraging(decay=0.9)]).fit(task)
        results.append(state_of(task))
        assert type(task.net) is nn.Linear
    for key, value in results[0].items():
        assert results[1][key].dtype is torch.float32
        torch.testing.assert_close(results[1][key], value, rtol=1e-5, atol=1e-5)


class Normed(Task):
    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        super().__init__(net, torch.rand(64, 4), optimizer=lambda p: SGD(p, lr=0.01))


def test_a19_extra_pass_of_swa_touches_neither_scaler_nor_counters() -> None:
    ap, task = scripted(), Normed()
    windows: list[tuple[int, int, float]] = []

    class Counters(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            windows.append((ap.applied_steps, ap.skipped_steps, ap.loss_scale))

    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    trainer = cpu(plugins=fp16cpu(128), callbacks=[ap, swa, Counters()], max_epochs=4)
    trainer.fit(task)
    assert windows == [(8, 0, 128.0), (16, 0, 128.0), (24, 0, 128.0), (32, 0, 128.0), (32, 0, 128.0)]
    assert (ap.applied_steps, ap.skipped_steps, user_skipped(ap)) == (32, 0, 0)
    assert_finite(task)
    assert int(state_of(task)["net.1.num_batches_tracked"]) == 8  # of the extra pass alone


@pytest.mark.parametrize("action", [None, Action(precision={"*": "fp32"})])
def test_a19_swa_ends_where_the_plain_run_ends(action: Action | None) -> None:
    results, config = [], AutoPrecisionConfig(fused_step=False)
    for callbacks in ([], [scripted({0: action} if action else {}, knobs=("precision",), config=config)]):
        torch.manual_seed(0)
        task = Normed()
        swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
        cpu(callbacks=[*callbacks, swa], max_epochs=4).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a19_swa_with_low_precision_keeps_fp32_averages(name: str) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}), Normed()
    plain = state_of(task)
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    cpu(callbacks=[ap, swa], max_epochs=4).fit(task)
    found = state_of(task)
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in plain.items()}
    assert_finite(task)
    # the averages are not on the grid of the low format
    weight = found["net.0.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
