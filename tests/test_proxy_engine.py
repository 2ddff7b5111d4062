"""The proxy engine against plain torch: gradients, formats, optimizers; overflow, events, and the same bits everywhere.

Time budget: 30 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from autoprec.envs import architectures
from autoprec.envs.architectures import Graph
from autoprec.envs.engine import EVENTS, FORMATS, KNOBS, SPEC, WINDOW, Engine
from autoprec.ops import native
from tests.kernels import needs_cpu_kernels
from tests.proxy_reference import Reference, plain_spec, rounded

pytestmark = needs_cpu_kernels

MODELS = {
    "mlp": architectures.mlp(4, 48),
    "wide": architectures.mlp(3, 96),
    "cnn": architectures.cnn(4, 64),
    "transformer": architectures.transformer(6, 64),
    "two blocks": architectures.transformer(9, 64),
    "recurrent": architectures.recurrent(4, 64),
}


def tanh_model() -> Graph:
    graph = Graph()
    graph.linear(32, "tanh")
    graph.linear(16)
    return graph


def two_heads() -> Graph:
    graph = Graph(positions=16, width=32)
    graph.linear(96)
    graph.attention(heads=2)
    graph.mean()
    graph.linear(16)
    return graph


def wide_rows() -> Graph:
    """Rows of 32 and 32 positions, where a vector has 16."""
    graph = Graph(positions=32, width=32)
    graph.linear(96)
    graph.attention(heads=1)
    graph.norm()
    graph.mean()
    graph.linear(32)
    return graph


def norm_of_one_position() -> Graph:
    graph = Graph()
    graph.linear(16, "relu")
    graph.norm()
    graph.linear(16)
    return graph


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(1) as made:
        knobs = made.knobs
        knobs["batch"], knobs["clip_multiplier"], knobs["loss_scale"] = 16, np.inf, 1.0
        yield made


def run(engine: Engine, spec: NDArray[Any], steps: int = 1, **knobs: Any) -> NDArray[Any]:
    engine.start(0, spec)
    return go_on(engine, steps, **knobs)


def go_on(engine: Engine, steps: int, **knobs: Any) -> NDArray[Any]:
    engine.knobs["steps"] = steps
    for name, value in knobs.items():
        engine.knobs[name] = value
    window: NDArray[Any] = engine.run()[0].copy()
    return window


def reference_gradients(engine: Engine, graph: Graph, spec: NDArray[Any], batch: int = 16) -> tuple[Reference, Any]:
    """What torch makes of the engine's last batch with its weights before the step (the step had a rate of 0)."""
    model = Reference(graph, spec, engine.read(0, "parameters"))
    model.set_formats(engine.knobs["formats"][0])
    x = torch.from_numpy(engine.read(0, "input")).view(batch, graph.positions, graph.width)
    labels = torch.from_numpy(engine.read(0, "labels")).long()
    logits = model(x)
    loss = nn.functional.cross_entropy(logits[:, :8], labels)
    (gradient,) = torch.autograd.grad(loss * float(engine.knobs["loss_scale"][0]), model.flat)
    return model, (logits.detach().numpy(), float(loss.detach()), gradient.numpy())


def relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


OTHERS = {"tanh": tanh_model(), "two heads": two_heads(), "wide rows": wide_rows(), "norm": norm_of_one_position()}


@pytest.mark.parametrize("graph", [*MODELS.values(), *OTHERS.values()], ids=[*MODELS, *OTHERS])
def test_gradients_are_those_of_autograd(engine: Engine, graph: Graph) -> None:
    spec = plain_spec(graph)
    window = run(engine, spec)
    _, (logits, loss, gradient) = reference_gradients(engine, graph, spec)
    assert relative(engine.read(0, "logits").reshape(16, -1), logits) < 1e-5
    assert window["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert relative(engine.read(0, "gradients"), gradient) < 2e-5
    assert window["norms"][0] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)


@pytest.mark.parametrize("batch", [7, 40])
@pytest.mark.parametrize("name", ["norm", "transformer"])
def test_batches_need_not_fill_whole_groups(engine: Engine, name: str, batch: int) -> None:
    graph = {**MODELS, **OTHERS}[name]
    spec = plain_spec(graph)
    run(engine, spec, batch=batch)
    _, (_, _, gradient) = reference_gradients(engine, graph, spec, batch)
    assert relative(engine.read(0, "gradients"), gradient) < 2e-5
    logits, labels = engine.read(0, "logits"), engine.read(0, "labels")
    run(engine, spec, batch=16)
    count = min(batch, 16)
    np.testing.assert_array_equal(engine.read(0, "logits")[: 16 * count], logits[: 16 * count])
    np.testing.assert_array_equal(engine.read(0, "labels")[:count], labels[:count])


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.parametrize("graph", [MODELS["mlp"], MODELS["transformer"], MODELS["recurrent"]], ids=["mlp", "tf", "rnn"])
def test_formats_round_as_the_specification_does(engine: Engine, graph: Graph, name: str) -> None:
    units = len(graph.kinds)
    bits = np.resize([2.0, -1.0, 3.0], 16)
    # samples lie on a grid, and features of one size would put many of them halfway between two values
    spec = plain_spec(graph, activation_bits=bits, gradient_bits=-bits, weight_bits=1.0, feature_spread=0.7, seed=5)
    spec["activation_mean"][: units // 2] = 4.0
    run(engine, spec, formats=FORMATS.index(name), loss_scale=64.0)
    _, (logits, _, gradient) = reference_gradients(engine, graph, spec)
    plain = Reference(graph, spec, engine.read(0, "parameters"))
    x = torch.from_numpy(engine.read(0, "input")).view(16, graph.positions, graph.width)
    exact = plain(x).detach().numpy()
    actual = engine.read(0, "logits").reshape(16, -1)
    # a sum in another order may round one entry the other way; what the format does is far larger
    assert relative(actual, logits) < 0.2 * relative(exact, logits)
    assert relative(engine.read(0, "gradients"), bias_free(gradient, engine, graph)) < 0.05


def bias_free(gradient: NDArray[Any], engine: Engine, graph: Graph) -> NDArray[Any]:
    """The reference's gradient with the engine's for biases, which sums rounded gradients where autograd does not."""
    merged: NDArray[Any] = gradient.copy()
    start = 0
    own = engine.read(0, "gradients")
    for _, wide, out in graph.shapes:
        start += wide * out
        assert relative(own[start : start + out], merged[start : start + out]) < 0.3
        merged[start : start + out] = own[start : start + out]
        start += out
    return merged


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [-16.0, -7.0, 0.0, 2.0])
def test_every_value_is_rounded_as_the_format_rounds_it(engine: Engine, name: str, bits: float) -> None:
    """An identity for a weight hands out the rounded input; at -16 and -7 bits much of it is subnormal."""
    graph = Graph()
    graph.linear(16)
    spec = plain_spec(graph, activation_bits=bits, feature_spread=1.0)
    engine.start(0, spec)
    identity = np.concatenate([np.eye(16, dtype=np.float32).ravel(), np.zeros(16, np.float32)])
    engine.write_parameters(0, identity)
    go_on(engine, 1, batch=128, formats=FORMATS.index(name))
    x = torch.from_numpy(engine.read(0, "input"))
    expected = rounded(x, name, 2.0**bits, 0.0, False).numpy()
    np.testing.assert_allclose(engine.read(0, "logits"), expected, rtol=1e-6)
    assert name == "fp32" or (expected != x.numpy()).any()


@pytest.mark.parametrize("optimizer", [0, 1, 2])
def test_optimizers_step_as_torch_does(engine: Engine, optimizer: int) -> None:
    graph = MODELS["mlp"]
    spec = plain_spec(graph, optimizer=optimizer, weight_decay=0.01)
    engine.start(0, spec)
    model = Reference(graph, spec, engine.read(0, "parameters"))
    made: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01),
        torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01),
        torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01),
    )
    for _ in range(5):
        go_on(engine, 1, lr_begin=0.01, lr_end=0.01)
        x = torch.from_numpy(engine.read(0, "input")).view(16, 1, 16)
        labels = torch.from_numpy(engine.read(0, "labels")).long()
        made[optimizer].zero_grad()
        nn.functional.cross_entropy(model(x)[:, :8], labels).backward()
        made[optimizer].step()
    assert relative(engine.read(0, "parameters"), model.flat.detach().numpy()) < 1e-4


def test_a_clip_shortens_the_step_to_the_median(engine: Engine) -> None:
    window = run(engine, plain_spec(MODELS["mlp"]), 16, lr_begin=0.05, lr_end=0.05, clip_multiplier=0.5)
    assert window["clipped"] == 15  # the first step has no median yet
    before = engine.read(0, "parameters")
    median = float(window["median_norm"])
    engine.start(0, plain_spec(MODELS["mlp"]))
    go_on(engine, 1, lr_begin=0.0, lr_end=0.0)
    first = float(engine.windows["norms"][0][0])
    start = engine.read(0, "parameters")
    go_on(engine, 1, lr_begin=1.0, lr_end=1.0)
    # the momentum holds the whole first gradient: 0.9 of it, and half the first norm of the second
    moved = np.linalg.norm(engine.read(0, "parameters") - start)
    assert moved <= 0.9 * first + 0.5 * first + 1e-4
    assert (before != start).any()
    assert median > 0


def test_an_overflow_skips_the_step_and_names_its_unit(engine: Engine) -> None:
    bits = np.zeros(16)
    bits[1] = 15.0  # about 2**15 and above: beyond fp16, within everything else
    spec = plain_spec(MODELS["mlp"], activation_bits=bits)
    window = run(engine, spec, 3, formats=FORMATS.index("fp16"), loss_scale=4.0, lr_begin=0.1, lr_end=0.1)
    engine.start(0, spec)
    untouched = engine.read(0, "parameters")
    counts = ("steps", "skipped", "first_unit", "first_tensor")
    assert [int(window[name]) for name in counts] == [3, 3, 1, 0]
    assert window["overflows"][:4, 0].tolist() == [0, 3, 0, 0]  # those behind it keep their range
    assert window["loss_scale"] == 1.0
    assert np.isnan(window["norms"][:3]).all()
    go_on(engine, 3, loss_scale=4.0)
    np.testing.assert_array_equal(engine.read(0, "parameters"), untouched)
    assert go_on(engine, 3, formats=FORMATS.index("bf16"), loss_scale=4.0)["skipped"] == 0


def test_a_gradient_overflow_is_the_loss_scales(engine: Engine) -> None:
    window = run(engine, plain_spec(MODELS["mlp"]), 12, formats=FORMATS.index("fp16"), loss_scale=2.0**23)
    assert window["first_tensor"] == 2
    assert 0 < window["skipped"] < 12
    assert window["loss_scale"] == 2.0 ** (23 - window["skipped"])
    grown = go_on(engine, 12, loss_scale=2.0, growth_interval=4)
    assert [float(grown[name]) for name in ("loss_scale", "growth_tracker")] == [16.0, 0.0]


def test_in_fp32_ranges_loss_factor_and_loss_scale_change_nothing_learnt(engine: Engine) -> None:
    graph = MODELS["mlp"]
    plain = run(engine, plain_spec(graph), 8, lr_begin=0.05, lr_end=0.05, is_evaluated=1)
    learnt = engine.read(0, "parameters")
    ranges: dict[str, Any] = {
        "activation_bits": 3.0,
        "gradient_bits": -5.0,
        "drift_bits": 4.0,
        "drift_noise": 3.0,
        "drift_steps": 20.0,
    }
    spec = plain_spec(graph, **ranges, loss_factor=2.0**-10)
    window = run(engine, spec, 8, loss_scale=256.0)
    np.testing.assert_array_equal(engine.read(0, "parameters"), learnt)
    assert window["evaluation_loss"] == plain["evaluation_loss"]
    np.testing.assert_allclose(window["norms"][:8], plain["norms"][:8] / 1024, rtol=1e-6)
    # but they show in the ranges: at first 2**7 and restless, later 2**3
    ratio = window["activation_amax"][0][:8] / plain["activation_amax"][0][:8]
    assert len(set(ratio.tolist())) > 1
    late = run(engine, spec, 16, lr_begin=0.05, lr_end=0.05)
    for _ in range(12):
        late = go_on(engine, 16)
    run(engine, plain_spec(graph), 16)
    for _ in range(12):
        settled = go_on(engine, 16)
    np.testing.assert_array_equal(late["activation_amax"][0] / settled["activation_amax"][0], 8.0)


def test_errors_count_relative_to_the_centred_signal(engine: Engine) -> None:
    def error(mean: float, bits: float, name: str) -> float:
        spec = plain_spec(MODELS["mlp"], activation_mean=mean, activation_bits=bits)
        window = run(engine, spec, 1, probed_formats=255)
        return float(window["errors"][0, 0, FORMATS.index(name)])

    assert error(0.0, 0.0, "fp32") == 0.0
    assert error(0.0, 0.0, "bf16") == pytest.approx(2.0**-9 * 0.83, rel=0.3)
    assert error(0.0, 0.0, "fp8") == pytest.approx(16 * error(0.0, 0.0, "bf16"), rel=0.3)
    # a mean of 32 deviations costs five bits of what is left for the signal
    assert error(32.0, 0.0, "bf16") == pytest.approx(32 * error(0.0, 0.0, "bf16"), rel=0.6)
    assert error(0.0, 15.0, "fp16") == error(0.0, 9.0, "fp8-unscaled") == 2.0
    assert error(0.0, 15.0, "fp8") < 0.1
    assert error(0.0, 0.0, "fp4") > error(0.0, 0.0, "fp8")
    run(engine, plain_spec(MODELS["mlp"]), 1, probed_formats=0)
    assert np.isnan(engine.windows["errors"]).all()


def test_small_gradients_underflow(engine: Engine) -> None:
    spec = plain_spec(MODELS["mlp"], gradient_bits=-22.0)
    flushed = run(engine, spec, 1, probed_formats=255)["underflow"][1, 2]
    assert flushed[FORMATS.index("fp16")] > 0.5 > 0.01 > flushed[FORMATS.index("bf16")]
    assert run(engine, spec, 1, loss_scale=2.0**22)["errors"].size
    kept = engine.windows["underflow"][0, 1, 2]
    assert kept[FORMATS.index("fp16")] < 0.01


def test_events_come_and_go(engine: Engine) -> None:
    spec = plain_spec(MODELS["mlp"], event_count=2)
    spec["events"][0] = (EVENTS.index("activation"), 2, 3, 4, 10.0)
    spec["events"][1] = (EVENTS.index("spike"), 0, 10, 2, 50.0)
    window = run(engine, spec, 14)
    bits = np.log2(window["activation_amax"][2][:14] / np.median(window["activation_amax"][2][:14]))
    assert (np.flatnonzero(bits[:10] > 5) == [3, 4, 5, 6]).all()
    losses = window["losses"][:14]
    assert set(np.flatnonzero(losses > 1.5 * np.median(losses))) == {10, 11}


def test_noise_scale_grows_with_label_noise(engine: Engine) -> None:
    clean, noisy = (
        run(engine, plain_spec(MODELS["mlp"], label_noise=noise), 16, batch=64)["noise_scale"] for noise in (0.0, 0.3)
    )
    assert 0 < clean < noisy


def test_all_instruction_sets_give_the_same_bits() -> None:
    current, results = native.selected_isa(), {}
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            graphs = (*MODELS.values(), *OTHERS.values())
            results[isa] = [train(graph, format_) for graph in graphs for format_ in (0, 1, 2, 4, 5, 6)]
    finally:
        native.select_isa(current)
    for isa in results:
        for actual, expected in zip(results[isa], results["scalar"], strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=isa)


def train(graph: Graph, format_: int, threads: int = 1, copies: int = 1) -> NDArray[np.float32]:
    with Engine(copies, threads=threads) as engine:
        for index in range(copies):
            engine.start(index, plain_spec(graph, seed=index, optimizer=1, label_noise=0.2))
        knobs = engine.knobs
        knobs["batch"], knobs["clip_multiplier"], knobs["lr_begin"], knobs["lr_end"] = 16, 1.0, 0.01, 0.01
        knobs["formats"], knobs["steps"], knobs["loss_scale"] = format_, 3, 1.0
        engine.run()
        return np.concatenate([engine.read(index, "parameters") for index in range(copies)])


def test_threads_and_neighbours_change_nothing() -> None:
    together = train(MODELS["mlp"], 1, threads=2, copies=4)
    np.testing.assert_array_equal(together, train(MODELS["mlp"], 1, copies=4))
    alone = train(MODELS["mlp"], 1)
    np.testing.assert_array_equal(together[: alone.size], alone)


def test_samples_come_in_one_order_whatever_the_batch_size(engine: Engine) -> None:
    spec = plain_spec(MODELS["mlp"])
    run(engine, spec, 2, batch=8)
    second = engine.read(0, "input")
    run(engine, spec, 1, batch=16)
    np.testing.assert_array_equal(engine.read(0, "input")[second.size :], second)


def test_structs_are_those_of_the_header() -> None:
    assert all(dtype.itemsize % 4 == 0 and not dtype.isalignedstruct for dtype in (SPEC, KNOBS, WINDOW))
    with Engine(1) as engine:
        engine.start(0, plain_spec(MODELS["mlp"]))
        window = run(engine, plain_spec(MODELS["mlp"]), 1, batch=8, clip_multiplier=np.inf, probed_formats=255)
    assert (window["subnormal"][:4] >= 0).all()  # the last field, so all before it have their places
    assert window["total_steps"] == 1


@pytest.mark.parametrize("field", ["node_count", "unit_count", "classes", "teacher_width", "evaluation_samples"])
def test_a_description_without_sense_is_refused(engine: Engine, field: str) -> None:
    with pytest.raises(ValueError, match="cannot run training 0"):
        engine.start(0, plain_spec(MODELS["mlp"], **{field: 0}))


def test_misuse_is_named() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        Engine(1).run()
    with Engine(1) as engine:
        engine.start(0, plain_spec(MODELS["mlp"]))
        engine.knobs["batch"] = 0
        with pytest.raises(ValueError, match=r"knobs\['batch'\]"):
            engine.run()
        with pytest.raises(ValueError, match="They must be float32"):
            engine.write_parameters(0, np.zeros(3, np.float32))
    engine.close()
