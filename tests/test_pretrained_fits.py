"""The learned policy in real fits, with networks that nobody has trained (cases E-01, E-02, E-04, E-07).

What the machine computes itself must not decide, so times of formats are given. Time budget: 25 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, LossScaleConfig, TableConfig
from autoprec.cost_watch import CostWatch
from autoprec.encoding import FEATURES, LIMIT, feature
from autoprec.feature_rows import INDEX
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.pretrained_policy import PretrainedController
from autoprec.what_if import take_sample
from tests.policy_networks import constant_network, restless_network, saved
from tests.resumed import Setup, assert_resumes
from tests.small_fits import Plain, StatefulLoader, quiet, seed
from tests.small_fits import loader as pairs
from tests.support import Manual, Task, assert_finite, cpu, fp16cpu, reported, rows, squares

# a resumed run has no ModelCheckpoint
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
TIMES = {"fp32": 2.0, "bf16": 1.0, "fp16": 0.8}
BAD = {5: math.nan, 9: math.inf}
Seen = list[tuple[NDArray[np.float32], NDArray[np.int64]]]


@pytest.fixture(autouse=True)
def _low_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def relative_times(costs: CostWatch, unit_name: str, formats: Iterable[str]) -> dict[str, float]:
        now = TIMES[costs._unit_formats.current[unit_name]]
        return {name: TIMES[name] / now for name in formats}

    monkeypatch.setattr(CostWatch, "relative_times", relative_times)
    monkeypatch.setattr("autoprec.collect.why_unprofitable", lambda *_: None)


def learned(folder: Path, network: PolicyNetwork | None = None, **options: Any) -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(
        formats=options.pop("formats", ("fp32", "bf16", "fp16")),
        loss_scale=options.pop("loss_scale", LossScaleConfig(init_scale=128.0)),
        table=options.pop("table", TableConfig(probe_every=1)),
    )
    return AutoPrecisionCallback(
        saved(folder, network), **{"interval": 2, "verbose": False, "config": config, **options}
    )


@contextmanager
def watched(callback: AutoPrecisionCallback, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Keeps what the network saw and answered."""
    assert isinstance(callback.controller, PretrainedController)
    network, plain = callback.controller.network, callback.controller.network.moves
    seen: Seen = []

    def moves(observation: NDArray[np.float32]) -> NDArray[np.int64]:
        seen.append((observation.copy(), plain(observation)))
        return seen[-1][1]

    with monkeypatch.context() as patch:
        patch.setattr(network, "moves", moves, raising=False)
        yield seen


def mean_of_squares(net: nn.Module, batch: Any, index: int) -> Tensor:
    """A loss in float32, which bears any scale."""
    output: Tensor = net(batch)
    return output.float().square().mean()


def deep(layers: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(6, 6), nn.Tanh())))


def moved(callback: AutoPrecisionCallback) -> list[str]:
    """Reasons of the changes that the network has a part in."""
    return [d.reason for d in rows(callback.history, "precision", "applied") if "; policy: " in d.reason]


def assert_no_fault(callback: AutoPrecisionCallback) -> None:
    assert not [d for d in callback.history if d.knob == "policy"]
    assert not [d for d in callback.history if d.outcome == "refused" and d.knob == "precision"]


# ---- E-02 ----


@pytest.mark.parametrize("layers", [3, 7, 40])
def test_e02_one_policy_for_any_number_of_layers(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed()
    callback = learned(tmp_path)
    before = {name: value.clone() for name, value in callback.controller.network.state_dict().items()}  # type: ignore[attr-defined]
    task = Task(deep(layers), torch.randn(16 * 8, 6))
    with watched(callback, monkeypatch) as seen:
        cpu(callbacks=[callback]).fit(task)
    assert callback.applied_steps == 16
    assert len(callback.precision_map()) == layers
    assert {len(observation) for observation, _ in seen} == {layers + 3}
    assert len(seen) >= 4
    assert moved(callback)
    assert_no_fault(callback)
    assert_finite(task)
    after = callback.controller.network.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(after[name], value) for name, value in before.items())


class RootOnly(Plain):
    """All parameters belong to the module itself, so that no layer can be steered."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.weight = nn.Parameter(torch.randn(8, 2))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(batch[0] @ self.weight, batch[1])


def test_e02_a_model_without_a_layer_to_steer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = reported(caplog, monkeypatch)
    callback = learned(tmp_path, verbose=True)
    with watched(callback, monkeypatch) as seen:
        quiet(max_epochs=2, callbacks=[callback]).fit(RootOnly(), pairs())
    assert callback.applied_steps == 16
    assert {len(observation) for observation, _ in seen} == {3}
    assert printed().count("no layer of this model can be steered") == 1
    assert set(callback.precision_map().values()) == {"fp32"}
    assert_no_fault(callback)


# ---- what is carried out ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ambient", [torch.bfloat16, torch.float16])
def test_errors_are_measured_where_neighbours_run_in_different_formats(
    dtype: torch.dtype, ambient: torch.dtype
) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = take_sample(x)
    with torch.autocast("cpu", ambient):
        found = take_sample(x)
    assert float(found.amax) == float(expected.amax) == float(x.abs().max())
    assert torch.equal(found.values, expected.values)


@pytest.mark.parametrize(("move", "expected"), [(-1, "fp16"), (0, "fp16"), (1, "bf16")])
def test_the_proposal_moved_is_what_runs(tmp_path: Path, move: int, expected: str) -> None:
    """fp16 is the cheapest and harmless here, so the table proposes it."""
    seed()
    callback = learned(tmp_path, constant_network(move), knobs=("precision",), interval=3)
    cpu(callbacks=[callback]).fit(Task(deep(3), torch.randn(16 * 8, 6)))
    assert set(callback.precision_map().values()) == {expected}
    reasons = [d.reason for d in rows(callback.history, "precision", "applied")]
    assert reasons
    for reason in reasons:
        assert reason.startswith("policy 'policy:untrained': table: fp16")
        assert reason.endswith("; policy: bf16") == (move == 1)


@pytest.mark.parametrize("move", [-1, 1])
def test_a_constant_offset_of_the_loss_scale_is_one_offset(tmp_path: Path, move: int) -> None:
    """The table does not propose anew what is near to its own proposal, so offsets must not add up."""
    seed()
    settings: dict[str, Any] = {"formats": ("fp32", "fp16"), "loss_scale": LossScaleConfig()}
    network = PolicyNetwork(hidden=())
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.weight[move + 1, INDEX["knob_loss_scale"]] = 2.0
    callback = learned(tmp_path, network, knobs=("precision", "loss_scale"), **settings)
    cpu(callbacks=[callback]).fit(Task(deep(3), torch.randn(60 * 8, 6), loss=mean_of_squares))
    history = [d for d in rows(callback.history, "loss_scale") if d.reason.startswith("policy")]
    assert 2 <= len(history) < 5, "one when a scale is set, one for the offset; gradients shrink"
    assert callback.loss_scale == history[-1].applied


def test_batch_size_moves_where_it_is_switched_on(tmp_path: Path) -> None:
    for schedule, expected in ((None, {8}), ((0.0,), {8, 16, 32})):
        seed()
        table = TableConfig(schedule=schedule)
        callback = learned(tmp_path, constant_network(1), table=table, interval=4)
        quiet(max_epochs=3, callbacks=[callback]).fit(Plain(), pairs(64, 8))
        assert {d.applied for d in rows(callback.history, "batch_size", "applied")} | {8} <= expected
        assert (callback.batch_size == 8) == (schedule is None)


# ---- E-01 ----


def bad_squares(net: nn.Module, batch: Any, index: int) -> Tensor:
    """NaN in batch 5 and inf in batch 9."""
    return squares(net, batch, index) * BAD.get(index, 1.0)


@pytest.mark.parametrize("kind", [Task, Manual])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"plugins": "fp16"}], ids=str)
def test_e01_nan_and_inf_reach_the_policy(
    kind: type[Task], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed()
    options = {"plugins": fp16cpu(128.0)} if "plugins" in options else options
    callback = learned(tmp_path, interval=1)
    task = kind(deep(3), torch.randn(16 * 8, 6), loss=bad_squares)
    with watched(callback, monkeypatch) as seen:
        cpu(callbacks=[callback], **options).fit(task)
    assert callback.applied_steps + callback.skipped_steps == 16
    assert callback.skipped_steps >= 2
    assert all(np.isfinite(observation).all() and np.abs(observation).max() <= LIMIT for observation, _ in seen)
    assert any(feature(observation, "loss_nonfinite").all() for observation, _ in seen)
    assert_no_fault(callback)
    assert_finite(task)
    assert_finite(callback.controller.network)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Task, Manual])
def test_e01_a_network_that_fails_leaves_it_to_the_table(kind: type[Task], tmp_path: Path) -> None:
    seed()
    callback = learned(tmp_path, constant_network(1), knobs=("precision",))
    with torch.no_grad():
        callback.controller.network.head.weight.fill_(math.nan)  # type: ignore[attr-defined]
    task = kind(deep(3), torch.randn(16 * 8, 6), loss=bad_squares)
    with pytest.warns(UserWarning, match="its table decides alone") as caught:
        cpu(callbacks=[callback]).fit(task)
    assert len([w for w in caught if "its table decides alone" in str(w.message)]) == 1
    assert callback.applied_steps == 14
    taken = {d.applied for d in rows(callback.history, "precision", "applied") if "table: " in d.reason}
    assert taken == {"fp16"}
    assert_finite(task)


# ---- E-04, E-07 ----


@pytest.mark.parametrize("host", ["32-true", "bf16-mixed", "fp16", "float64"])
def test_e07_the_network_answers_as_it_does_alone(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever precision surrounds a decision: the rows that it saw give the same moves afterwards."""
    seed()
    callback = learned(tmp_path, restless_network(seed=1))
    options: dict[str, Any] = {"precision": host} if "-" in host else {}
    if host == "fp16":
        options = {"plugins": fp16cpu(128.0)}
    task = Task(deep(3), torch.randn(16 * 8, 6))
    torch.set_default_dtype(torch.float64 if host == "float64" else torch.float32)
    try:
        with watched(callback, monkeypatch) as seen:
            cpu(callbacks=[callback], **options).fit(task)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(seen) >= 4
    for observation, moves in seen:
        assert observation.shape[1] == len(FEATURES)
        assert (callback.controller.network.moves(observation) == moves).all()  # type: ignore[attr-defined]
    assert_no_fault(callback)


def swinging_network() -> PolicyNetwork:
    """Lowers a unit that has changed in the last ten steps or so, and else raises it."""
    network = PolicyNetwork(len(FEATURES), (1,))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.body[0].weight[0, INDEX["steps_since_change"]] = 400.0  # type: ignore[operator]
        network.body[0].bias.fill_(-80.0)  # type: ignore[operator]
        network.head.weight.copy_(torch.tensor([[-5.0], [0.0], [5.0]]))
    return network


def test_resumed_runs_equal_those_that_were_not_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "policy"

    def callback() -> AutoPrecisionCallback:
        return learned(folder, swinging_network(), interval=5, table=TableConfig(probe_every=2))

    through = assert_resumes(Setup(callback, data=StatefulLoader), tmp_path / "runs")
    assert through.callback is not None
    assert len({d.step for d in rows(through.callback.history, "precision", "applied")}) > 2
    assert moved(through.callback)
    assert_no_fault(through.callback)
