"""A map of formats in force outside of training: what computes in which format, and that nothing of it stays.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import autoprec
from autoprec import AppliedMap, AutoPrecision, AutoPrecisionCallback, apply_map, kept_weights, ops
from autoprec.map_file import save_map
from tests.small_fits import Full, fp16_plugin, loader, quiet
from tests.support import assert_same_state, state_of, watch_dtypes

LOW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}


class Net(nn.Module):
    """Names as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 5)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.dropout(x + self.ffn(x))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens).mean(1))  # type: ignore[no-any-return]


TOKENS = torch.arange(24).reshape(4, 6)
MAP = {"*attention*": "fp16", "*ffn*": "bf16", "*embedding*": "fp32"}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(3))


def shape_of(model: nn.Module) -> list[Any]:
    """Everything by which a module could differ afterwards, tensors aside."""
    return [
        (type(part), {key: value for key, value in vars(part).items() if not isinstance(value, (dict, Tensor))})
        for part in model.modules()
    ]


def runs_in(model: nn.Module, inputs: Any) -> dict[str, torch.dtype]:
    seen = watch_dtypes(model)
    with torch.no_grad():
        model(inputs)
    return {name: dtypes[-1] for name, dtypes in seen.items()}


# ---- formats ----


def test_each_part_computes_in_its_format() -> None:
    model = Net().eval()
    with apply_map(model, MAP) as applied:
        seen = runs_in(model, TOKENS)
    assert applied.formats == {"embedding": "fp32", "attention": "fp16", "ffn.0": "bf16", "ffn.2": "bf16"}
    assert seen["embedding"] is torch.float32
    assert seen["ffn.0"] is seen["ffn.2"] is torch.bfloat16
    assert seen["norm"] is seen["head"] is torch.float32  # not named
    assert applied.emulated == {"attention": "fp16"}
    assert repr(applied) == "AppliedMap(1 x fp32, 2 x bf16, 1 x fp16)"


@pytest.mark.parametrize("format_name", ["bf16", "fp16", "int8", "fp8", "tf32"])
def test_computes_what_validation_in_a_fit_computes(format_name: str) -> None:
    """The layers run as in a training step, on kept copies or not: bit for bit."""

    class Seen(Full):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
            self.outputs: list[Tensor] = []

        def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.outputs.append(self.net(batch[0]))

    module = Seen()
    policy = autoprec.ScriptedController(steps={0: autoprec.Action(precision={"net.2": format_name})})
    callback = AutoPrecisionCallback(policy, eval_precision="current", verbose=False)
    quiet(max_epochs=1, callbacks=[callback], num_sanity_val_steps=0).fit(module, loader(16), loader(16))
    module.eval()
    with apply_map(module, {"net.2": format_name}), torch.no_grad():
        found = [module.net(batch[0]) for batch in loader(16)]
    assert len(found) == 2
    assert all(torch.equal(left, right) for left, right in zip(found, module.outputs, strict=True))


def test_a_part_that_is_called_alone_computes_in_the_map_too() -> None:
    model = Net().eval()
    with apply_map(model, {"ffn.*": "bf16"}), torch.no_grad():
        assert model.ffn(torch.zeros(1, 16)).dtype is torch.bfloat16
        assert model.ffn[0](torch.zeros(1, 16)).dtype is torch.bfloat16
        assert model.encode(TOKENS).dtype is torch.float32  # a residual in fp32
        assert not torch.is_autocast_enabled("cpu")


def test_layers_that_are_not_named_follow_the_callers_autocast() -> None:
    model = mlp()
    with apply_map(model, {"2": "fp32"}), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        seen = runs_in(model, rows())
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert (seen["0"], seen["2"]) == (torch.bfloat16, torch.float32)


def test_a_region_without_autocast_stays_protected() -> None:
    class Protected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.low(x)
            with torch.autocast("cpu", enabled=False):
                return self.high(x.float())  # type: ignore[no-any-return]

    model = Protected()
    with apply_map(model, {"*": "bf16"}):
        seen = runs_in(model, rows())
    assert seen == {"low": torch.bfloat16, "high": torch.float32}


def test_an_operation_without_a_low_form_runs_in_float32_and_is_named() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            scores = self.net(x)
            return scores.masked_fill(scores > 0, -1e9)  # type: ignore[no-any-return]

    model = Masks()
    with apply_map(model, {"net.*": "fp16"}) as applied, torch.no_grad():
        for _ in range(3):
            assert model(rows()).min() == -1e9
    assert "masked_fill" in applied.repaired["net.2"]


# ---- nothing stays ----


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_as_it_was_after_an_exception(error: type[BaseException]) -> None:
    model = Net()
    before, state = shape_of(model), state_of(model)
    handle = model.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(error("stop")))
    with pytest.raises(error), apply_map(model, MAP):
        model(TOKENS)
    handle.remove()
    assert not torch.is_autocast_enabled("cpu")
    assert [kind for kind, _ in shape_of(model)] == [kind for kind, _ in before]
    assert all("_autoprec" not in vars(part) for part in model.modules())
    assert_same_state(state_of(model), state)


def test_removal_twice_and_outputs_bit_for_bit() -> None:
    model = Net().eval()
    before = shape_of(model)
    with torch.no_grad():
        expected = model(TOKENS)
        applied = apply_map(model, MAP)
        assert not torch.equal(model(TOKENS), expected)
        applied.remove()
        applied.remove()
        assert torch.equal(model(TOKENS), expected)
    assert applied.is_removed
    assert shape_of(model) == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_inputs_that_fail_leave_nothing_behind() -> None:
    model = mlp()
    before = shape_of(model)
    with pytest.raises(RuntimeError):
        apply_map(model, {"*": "bf16"}, inputs=torch.zeros(2, 3))
    assert shape_of(model) == before


@pytest.mark.parametrize("is_inner_first", [True, False])
def test_maps_nest_and_leave_in_any_order(is_inner_first: bool) -> None:
    model = mlp()
    before = shape_of(model)
    outer = apply_map(model, {"0": "bf16", "2": "bf16"})
    inner = apply_map(model, {"2": "fp32"})
    assert runs_in(model, rows()) == {"0": torch.bfloat16, "1": torch.bfloat16, "2": torch.float32}
    first, second = (inner, outer) if is_inner_first else (outer, inner)
    first.remove()
    expected = torch.bfloat16 if is_inner_first else torch.float32
    assert runs_in(model, rows())["2"] is expected
    second.remove()
    assert [kind for kind, _ in shape_of(model)] == [kind for kind, _ in before]


def test_a_map_that_is_suspended_leaves_those_below_in_force() -> None:
    model = mlp()
    with apply_map(model, {"*": "bf16"}), apply_map(model, {"2": "fp32"}) as inner:
        with inner.suspended():
            assert runs_in(model, rows())["2"] is torch.bfloat16
        assert runs_in(model, rows())["2"] is torch.float32
        with inner.suspended():
            inner.remove()
        assert runs_in(model, rows())["2"] is torch.bfloat16
    assert type(model[2]) is nn.Linear


def test_an_outer_map_that_leaves_takes_its_formats_along() -> None:
    model = mlp()
    outer = apply_map(model, {"0": "bf16"})
    with apply_map(model, {"2": "fp16"}) as inner:
        assert runs_in(model, rows())["0"] is torch.bfloat16
        with outer.suspended():
            assert runs_in(model, rows())["0"] is torch.float32
        assert runs_in(model, rows())["0"] is torch.bfloat16
        outer.remove()
        assert runs_in(model, rows()) == {"0": torch.float32, "1": torch.float32, "2": torch.float16}
        assert inner.formats == {"2": "fp16"}
    assert type(model[0]) is nn.Linear


def test_an_outer_map_that_was_suspended_stays_the_outer_one() -> None:
    model = mlp()
    with apply_map(model, {"2": "fp32"}) as outer, apply_map(model, {"2": "bf16"}):
        with outer.suspended():
            pass
        assert runs_in(model, rows())["2"] is torch.bfloat16


def test_a_parametrization_that_is_added_meanwhile_outlives_a_suspension() -> None:
    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}) as applied:
        nn.utils.parametrizations.weight_norm(model[0])
        expected = model(rows())
        with applied.suspended():
            assert model(rows()).dtype is torch.float32
        assert torch.equal(model(rows()), expected)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    assert model(rows()).dtype is torch.float32


def test_a_copy_of_a_model_that_was_parametrized_meanwhile_is_plain() -> None:
    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}):
        nn.utils.parametrizations.weight_norm(model[0])
        copied = copy.deepcopy(model)
        assert copied[0](rows()).dtype is torch.float32
        expected = model(rows())
        with apply_map(copied, {"*": "bf16"}):
            assert torch.equal(copied(rows()), expected)
        with apply_map(model, {"2": "fp32"}):
            seen = runs_in(model, rows())
        assert (seen["1"], seen["2"]) == (torch.bfloat16, torch.float32)
        assert torch.equal(model(rows()), expected)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    assert torch.equal(copied(rows()), model(rows()))


def test_a_parametrization_that_is_added_meanwhile_stays() -> None:
    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}):
        nn.utils.parametrizations.weight_norm(model[0])
        assert model(rows()).dtype is torch.bfloat16
    expected = copy.deepcopy(model)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    assert [cls.__module__ for cls in type(model[0]).__mro__[1:3]] == [
        "torch.nn.modules.linear",
        "torch.nn.modules.module",
    ]
    assert torch.equal(model(rows()), expected(rows()))


def test_a_class_that_registers_its_subclasses_is_left_alone() -> None:
    registered = []

    class Registers(nn.Linear):
        def __init_subclass__(cls) -> None:
            registered.append(cls)

    model = nn.Sequential(Registers(16, 4), nn.Linear(4, 2))
    with apply_map(model, {"*": "bf16"}) as applied:
        assert applied.formats == {"1": "bf16"}
        assert "__init_subclass__" in applied.refused["0"]
    with pytest.raises(ValueError, match="__init_subclass__"):
        apply_map(model, {"0": "bf16"})
    assert registered == []


def test_tied_layers_have_one_format_under_either_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))  # type: ignore[no-any-return]

    model = Tied()
    with apply_map(model, {"head": "bf16"}) as applied:
        assert runs_in(model, TOKENS) == {"embedding": torch.bfloat16, "head": torch.bfloat16}
        assert applied.formats == {"embedding": "bf16"}
    assert model.head.weight is model.embedding.weight


def test_copies_and_pickles_of_the_model_are_plain() -> None:
    model = mlp()
    with apply_map(model, {"*": "bf16"}):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (copied, pickled):
        assert [type(part) for part in each.modules()] == [nn.Sequential, nn.Linear, nn.ReLU, nn.Linear]
        assert each(rows()).dtype is torch.float32


# ---- weights ----


def write(model: nn.Module, how: str) -> None:
    weight = model[0].weight  # type: ignore[index]
    if how == "step":
        with torch.no_grad():
            weight.mul_(2.0)
    elif how == ".data":
        weight.data.mul_(2.0)
    elif how == "load":
        model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    elif how == "replace":
        model[0].weight = nn.Parameter(weight.detach() * 2.0)  # type: ignore[index]
    else:
        weight.data = weight.data * 2.0


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
@pytest.mark.parametrize("how", ["step", ".data", "load", "replace", "other memory"])
def test_a_weight_that_was_written_is_noticed(how: str, format_name: str) -> None:
    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": format_name}) as applied:
        assert applied.copied_bytes == 0
        model(rows())
        assert applied.copied_bytes > 0
        write(model, how)
        found = model(rows())
        applied.remove()
        with apply_map(model, {"*": format_name}):
            assert torch.equal(found, model(rows()))


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
def test_weights_without_memory_between_forwards(format_name: str) -> None:
    """Offloading gives memory back until a hook of the layer brings the weight again."""
    model = mlp()
    weight = model.get_parameter("0.weight")
    values, size = weight.detach().clone(), weight.untyped_storage().size()

    def bring(module: nn.Module, args: Any) -> None:
        weight.untyped_storage().resize_(size)
        weight.data.copy_(values)

    model[0].register_forward_pre_hook(bring)
    with torch.no_grad(), apply_map(model, {"*": format_name}):
        expected = model(rows())
        weight.untyped_storage().resize_(0)
        assert torch.equal(model(rows()), expected)


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
def test_an_ensemble_of_functional_calls(format_name: str) -> None:
    models = [mlp(), mlp()]
    parameters, buffers = torch.func.stack_module_state(models)
    base, inputs = mlp(), rows()

    def one(parameters: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (inputs,))  # type: ignore[no-any-return]

    with torch.no_grad(), apply_map(base, {"*": format_name}):
        before = base(rows())
        outputs = torch.func.vmap(one)(parameters, buffers)
        assert torch.equal(base(rows()), before)
    torch.testing.assert_close(outputs[1].float(), models[1](rows()), atol=0.05, rtol=0.05)


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_a_trace_keeps_weights_as_such() -> None:
    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}):
        traced = torch.jit.trace(model, rows())
        assert torch.equal(traced(rows()), model(rows()))
        doubled = {name: value * 2 for name, value in model.state_dict().items()}
        traced.load_state_dict(doubled)
        model.load_state_dict(doubled)
        assert torch.equal(traced(rows()), model(rows()))


def test_a_weight_of_another_class_that_comes_meanwhile() -> None:
    class Other(Tensor):
        def data_ptr(self) -> int:
            raise RuntimeError("no memory of its own")

    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}):
        expected = model(rows())
        model[0].weight = nn.Parameter(model.get_parameter("0.weight").detach().as_subclass(Other))
        assert torch.equal(model(rows()).as_subclass(Tensor), expected)


def test_copies_that_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}) as applied:
        expected = model(rows())
        applied.refresh()
        monkeypatch.setattr(kept_weights, "new_copy", refuse)
        assert torch.equal(model(rows()), expected)
        assert applied.copied_bytes == 0


def test_an_error_while_copies_are_made_leaves_no_precision_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    model = mlp()
    with torch.no_grad(), apply_map(model, {"0": "bf16"}):
        with monkeypatch.context() as patch:
            patch.setattr(kept_weights, "new_copy", fail)
            with pytest.raises(RuntimeError, match="broken"):
                model(rows())
        with torch.autocast("cpu", torch.bfloat16):
            assert runs_in(model, rows())["2"] is torch.bfloat16


def test_copies_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def new_copy(parameter: Tensor, *args: Any, **options: Any) -> Any:
        made.append(parameter)
        return ops.new_copy(parameter, *args, **options)

    monkeypatch.setattr(kept_weights, "new_copy", new_copy)
    model = mlp()
    with torch.no_grad(), apply_map(model, {"*": "bf16"}):
        for _ in range(5):
            model(rows())
    assert len(made) == 4  # two weights, two biases


@pytest.mark.parametrize("format_name", ["bf16", "int8", "fp16"])
def test_gradients_go_to_the_weights_as_ever(format_name: str) -> None:
    model, x = mlp(), rows().requires_grad_()
    with apply_map(model, {"*": format_name}):
        with torch.no_grad():
            model(x)
        model(x).float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in model.parameters())
    assert x.grad is not None
    model.requires_grad_(False)
    again = rows().requires_grad_()
    with apply_map(model, {"*": format_name}):
        model(again).float().sum().backward()  # on copies
    assert again.grad is not None
    assert torch.allclose(again.grad, x.grad)


# ---- modes, threads, compilers ----


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("is_training", [True, False])
def test_every_mode(mode: Any, is_training: bool) -> None:
    model = Net().train(is_training)
    with apply_map(model, MAP), mode():
        torch.manual_seed(0)
        first = model(TOKENS)
    with apply_map(model, MAP), torch.no_grad():
        torch.manual_seed(0)
        assert torch.allclose(model(TOKENS), first, atol=1e-2)
    assert model.training is is_training


def test_a_map_that_is_applied_in_inference_mode_takes_gradients_later() -> None:
    model = mlp().requires_grad_(False)
    with torch.inference_mode():
        applied = apply_map(model, {"*": "bf16"})
        model(rows())
    with applied:
        x = rows().requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None


def test_threads_compute_the_same() -> None:
    model = Net().eval()
    with apply_map(model, MAP), torch.no_grad():
        expected: Tensor = model(TOKENS)
        found: list[Tensor] = []

        def predict() -> None:
            with torch.no_grad():
                found.extend(model(TOKENS) for _ in range(20))

        workers = [threading.Thread(target=predict) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(found) == 80
    assert all(torch.equal(each, expected) for each in found)


def test_compiled() -> None:
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        plain = compiled(rows())
        with apply_map(model, {"0": "bf16"}):
            found = compiled(rows())
            assert torch.equal(found, model(rows()))
        assert not torch.equal(found, plain)
        assert torch.equal(compiled(rows()), plain)
    torch._dynamo.reset()


# ---- what is measured ----


def test_fidelity_of_logits() -> None:
    model = mlp()
    batches = [(rows(), torch.arange(8) % 4), (rows(4), torch.arange(4))]
    with apply_map(model, {"*": "bf16"}, inputs=batches) as applied:
        pass
    assert applied.fidelity is not None
    assert 0.0 < applied.fidelity["kl"] < 1e-3
    assert 30.0 < applied.fidelity["logit_sqnr_db"] < 80.0
    assert applied.fidelity["top1_agreement"] > 0.8
    assert applied.fidelity["rows"] == 12
    assert applied.time_ratio is None


def test_a_map_of_fp32_changes_nothing() -> None:
    with apply_map(mlp(), {"*": "fp32"}, inputs=rows()) as applied:
        pass
    assert applied.fidelity is not None
    assert applied.fidelity["max_abs_difference"] == 0.0


def test_time_is_measured_on_request() -> None:
    with apply_map(mlp(), {"*": "bf16"}, inputs=rows(), timed=True) as applied:
        pass
    assert applied.time_ratio is not None
    assert applied.time_ratio > 0.0
    with pytest.raises(ValueError, match="without `inputs`"):
        apply_map(mlp(), {"*": "bf16"}, timed=True)


# ---- maps ----


def test_map_file_and_folder(tmp_path: Path) -> None:
    save_map(tmp_path / "map.yaml", {"0": "bf16"}, loss_scale=2.0)
    for source in (tmp_path / "map.yaml", str(tmp_path)):
        with apply_map(mlp(), source) as applied:
            assert applied.formats == {"0": "bf16"}
    with pytest.raises(FileNotFoundError, match="no such file"):
        apply_map(mlp(), tmp_path / "none.yaml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a map nor the record of a run"):
        apply_map(mlp(), tmp_path / "empty")


@pytest.mark.parametrize("format_name", ["bf16", "fp32"])
def test_formats_that_a_recorded_run_ended_with(format_name: str, tmp_path: Path) -> None:
    module = Full()
    module.scale = nn.Parameter(torch.ones(1))  # cannot be steered
    callback = AutoPrecisionCallback(f"fixed:{format_name}", record=tmp_path / "run", verbose=False)
    quiet(max_epochs=1, callbacks=[callback]).fit(module, loader(), loader(16))
    callback.save_map(tmp_path / "map.yaml")
    for source in (tmp_path / "run", tmp_path / "map.yaml"):
        with apply_map(module, source) as applied:
            assert applied.formats == {"net.0": format_name, "net.2": format_name}


def test_a_unit_that_cannot_be_steered_may_be_asked_for_fp32() -> None:
    module = Full()
    module.scale = nn.Parameter(torch.ones(1))
    with apply_map(module, {"(root)": "fp32", "net.0": "bf16"}) as applied:
        assert applied.formats == {"net.0": "bf16"}
        assert set(applied.refused) == {"(root)"}
    with pytest.raises(ValueError, match="any forward that can be intercepted"):
        apply_map(module, {"(root)": "bf16"})


@pytest.mark.parametrize(
    ("model", "map", "message"),
    [
        (Net(), {"*atention*": "bf16"}, r"'\*atention\*', which meets no unit of this model. Close to it: 'attention'"),
        (Net(), {"ffn": "bf16", "heads": "bf16"}, r"'ffn', 'heads', which meet no unit"),
        (Net(), {"norm": "int8"}, r"int8 for 'norm', which cannot be: this layer runs in fp32, bf16, fp16"),
        (Net(), {"*norm*": "int8", "head": "bf16"}, r"int8 for 'norm', which cannot be"),
        (Net(), {"head": "b16"}, r"Did you mean 'bf16'"),
        (Net(), {}, r"The map names no unit"),
        (nn.ReLU(), {"*": "bf16"}, r"no layer that can be given a format, for it has no parameters"),
        (nn.Linear(2, 2), {"*": "bf16"}, r"goes into an `nn.Sequential`"),
    ],
    ids=["typo", "no layers", "illegal", "illegal pattern", "format", "empty", "no weights", "single layer"],
)
def test_mistakes_are_named(model: nn.Module, map: Mapping[str, str], message: str) -> None:
    before = shape_of(model)
    with pytest.raises(ValueError, match=message):
        apply_map(model, map)
    assert shape_of(model) == before


def test_what_a_pattern_cannot_have_is_on_record() -> None:
    with apply_map(Net(), {"*": "fp8"}) as applied:
        assert applied.refused == {
            "attention": "this layer runs in fp32, bf16, fp16",
            "head": "this layer runs in fp32, tf32, bf16, fp16, int8",
        }
        assert set(applied.formats) == {"embedding", "ffn.0", "ffn.2"}
        assert set(applied.uncalled) == {"embedding", "ffn.0", "ffn.2"}


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"`torch.nn.Module`"):
        AppliedMap("model", {"*": "bf16"})  # type: ignore[arg-type]


# ---- under a Trainer ----


class Watched(Full):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.net[0].register_forward_hook(lambda module, args, output: self.seen.append(output.dtype))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_with_the_plugin_evaluates_in_its_map(stage: str, precision: str) -> None:
    base = None if precision == "32-true" else MixedPrecision("bf16-mixed", "cpu")
    plugin = AutoPrecision({"net.0": "bf16"}, base=base)
    module = Watched()
    before = shape_of(module.net)
    trainer = quiet(plugins=[plugin])
    options: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    getattr(trainer, stage)(module, loader(16), **options)
    assert set(module.seen) == {torch.bfloat16}
    assert shape_of(module.net) == before
    module.seen.clear()
    module.net(torch.zeros(1, 8))
    assert module.seen == [torch.float32]


def test_the_map_of_a_prediction_can_be_read_while_it_lasts() -> None:
    maps = []

    class Reads(Watched):
        def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            maps.append(self.trainer.precision_plugin.precision_map())  # type: ignore[attr-defined]
            return super().predict_step(batch, batch_idx)

    quiet(plugins=[AutoPrecision({"*": "bf16"})]).predict(Reads(), loader(16))
    assert maps == [{"net.0": "bf16", "net.2": "bf16"}] * 2


def test_an_exception_in_a_prediction_gives_the_module_back() -> None:
    class Fails(Watched):
        def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            super().predict_step(batch, batch_idx)
            raise ArithmeticError("stop")

    module = Fails().eval()  # Lightning leaves it in that mode
    before = shape_of(module.net)
    with pytest.raises(ArithmeticError):
        quiet(plugins=[AutoPrecision({"*": "bf16"})]).predict(module, loader(16))
    assert shape_of(module.net) == before
    assert not torch.is_autocast_enabled("cpu")


def test_a_map_with_unknown_names_ends_a_prediction_at_once() -> None:
    with pytest.raises(ValueError, match=r"Close to it: .*'net\.0'"):
        quiet(plugins=[AutoPrecision({"nett.0": "bf16"})]).predict(Watched(), loader(16))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_applied_map_holds_in_any_trainer(stage: str) -> None:
    module = Watched()
    options: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    with apply_map(module, {"net.0": "bf16"}):
        getattr(quiet(), stage)(module, loader(16), **options)
    assert set(module.seen) == {torch.bfloat16}


def test_a_model_with_a_map_is_not_steered() -> None:
    module = Watched()
    with (
        apply_map(module, {"net.0": "bf16"}),
        pytest.raises(MisconfigurationException, match=r"Call\s+`.remove\(\)`"),
    ):
        quiet(max_epochs=1, callbacks=[AutoPrecisionCallback(verbose=False)]).fit(module, loader(), loader(16))
    quiet(max_epochs=1, callbacks=[AutoPrecisionCallback(verbose=False)]).fit(module, loader(), loader(16))


def test_after_a_fit_the_plugin_evaluates_in_the_formats_that_it_ended_with() -> None:
    plugin = AutoPrecision({"*": "bf16"}, base=fp16_plugin(), eval_precision="current")
    module, trainer = Watched(), quiet(max_epochs=1, plugins=[plugin])
    trainer.fit(module, loader(), loader(16))
    plugin.steering.knobs.unit_formats.change({"net.0": "fp32"}, 8)  # type: ignore[union-attr]
    module.seen.clear()
    trainer.predict(module, loader(16))
    assert set(module.seen) == {torch.float32}
