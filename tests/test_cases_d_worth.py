"""Case D-02: 8-bit formats on layers that are too small for them: not offered to policies, applied when asked for.

Time budget: 20 s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from autoprec import Action, AutoPrecision, AutoPrecisionCallback, AutoPrecisionConfig, Controller
from autoprec.encoding import feature
from autoprec.map_file import save_map
from tests.support import Ask, Manual, Task, all_in, assert_finite, cpu, fp16cpu, loader, reported, rows, scripted

EIGHT_BIT = {"fp8", "int8"}
ALLOWED = AutoPrecisionConfig(formats=("fp32", "bf16", "fp8", "int8"))
WIDTH = 512


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    return reported(caplog, monkeypatch)


@pytest.fixture(params=[("fp32", "bf16", "int8"), ("fp32", "bf16")], ids=["int8", "no int8"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A CPU that multiplies int8 itself, and one that does not."""
    names: tuple[str, ...] = request.param
    monkeypatch.setattr("autoprec.units.native_formats", lambda device: names)
    return names


@pytest.fixture
def native_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.units.native_formats", lambda device: ("fp32", "bf16", "int8"))


class Lowers(Controller):
    """Lowers every unit at every decision, and keeps what it sees."""

    name = "lowers"

    def __init__(self, move: int = -1) -> None:
        self.move = move
        self.legal: list[tuple[str, ...]] = []
        self.observations: list[Any] = []

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:
        self.legal = list(legal)

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation)
        return np.where(feature(observation, "knob_precision") == 1, self.move, 0)


def lowering(config: AutoPrecisionConfig | None = ALLOWED, **kwargs: Any) -> AutoPrecisionCallback:
    return AutoPrecisionCallback(Lowers(), config=config, knobs=("precision",), interval=1, **kwargs)


def mixed() -> nn.Sequential:
    """A layer for which int8 is known to pay from 64 rows on, and one for which it never does."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32))


def large_batches(count: int = 8, size: int = 64) -> Tensor:
    return torch.rand(count * size, WIDTH)


def applied(ap: AutoPrecisionCallback) -> list[tuple[str | None, Any]]:
    return [(d.unit, d.applied) for d in rows(ap.history, "precision", "applied")]


def unoffered(ap: AutoPrecisionCallback) -> list[tuple[str | None, Any]]:
    found = [d for d in rows(ap.history, "precision", "refused") if d.reason.startswith("not offered to policies")]
    return [(d.unit, d.requested) for d in found]


# ---- what a policy gets ----


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@pytest.mark.parametrize("start", ["32-true", "bf16-mixed", "fp16"])
def test_d02_the_defaults_offer_no_8_bit_format(
    native: tuple[str, ...], optimizer: Callable[..., Any], start: str
) -> None:
    task = Task(mixed(), large_batches(), 64, optimizer=lambda p: optimizer(p, lr=1e-3))
    ap = lowering(None)
    base: dict[str, Any] = {"plugins": fp16cpu(128.0)} if start == "fp16" else {"precision": start}
    cpu(callbacks=[ap], **base).fit(task)
    assert isinstance(ap.controller, Lowers)
    assert len(ap.controller.observations) > 2
    assert not EIGHT_BIT & {name for names in ap.controller.legal for name in names}
    assert not EIGHT_BIT & {d.applied for d in ap.history}
    assert unoffered(ap) == []


def test_d02_a_policy_gets_int8_where_it_is_known_to_pay(native: tuple[str, ...]) -> None:
    task, ap = Task(mixed(), large_batches(), 64), lowering()
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.0": "int8" if "int8" in native else "bf16", "net.1": "bf16"}
    refused = [("net.0", "fp8"), ("net.1", "fp8"), ("net.1", "int8")]
    assert sorted(unoffered(ap)) == sorted(refused if "int8" in native else [*refused, ("net.0", "int8")])
    assert_finite(task)


@pytest.mark.parametrize("width", [16, 32, 256])
@pytest.mark.parametrize("make", [Task, Manual])
def test_d02_small_layers_stay_in_bf16_with_the_reason_on_record(
    native_int8: None, width: int, make: Callable[..., Task], report: Callable[[], str]
) -> None:
    ap = lowering(AutoPrecisionConfig(formats=("fp32", "bf16", "int8")))
    cpu(callbacks=[ap], max_epochs=2).fit(make(nn.Sequential(nn.Linear(width, width)), torch.rand(64, width), 8))
    assert ap.precision_map() == {"net.0": "bf16"}
    (decision,) = rows(ap.history, "precision", "refused")
    assert (decision.before, decision.requested, decision.applied) == ("fp32", "int8", "fp32")
    assert decision.reason == (
        "not offered to policies: int8 cannot pay below 64 x 512 x 512 or 256 x 256 x 256, and a call multiplies"
        f" 8 x {width} x {width}"
    )
    assert f"refused    net.0 to int8: {decision.reason}" in report()
    assert isinstance(ap.controller, Lowers)
    last = ap.controller.observations[-1]
    assert feature(last, "can_lower")[feature(last, "knob_precision") == 1].tolist() == [0.0]


def test_d02_emulated_kinds_of_layer_are_not_offered_it(native_int8: None) -> None:
    """Convolutions and embeddings compute nothing in 8 bits, on no device."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(16, 64), nn.Conv1d(64, 64, 3)

        def forward(self, x: Tensor) -> Any:
            return self.conv(self.table(x.long()).transpose(1, 2))

    ap = lowering()
    cpu(callbacks=[ap]).fit(Task(Net(), torch.zeros(128, 32), 16))
    assert set(ap.precision_map().values()) == {"bf16"}
    assert len(unoffered(ap)) == 4
    assert all(
        d.reason.endswith("is emulated here, which costs time") for d in rows(ap.history, "precision", "refused")
    )


# ---- what counts is the size of a call ----


def final(net: nn.Module, data: Tensor, bs: int, config: AutoPrecisionConfig = ALLOWED, **options: Any) -> set[str]:
    ap = lowering(config)
    cpu(callbacks=[ap], **options).fit(Task(net, data, bs))
    return set(ap.precision_map().values())


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def test_d02_micro_batches_do_not_add_up(native_int8: None) -> None:
    assert final(nn.Sequential(square()), large_batches(8, 32), 32, accumulate_grad_batches=2) == {"bf16"}
    assert final(nn.Sequential(square()), large_batches(16, 64), 64, accumulate_grad_batches=2) == {"int8"}


def test_d02_calls_of_one_layer_do_not_add_up(native_int8: None) -> None:
    layer = square()
    assert final(nn.Sequential(layer, nn.Tanh(), layer), large_batches(8, 32), 32) == {"bf16"}
    assert final(nn.Sequential(layer, nn.Tanh(), layer), large_batches(8, 64), 64) == {"int8"}


def test_d02_sequences_count_as_rows(native_int8: None) -> None:
    assert final(nn.Sequential(square()), torch.rand(32, 16, WIDTH), 4) == {"int8"}
    assert final(nn.Sequential(square()), torch.rand(32, 15, WIDTH), 4) == {"bf16"}


def test_d02_a_block_gets_it_if_all_its_layers_may(native_int8: None) -> None:
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "int8"), granularity="block")
    wide = nn.Sequential(*(nn.Sequential(square(), square()) for _ in range(2)))
    narrow = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)) for _ in range(2)))
    assert final(wide, large_batches(), 64, config) == {"int8"}
    assert final(narrow, large_batches(), 64, config) == {"bf16"}


def test_d02_a_new_batch_size_is_judged_anew(native_int8: None) -> None:
    class Growing(Task):
        def train_dataloader(self) -> Any:
            return loader(self.data, 64 if self.trainer.current_epoch else 32)

    ap = lowering(AutoPrecisionConfig(formats=("fp32", "bf16", "int8")))
    trainer = cpu(callbacks=[ap], max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Growing(nn.Sequential(square()), large_batches(6)))
    assert applied(ap) == [("net.0", "bf16"), ("net.0", "int8")]
    assert rows(ap.history, "precision", "applied")[1].step > 12
    assert unoffered(ap) == [("net.0", "int8")]


def test_d02_a_layer_that_did_not_run_is_not_judged(native_int8: None) -> None:
    """Its size is not known: it gets no 8-bit format, and nothing is said about its size."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = square(), square()

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    ap = lowering(AutoPrecisionConfig(formats=("fp32", "bf16", "int8")))
    cpu(callbacks=[ap]).fit(Task(Idle(), large_batches(), 64))
    assert ap.precision_map() == {"net.used": "int8", "net.idle": "bf16"}
    assert unoffered(ap) == []


# ---- what was asked for explicitly ----

SMALL = 16


def asks_by_script(path: Path) -> list[Any]:
    return [scripted({1: all_in("int8")}, config=ALLOWED)]


def asks_by_request(path: Path) -> list[Any]:
    ap = lowering()
    return [ap, Ask(ap, "on_train_batch_end", 1, all_in("int8"))]


def asks_by_policy_name(path: Path) -> list[Any]:
    return [AutoPrecisionCallback("fixed:int8")]


def asks_by_map(path: Path) -> list[Any]:
    save_map(path / "map.yaml", {"net.0": "int8", "net.1": "int8"})
    return [AutoPrecisionCallback(path / "map.yaml")]


def asks_by_action(path: Path) -> list[Any]:
    class Asks(Lowers):
        def decide(self, observation: Any) -> Any:
            return all_in("int8")

    return [AutoPrecisionCallback(Asks(), interval=2)]


@pytest.mark.parametrize("make", [asks_by_script, asks_by_request, asks_by_policy_name, asks_by_map, asks_by_action])
def test_d02_an_explicit_request_is_applied_whatever_the_size(
    make: Callable[[Path], list[Any]], native: tuple[str, ...], tmp_path: Path
) -> None:
    callbacks = make(tmp_path)
    net = nn.Sequential(nn.Linear(SMALL, SMALL), nn.Linear(SMALL, SMALL))
    cpu(callbacks=callbacks).fit(Task(net, torch.rand(64, SMALL)))
    ap = callbacks[0]
    assert {("net.0", "int8"), ("net.1", "int8")} <= set(applied(ap))
    for decision in rows(ap.history, "precision", "applied"):
        assert decision.reason.endswith("emulated on this device") is (decision.applied not in native)


def test_d02_the_plugin_alone_is_an_explicit_request() -> None:
    plugin = AutoPrecision({"*": "int8"})
    cpu(plugins=[plugin]).fit(Task(nn.Sequential(nn.Linear(SMALL, SMALL)), torch.rand(64, SMALL)))
    assert plugin.precision_map() == {"net.0": "int8"}


def test_d02_a_policy_raises_what_was_asked_for_to_bf16_and_not_back(native_int8: None) -> None:
    policy = Lowers(move=1)
    ap = AutoPrecisionCallback(policy, config=ALLOWED, knobs=("precision",), interval=2)

    class Down(Ask):
        def _on_hook(self, *args: Any, **kwargs: Any) -> None:
            super()._on_hook(*args, **kwargs)
            policy.move = 1 if len(policy.observations) < 2 else -1

    down = Down(ap, "on_train_batch_end", 0, all_in("int8"))
    cpu(callbacks=[ap, down]).fit(Task(nn.Sequential(nn.Linear(SMALL, SMALL)), torch.rand(128, SMALL)))
    assert [name for _, name in applied(ap)][:4] == ["int8", "bf16", "fp32", "bf16"]
    assert [name for _, name in applied(ap)].count("int8") == 1


# ---- the record ----


def test_d02_the_reason_is_recorded_once_over_a_resume(native_int8: None, tmp_path: Path) -> None:
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "int8"))
    net, data = nn.Sequential(nn.Linear(SMALL, SMALL)), torch.rand(64, SMALL)
    first, second = lowering(config), lowering(config)
    trainer = cpu(callbacks=[first])
    trainer.fit(Task(net, data))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    cpu(callbacks=[second], max_epochs=2).fit(Task(net, data), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert isinstance(second.controller, Lowers)
    assert second.controller.observations
    assert unoffered(first) == unoffered(second) == [("net.0", "int8")]


@pytest.mark.parametrize("name", ["fp8", "int8", "bf16"])
def test_d02_no_report_claims_a_gain_that_nobody_measured(name: str, report: Callable[[], str]) -> None:
    ap = scripted({1: Action(precision={"net.0": name})}, config=ALLOWED)
    cpu(callbacks=[ap]).fit(Task(mixed(), large_batches(), 64))
    said = [report().split("started from")[1], *(d.reason for d in ap.history)]
    assert len(said[0].splitlines()) > 4
    for text in said:
        assert not re.search(r"(?i)faster|quick|speed|saves|\bms\b|\d ?x\b", text), text
