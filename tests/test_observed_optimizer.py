"""What an observation says of the optimizer: whether it is adaptive, and where its learning rate stands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from autoprec import AutoPrecisionCallback, ScriptedController
from autoprec.encoding import Observation, feature
from tests.small_fits import Plain, StatefulLoader, loader, quiet, seed


class Watching(ScriptedController):
    looks = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> None:
        self.seen.append(observation)

    def column(self, name: str) -> list[float]:
        for observation in self.seen:
            assert len(set(feature(observation, name).tolist())) == 1  # all rows of a run see the same
        return [float(feature(observation, name)[0]) for observation in self.seen]


class Scheduled(Plain):
    """Halves its learning rate every four steps, after it has doubled it once."""

    def __init__(self, make: Any) -> None:
        super().__init__(make)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(list(self.parameters()))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 * 0.5 ** (step // 4) if step else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("make", "is_adaptive"),
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), False, id="sgd"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.01), True, id="adamw"),
        pytest.param(lambda p: torch.optim.RMSprop(p, lr=0.01), True, id="rmsprop"),
        pytest.param(lambda p: torch.optim.Adagrad(p, lr=torch.tensor(0.01)), True, id="adagrad-tensor-lr"),
    ],
)
def test_the_learning_rate_is_relative_to_the_largest_so_far(make: Any, is_adaptive: bool) -> None:
    seed()
    watching = Watching()
    callback = AutoPrecisionCallback(watching, interval=4, verbose=False)
    quiet(max_steps=17, callbacks=[callback]).fit(Scheduled(make), loader(256))
    rates = watching.column("learning_rate")
    assert len(rates) >= 3
    steps = [rate * 8 for rate in rates]
    assert steps[0] == 0.0
    assert [after - before for before, after in zip(steps, steps[1:], strict=False)] == [-1.0] * (len(steps) - 1)
    assert watching.column("adaptive") == [float(is_adaptive)] * len(rates)


def test_an_optimizer_without_a_learning_rate_is_not_known() -> None:
    class Own(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.01 * parameter.grad
            return loss

    class Module(Plain):
        def configure_optimizers(self) -> Any:
            return Own(self.parameters())

    seed()
    watching = Watching()
    callback = AutoPrecisionCallback(watching, interval=4, verbose=False)
    quiet(max_steps=9, callbacks=[callback]).fit(Module(), loader(128))
    assert set(watching.column("learning_rate")) == {0.0}
    assert set(watching.column("adaptive")) == {0.0}


def test_the_largest_rate_survives_a_resume(tmp_path: Any) -> None:
    def fit(steps: int, path: str | None) -> list[float]:
        seed()
        watching = Watching()
        module = Scheduled(lambda p: torch.optim.SGD(p, lr=0.01))
        trainer = quiet(max_steps=steps, callbacks=[AutoPrecisionCallback(watching, interval=4, verbose=False)])
        trainer.fit(module, StatefulLoader(256), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return watching.column("learning_rate")

    whole = fit(20, None)
    first = fit(10, None)
    rest = fit(20, str(tmp_path / "10.ckpt"))
    assert first + rest == whole
    assert not any(map(math.isnan, whole))
