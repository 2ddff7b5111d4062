"""The policy's network: any rows, one answer, whatever is switched on around it (cases E-01, E-02, E-04, E-07).

Time budget: 10 s.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from autoprec.encoding import FEATURES, LIMIT
from autoprec.feature_rows import INDEX
from autoprec.policies.network import MAX_DISTANCE, MAX_NORMAL, MIN_STD, PolicyNetwork
from tests.policy_networks import constant_network, restless_network, rows


def tensor_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rows(count, seed))


def trained_range(network: PolicyNetwork, low: float = -1.0, high: float = 1.0) -> PolicyNetwork:
    network.low.fill_(low)
    network.high.fill_(high)
    return network


@pytest.mark.parametrize("count", [0, 1, 3, 10, 43, 1000])
def test_e02_any_number_of_rows(count: int) -> None:
    network = restless_network()
    logits, moves = network(tensor_rows(count)), network.moves(rows(count))
    assert logits.shape == (count, 3)
    assert logits.dtype == torch.float32
    assert moves.shape == (count,)
    assert set(moves.tolist()) <= {-1, 0, 1}


def test_e02_a_row_is_answered_alike_among_any_others() -> None:
    network, many = restless_network(), rows(60)
    alone = [int(network.moves(many[i : i + 1])[0]) for i in range(60)]
    assert network.moves(many).tolist() == alone
    assert set(alone) == {-1, 0, 1}


@pytest.mark.parametrize("hidden", [(), (8,), (64, 64)])
@pytest.mark.parametrize("reach", [1.0, 1.5, 10.0])
def test_moves_are_the_likeliest(hidden: tuple[int, ...], reach: float) -> None:
    network, observation = restless_network(hidden=hidden), rows(200) * np.float32(reach)
    network.set_normalisation(tensor_rows(50, seed=2))
    trained_range(network, -1.45, 1.45)
    observation[3, 3], observation[4, 4] = math.nan, math.inf
    assert (network.moves(observation) == network(torch.from_numpy(observation)).argmax(dim=1).numpy() - 1).all()


def test_keeps_unless_another_move_is_likelier() -> None:
    assert constant_network(0, 0.0).moves(rows(5)).tolist() == [0] * 5
    network = constant_network(0, -1.0)  # lower and raise are equally likely
    assert network.moves(rows(5)).tolist() == [1] * 5


@pytest.mark.parametrize("seed", range(3))
def test_a_new_network_accepts(seed: int) -> None:
    assert not PolicyNetwork(seed=seed).moves(rows(200)).any()


def test_first_weights_come_from_their_own_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = PolicyNetwork(), PolicyNetwork(), PolicyNetwork(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_names_of_tensors() -> None:
    names = set(PolicyNetwork(5, (4, 3)).state_dict())
    layers = {f"{layer}.{kind}" for layer in ("body.0", "body.2", "head") for kind in ("weight", "bias")}
    assert names == {*layers, "mean", "std", "low", "high"}
    assert set(PolicyNetwork(5, ()).state_dict()) == {"head.weight", "head.bias", "mean", "std", "low", "high"}


def test_rows_of_another_width_are_refused() -> None:
    network = PolicyNetwork(5, (4,))
    for shape in ([2, 4], [5], [1, 2, 5]):
        message = re.escape(f"Passed rows of shape {shape} to a policy network with 5 features")
        with pytest.raises(ValueError, match=message):
            network(torch.zeros(shape))


# ---- E-01 ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_e01_not_finite_is_outside(value: float) -> None:
    network, observation = trained_range(constant_network(1, 2.0)), rows(4)
    observation[1, 7] = value
    observation[2] = value
    assert network.moves(observation).tolist() == [1, 0, 0, 1]
    logits, novelty = network(torch.from_numpy(observation)), network.novelty(torch.from_numpy(observation))
    assert bool(torch.isfinite(logits).all())
    assert novelty.tolist() == [0.0, MAX_DISTANCE, MAX_DISTANCE * len(FEATURES), 0.0]
    assert torch.equal(logits[[0, 3]], network(tensor_rows(4))[[0, 3]])


def test_e01_weights_that_are_not_finite_raise() -> None:
    network = restless_network()
    with torch.no_grad():
        network.head.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        network.moves(rows(3))


def test_a_gradient_through_rows_that_are_not_finite_is_finite() -> None:
    network, observation = restless_network(), tensor_rows(4)
    observation[0, 0], observation[1, 1] = math.nan, math.inf
    network(observation).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in network.parameters() if p.grad is not None)
    assert network.head.weight.grad is not None


# ---- E-04 ----


def test_e04_a_constant_feature_that_changes_does_not_explode() -> None:
    network = restless_network()
    constant = np.repeat(rows(1), 500, axis=0)
    network.set_normalisation(torch.from_numpy(constant))
    changed = constant[:1] * 1.01
    normal = network._normalised(torch.from_numpy(changed))
    assert float(normal.abs().max()) <= 0.01 * float(np.abs(constant[0]).max()) / MIN_STD * 1.001
    far = network._normalised(torch.full((1, len(FEATURES)), LIMIT))
    assert float(far.abs().max()) == MAX_NORMAL


def test_e04_statistics_stay_as_they_are() -> None:
    network = restless_network()
    before = {name: value.clone() for name, value in network.named_buffers()}
    network.train()
    bad = tensor_rows(50) * 5
    bad[3] = math.inf
    network(bad)
    network.moves(bad.numpy())
    assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())


def test_e04_statistics_leave_out_what_is_not_finite() -> None:
    network, seen = restless_network(), tensor_rows(100)
    seen[17, 3] = math.inf
    network.set_normalisation(seen)
    kept = torch.cat((seen[:17], seen[18:]))
    assert torch.allclose(network.mean, kept.mean(dim=0), atol=1e-6)
    assert torch.allclose(network.std, kept.std(dim=0, unbiased=False), atol=1e-6)
    with pytest.raises(ValueError, match="without a finite row"):
        network.set_normalisation(torch.full((2, len(FEATURES)), math.nan))


# ---- rows unlike those of the training ----


def test_inside_the_range_nothing_changes() -> None:
    network = restless_network()
    expected = network(tensor_rows(100))
    assert torch.equal(trained_range(network)(tensor_rows(100)), expected)
    assert not network.novelty(tensor_rows(100)).any()


def test_offsets_shrink_smoothly_to_zero() -> None:
    network = trained_range(constant_network(-1, 2.0))
    distances = torch.linspace(0.0, 3.0, 301)
    observation = torch.zeros(301, len(FEATURES))
    observation[:, 4] = 1.0 + distances  # half the range is 1 wide
    assert torch.allclose(network.novelty(observation), distances, atol=1e-5)
    logits = network(observation)
    margin = (logits[:, 0] - logits[:, 1]).detach()
    assert torch.allclose(margin, 2.0 * torch.exp(-distances) - distances, atol=1e-5)
    assert bool((margin.diff() < 0).all())
    moves = network.moves(observation.numpy())
    assert (moves[distances < 0.85] == -1).all()
    assert (moves[distances > 0.86] == 0).all()


def test_novelty_grows_with_features_outside() -> None:
    network = trained_range(constant_network(1, 50.0))
    observation = torch.zeros(11, len(FEATURES))
    for count in range(11):
        observation[count, :count] = -1.5
    assert torch.allclose(network.novelty(observation), torch.arange(11) / 2.0)
    moves = network.moves(observation.numpy())
    assert moves.tolist() == sorted(moves.tolist(), reverse=True)
    assert moves[0] == 1
    assert moves[-1] == 0


def test_no_confidence_survives_far_outside() -> None:
    network = trained_range(constant_network(1, 100.0))
    assert network.moves(np.full((3, len(FEATURES)), LIMIT, dtype=np.float32)).tolist() == [0, 0, 0]


def test_training_range_changes_no_output_inside_of_it() -> None:
    network, seen = restless_network(), tensor_rows(300)
    seen[:, INDEX["memory"]] = 0.3
    seen[:, INDEX["layer_conv"]] = 0.0
    network.set_normalisation(seen[:100])
    expected = network(seen)
    network.set_training_range(seen.amin(dim=0), seen.amax(dim=0))
    assert torch.allclose(network(seen), expected, atol=1e-5)
    assert not network.novelty(seen).any()


def test_what_never_changed_in_training_is_left_out_of_account() -> None:
    network, seen = restless_network(), tensor_rows(300)
    seen[:, INDEX["memory"]], seen[:, INDEX["layer_conv"]] = 0.0, 0.0
    network.set_training_range(seen.amin(dim=0), seen.amax(dim=0))
    other = seen.clone()
    other[:, INDEX["memory"]] = 0.9
    assert torch.allclose(network(other), network(seen), atol=1e-4)
    other[:, INDEX["layer_conv"]] = 1.0  # another kind of row
    assert bool((network.novelty(other) == MAX_DISTANCE).all())
    with pytest.raises(ValueError, match="They must be finite"):
        network.set_training_range(seen.amax(dim=0), seen.amin(dim=0))


# ---- E-07 ----


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


AROUND: dict[str, Callable[[], object]] = {
    "autocast-bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast-fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no-grad": torch.no_grad,
    "inference-mode": torch.inference_mode,
    "default-float64": lambda: default_dtype(torch.float64),
    "default-bfloat16": lambda: default_dtype(torch.bfloat16),
    "default-device-meta": lambda: torch.device("meta"),
    "anomaly-detection": torch.autograd.detect_anomaly,
    "numpy-raises": lambda: np.errstate(all="raise"),
    "matmul-medium": lambda: matmul_precision("medium"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("around", AROUND)
def test_e07_same_action_whatever_the_host_precision(around: str) -> None:
    network = restless_network(hidden=(256, 256))
    expected, logits = network.moves(rows(600)), network(tensor_rows(600)).detach()
    with AROUND[around]():  # type: ignore[attr-defined]
        made = restless_network(hidden=(256, 256))
        assert (network.moves(rows(600)) == expected).all()
        assert (made.moves(rows(600)) == expected).all()
    assert (made.moves(rows(600)) == expected).all()
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(network(tensor_rows(600)).detach(), logits)


def test_e07_moves_leave_no_trace() -> None:
    network, observation = restless_network(), rows(5)
    observation.flags.writeable = False
    torch.manual_seed(3)
    before = torch.get_rng_state()
    network.moves(observation)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_copies_decide_alike(again: Callable[[nn.Module], PolicyNetwork]) -> None:
    network = restless_network()
    expected = network.moves(rows(50))
    assert (again(network).moves(rows(50)) == expected).all()
