"""Second moments of Adam in 16 bits: the bits that are promised, and float32 for everybody but the kernels.

Time budget: 40 s.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, LossScaleConfig, ScriptedController, ops
from autoprec.formats import BF16, FP16
from autoprec.fused import FusedStep
from autoprec.moments import NarrowMoments
from autoprec.ops import registry
from autoprec.ops.prepared import AdamStep
from autoprec.ops.reference_random import random_words, round_stochastic
from autoprec.ops.reference_steps import stream_starts
from autoprec.summary import summarize
from tests.fused_steps import copied, give_gradients, parameters, take
from tests.kernels import assert_same_bits, every_pattern, needs_cpu_kernels
from tests.private_runs import Changing, assert_private_is_the_same, assert_same_runs, run
from tests.resumed import TOTAL, Net, Setup, assert_resumes, assert_same_end
from tests.small_fits import Plain, StatefulLoader, loader, quiet, seed

pytestmark = [
    needs_cpu_kernels,
    # a resumed run has no ModelCheckpoint
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
adamw = partial(AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-6)
both = pytest.mark.parametrize("name", DTYPES)


def narrow_step(optimizer: Optimizer, name: str = "bf16", after: int = 0, index: int = 0) -> FusedStep:
    fused = FusedStep(optimizer)
    fused.moments = NarrowMoments(optimizer, name, after, index)
    return fused


def started(name: str = "bf16", steps: int = 3, **options: Any) -> tuple[list[nn.Parameter], Optimizer, FusedStep]:
    """An optimizer that has taken some steps, the latest on narrow moments."""
    params = parameters()
    optimizer = adamw(params, **options)
    fused = narrow_step(optimizer, name)
    for step in range(steps):
        give_gradients(params, step)
        take(fused, optimizer)
    assert dtypes(optimizer) == {DTYPES[name]}
    return params, optimizer, fused


def moments(optimizer: Optimizer) -> list[Tensor]:
    return [row["exp_avg_sq"] for row in optimizer.state.values()]


def dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    return {moment.dtype for moment in moments(optimizer)}


def assert_all_wide(rows: Any) -> None:
    tensors = [value for row in rows.values() for value in row.values() if isinstance(value, Tensor)]
    assert tensors
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


# ---- bits ----


class Twin:
    """What an optimizer must hold after each step: float32 steps, then the reference's words and rounding."""

    def __init__(self, params: Sequence[nn.Parameter], optimizer: Optimizer, name: str, index: int) -> None:
        self.number_format = {"bf16": BF16, "fp16": FP16}[name]
        self.dtype, self.index = DTYPES[name], index
        self.optimizer = optimizer
        self.values = {id(p): p.detach().clone() for p in params}
        self.rows = {id(p): copy.deepcopy(optimizer.state[p]) for p in params if p in optimizer.state}

    def round(self, value: Tensor, seed: int, offset: int, element: Tensor) -> Tensor:
        words = random_words(seed, offset, element)
        return round_stochastic(value, self.number_format, words, saturate=True)

    def step(self) -> None:
        for place, group in enumerate(self.optimizer.param_groups):
            members = [(at, p) for at, p in enumerate(group["params"]) if p.grad is not None]
            if members:
                self.step_group(place, group, members)

    def step_group(self, place: int, group: Any, members: list[tuple[int, nn.Parameter]]) -> None:
        base = self.index << 48 | place << 32
        rows = [self.rows[id(p)] for _, p in members]
        offset = int(rows[0]["step"])
        for (at, _), row in zip(members, rows, strict=True):
            moment = row["exp_avg_sq"]
            element = torch.arange(moment.numel()).reshape(moment.shape)
            rounded = self.round(moment, 1 << 63 | base | at, int(row["step"]), element)
            row["exp_avg_sq"] = torch.empty_like(moment).copy_(rounded)
        values = [self.values[id(p)] for _, p in members]
        grads = [p.grad for _, p in members if p.grad is not None]
        state = [[row[key] for row in rows] for key in ("exp_avg", "exp_avg_sq", "step")]
        options = {"lr": group["lr"], "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
        ops.fused_adam_(values, grads, *state, **options, weight_decay=group["weight_decay"], decoupled=True)
        for row, start in zip(rows, stream_starts([value.numel() for value in values]), strict=True):
            moment = row["exp_avg_sq"]
            element = torch.empty_like(moment, dtype=torch.int64)
            element.as_strided((moment.numel(),), (1,)).copy_(start + torch.arange(moment.numel()))
            moment.copy_(self.round(moment, base | members[0][0], offset, element))

    def assert_is(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert_same_bits(p.detach(), self.values[id(p)])
                for key, expected in self.rows[id(p)].items():
                    assert_same_bits(optimizer.state[p][key].float(), expected)
                    assert optimizer.state[p][key].stride() == expected.stride()


@both
@pytest.mark.parametrize("index", [0, 3])
def test_each_step_is_the_float32_one_rounded_with_the_words_of_the_reference(name: str, index: int) -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params[:4]}, {"params": params[4:], "lr": 0.1}]
    optimizer = adamw(groups)
    fused = narrow_step(optimizer, name, index=index)
    give_gradients(params, 0)
    optimizer.step()  # makes the moments
    twin = Twin(params, optimizer, name, index)
    for step in range(1, 12):
        give_gradients(params, step, sometimes=True)
        assert take(fused, optimizer)
        twin.step()
        twin.assert_is(optimizer)
    assert dtypes(optimizer) == {DTYPES[name]}


@both
def test_every_value_comes_back_whatever_the_words(name: str) -> None:
    patterns = every_pattern(DTYPES[name])
    finite = patterns[patterns.float().isfinite()]
    param = nn.Parameter(torch.zeros(len(finite)))
    optimizer = AdamW([param], lr=0.0)
    row = {"step": torch.tensor(7.0), "exp_avg": torch.zeros_like(param), "exp_avg_sq": finite.float()}
    optimizer.state[param] = row
    kept = NarrowMoments(optimizer, name)
    group = optimizer.param_groups[0]
    for count in range(7, 10):
        row["step"].fill_(count)
        assert kept.narrow(group, [param], [row["exp_avg"], row["exp_avg_sq"], row["step"]])
        assert_same_bits(row["exp_avg_sq"], finite)
        kept.release()
        assert_same_bits(row["exp_avg_sq"], finite.float())
        kept = NarrowMoments(optimizer, name)


def test_no_words_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []
    step, narrowing = AdamStep.__call__, ops.cast

    def stepping(self: AdamStep, grads: Any, **options: Any) -> None:
        drawn.append((options["seed"], options["offset"]))
        step(self, grads, **options)

    def casting(x: Tensor, name: str, *, seed: int, offset: int) -> Any:
        drawn.append((seed, offset))
        return narrowing(x, name, seed=seed, offset=offset)

    monkeypatch.setattr(AdamStep, "__call__", stepping)
    monkeypatch.setattr("autoprec.moments.cast", casting)
    params = parameters()
    halves = params[:5], params[5:]
    optimizers = [adamw([{"params": half[:2]}, {"params": half[2:]}]) for half in halves]
    fused = [narrow_step(each, index=index) for index, each in enumerate(optimizers)]
    for count in range(12):
        give_gradients(params, count, sometimes=count > 0)
        for each, optimizer in zip(fused, optimizers, strict=True):
            take(each, optimizer)
    assert len(drawn) > len(params) + 30
    assert len(set(drawn)) == len(drawn)


def test_large_moments_saturate_and_small_ones_keep_their_mean() -> None:
    """fp16 ends at 65504 and 6e-8; a gradient of 1e-4 is far below its smallest square."""
    params = [nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(8))]
    optimizer = AdamW(params, lr=0.0, betas=(0.9, 0.9))
    fused = narrow_step(optimizer, "fp16")
    for _ in range(40):
        params[0].grad, params[1].grad = torch.full((20_000,), 1e-4), torch.full((8,), 1e4)
        take(fused, optimizer)
    small, large = (moment.float() for moment in moments(optimizer))
    assert torch.equal(large, torch.full((8,), 65504.0))
    assert set(small.unique().tolist()) == {0.0, 2.0**-24}
    # the share p = 1e-8 * 2**24 of ones is the mean of 20000 draws, each with variance p (1 - p): six deviations
    p = 1e-8 * 2**24
    assert abs(float((small > 0).double().mean()) - p) < 6 * (p * (1 - p) / 20_000) ** 0.5 + p * 0.9**40


# ---- when ----


def test_a_weight_is_narrowed_when_it_has_its_steps_behind_it() -> None:
    params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
    optimizer = adamw(params)
    fused = narrow_step(optimizer, after=4)
    seen = []
    for step in range(9):
        params[0].grad = torch.ones(8)
        params[1].grad = torch.ones(8) if step not in (1, 2) else None
        take(fused, optimizer)
        assert fused.moments is not None
        assert fused.moments.has_stepped == (step >= 4)
        seen.append([moment.dtype is torch.bfloat16 for moment in moments(optimizer)])
    assert seen == [[False, False]] * 4 + [[True, False]] * 2 + [[True, True]] * 3


def test_state_really_shrinks_and_nothing_keeps_what_was_wide() -> None:
    param = nn.Parameter(torch.zeros(1000))
    optimizer = adamw([param])
    fused = narrow_step(optimizer, after=3)

    def bytes_of() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in optimizer.state[param].values())

    for _ in range(3):
        param.grad = torch.ones(1000)
        take(fused, optimizer)
    before, wide = bytes_of(), weakref.ref(optimizer.state[param]["exp_avg_sq"])
    param.grad = torch.ones(1000)
    take(fused, optimizer)
    assert before - bytes_of() == 2 * 1000
    assert wide() is None


# ---- torch's own steps ----


def torchs_twin(optimizer: Any) -> Any:
    """A plain optimizer on weights of its own, with what ``state_dict`` hands out."""
    twin = copy.deepcopy(optimizer)
    twin.state.clear()
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, theirs in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert_same_bits(p.detach(), q.detach())
            q.grad = None if p.grad is None else p.grad.clone()
    return twin


def assert_same_optimizers(left: Any, right: Any) -> None:
    for mine, theirs in zip(left.param_groups, right.param_groups, strict=True):
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert_same_bits(p.detach(), q.detach())
            assert list(left.state[p]) == list(right.state[q])
            for key, value in left.state[p].items():
                assert_same_bits(value, right.state[q][key])


def switch_amsgrad(optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True
    for row in optimizer.state.values():
        row["max_exp_avg_sq"] = row["exp_avg_sq"].float()


def add_double(optimizer: Any) -> None:
    new = nn.Parameter(torch.ones(5, dtype=torch.float64))
    new.grad = torch.ones(5, dtype=torch.float64)
    optimizer.add_param_group({"params": [new]})


@pytest.mark.parametrize("change", [switch_amsgrad, add_double])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_refused_step_is_torchs_own_on_float32(change: Callable[[Any], None], options: dict[str, Any]) -> None:
    params, optimizer, fused = started(**options)
    give_gradients(params, 9)
    change(optimizer)
    twin = torchs_twin(optimizer)
    assert not take(fused, optimizer)
    assert fused.moments is not None
    assert not fused.moments.has_stepped
    twin.step()
    assert_same_optimizers(optimizer, twin)


@pytest.mark.parametrize("way", ["step", "closure", "unplanned"])
def test_a_step_past_the_kernels_is_torchs_own_on_float32(way: str) -> None:
    params, optimizer, fused = started()
    give_gradients(params, 9)
    twin = torchs_twin(optimizer)
    if way == "unplanned":
        with fused.standing_in():
            optimizer.step()
    else:
        optimizer.step(*([lambda: 1.0] if way == "closure" else []))
    twin.step()
    assert_same_optimizers(optimizer, twin)
    give_gradients(params, 10)
    assert take(fused, optimizer)
    assert dtypes(optimizer) == {torch.bfloat16}


def test_groups_that_come_and_go_are_narrow_too() -> None:
    params, optimizer, fused = started()
    new = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [new], "lr": 0.1})
    taken = []
    for step in range(3, 6):
        give_gradients([*params, new], step)
        taken.append(take(fused, optimizer))
    assert taken == [True, True, True]
    assert dtypes(optimizer) == {torch.bfloat16}
    del optimizer.param_groups[0]
    give_gradients([new], 6)
    assert take(fused, optimizer)
    fused.moments.release()  # type: ignore[union-attr]
    assert optimizer.state[new]["exp_avg_sq"].dtype is torch.float32


def test_moments_of_weights_in_bf16_stay_as_torch_makes_them() -> None:
    params = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))]
    optimizer = adamw([{"params": params[:1]}, {"params": params[1:]}])
    fused = narrow_step(optimizer)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        take(fused, optimizer)
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype is torch.bfloat16
    assert optimizer.state_dict()["state"][0]["exp_avg_sq"].dtype is torch.bfloat16
    fused.moments.release()  # type: ignore[union-attr]
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype is torch.bfloat16


# ---- what everybody else gets ----


@both
def test_state_dict_hands_out_float32_and_changes_nothing(name: str) -> None:
    params, optimizer, fused = started(name)
    fused.moments.release()  # type: ignore[union-attr]
    seen: list[torch.dtype] = []
    optimizer.register_state_dict_post_hook(lambda _, found: seen.append(found["state"][0]["exp_avg_sq"].dtype))
    fused.moments = NarrowMoments(optimizer, name)
    give_gradients(params, 3)
    take(fused, optimizer)
    assert dtypes(optimizer) == {DTYPES[name]}
    before = moments(optimizer)
    found = optimizer.state_dict()
    assert_all_wide(found["state"])
    assert all(list(row) == ["step", "exp_avg", "exp_avg_sq"] for row in found["state"].values())
    assert seen == [torch.float32]
    for index, moment in enumerate(moments(optimizer)):
        assert moment is before[index]
        assert_same_bits(found["state"][index]["exp_avg_sq"], moment.float())
        assert found["state"][index]["exp_avg_sq"].stride() == moment.stride()


def test_loading_in_mid_run_goes_on_with_what_was_loaded() -> None:
    runs = []
    for loads in (False, True):
        params, optimizer, fused = started()
        if loads:
            saved = copy.deepcopy(optimizer.state_dict())
            for row in optimizer.state.values():
                row["exp_avg_sq"].fill_(7.0)
            optimizer.load_state_dict(saved)
            assert dtypes(optimizer) == {torch.float32}
        for step in range(3, 6):
            give_gradients(params, step)
            assert take(fused, optimizer)
        assert dtypes(optimizer) == {torch.bfloat16}
        runs.append(optimizer)
    assert_same_optimizers(*runs)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_in_mid_run_are_plain_optimizers_and_do_not_disturb(way: str) -> None:
    made: list[Any] = []
    params, optimizer, fused = started()
    twin_params, twin, fused_twin = started()
    give_gradients(params, 3)
    give_gradients(twin_params, 3)
    assert take(fused, optimizer, lambda: made.append(copied(optimizer, way)))
    assert take(fused_twin, twin)
    made.append(copied(optimizer, way))
    for other in made:
        assert_all_wide(other.state)
        assert not {"_init_group", "__getstate__"} & set(vars(other))
        give_gradients(other.param_groups[0]["params"], 4)
        other.step()
        assert_all_wide(other.state)
    assert dtypes(optimizer) == {torch.bfloat16}
    assert_same_optimizers(optimizer, twin)


def test_release_leaves_the_optimizer_as_torch_would_have_it() -> None:
    params, optimizer, fused = started()
    plain = adamw(parameters())
    plain.step()
    narrow = moments(optimizer)
    fused.moments.release()  # type: ignore[union-attr]
    assert set(vars(optimizer)) == set(vars(plain))
    assert not optimizer._optimizer_state_dict_post_hooks
    assert_all_wide(optimizer.state)
    for found, expected in zip(moments(optimizer), narrow, strict=True):
        assert_same_bits(found, expected.float())
    give_gradients(params, 3)
    optimizer.step()
    assert_all_wide(optimizer.state)


# ---- whole fits ----


class SeesMoments(Callback):
    """Keeps the formats of second moments after each batch."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append({str(d).removeprefix("torch.") for each in trainer.optimizers for d in dtypes(each)})


def config(name: Any = "bf16", **options: Any) -> AutoPrecisionConfig:
    return AutoPrecisionConfig(second_moment=name, **options)


def plain_adamw(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01)


def steps_of(callback: AutoPrecisionCallback | None) -> int:
    assert callback is not None
    assert callback.steering is not None
    return callback.steering.narrow_steps


@pytest.mark.parametrize("after", [0, 5])
def test_a_fit_narrows_when_it_is_told_to_and_leaves_float32(after: int) -> None:
    looks = SeesMoments()
    done = run(Plain(plain_adamw), config=config(second_moment_after=after), callbacks=[looks])
    assert looks.seen == [{"float32"}] * after + [{"bfloat16"}] * (16 - after)
    assert steps_of(done.callback) == 16 - after
    (optimizer,) = done.trainer.optimizers
    assert_all_wide(optimizer.state)
    assert not {"_init_group", "__getstate__"} & set(vars(optimizer))
    assert not optimizer._optimizer_state_dict_post_hooks


@both
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}])
def test_private_steps_have_the_bits_of_those_that_are_seen(name: str, options: dict[str, Any]) -> None:
    private, seen = assert_private_is_the_same(
        partial(Plain, plain_adamw), config=config(name, second_moment_after=2), runs_on_copies=None, **options
    )
    assert steps_of(private.callback) == steps_of(seen.callback) > 0


@both
def test_training_goes_where_it_goes_with_float32(name: str) -> None:
    """A rounding is off by 0.3 of the format's eps on average; 320 of them add up to 18 times that, as a random walk
    does; a root halves it. Weights end that much of their way from where they end with float32.
    """
    ends = []
    for each in ("fp32", name):
        seed()
        module = Plain(partial(AdamW, lr=2e-3))
        start = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
        run(module, policy="fixed:fp32", config=config(each), max_epochs=40)
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]) - start)
    assert not torch.equal(*ends)
    assert float((ends[1] - ends[0]).norm() / ends[0].norm()) < 18 * 0.3 / 2 * torch.finfo(DTYPES[name]).eps


def test_loads_and_copies_in_the_middle_of_a_fit_change_nothing() -> None:
    class Meddles(Callback):
        def __init__(self, is_on: bool) -> None:
            self.is_on = is_on

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            if self.is_on and trainer.global_step in (5, 9):
                copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    runs = []
    for is_on in (False, True):
        seed()
        looks = SeesMoments()
        runs.append(run(Plain(plain_adamw), config=config(), callbacks=[Meddles(is_on), looks]))
        assert looks.seen == [{"bfloat16"}] * 16
    assert_same_runs(*runs)


def test_an_exception_leaves_float32_behind() -> None:
    def stop(module: Any, step: int) -> None:
        if step == 5:
            raise KeyError("stop")

    module = Changing(plain_adamw, stop)
    callback = AutoPrecisionCallback("fixed:bf16", config=config(), verbose=False)
    trainer = quiet(max_epochs=2, callbacks=[callback])
    with pytest.raises(KeyError, match="stop"):
        trainer.fit(module, loader())
    assert steps_of(callback) == 5
    (optimizer,) = trainer.optimizers
    assert_all_wide(optimizer.state)
    assert "_init_group" not in vars(optimizer)


# ---- resume ----


def fixed(name: str = "bf16", after: int = 0) -> AutoPrecisionCallback:
    return AutoPrecisionCallback("fixed:bf16", config=config(name, second_moment_after=after), verbose=False)


@both
@pytest.mark.parametrize("after", [0, 20, 50])
def test_a_resumed_run_has_the_same_bits(name: str, after: int, tmp_path: Path) -> None:
    """Narrowed at once, before the file is written and after it."""
    through = assert_resumes(Setup(partial(fixed, name, after)), tmp_path)
    assert steps_of(through.callback) == TOTAL - after


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("moments")
    Setup(fixed).fit(12, path, save_at=1)
    return path  # type: ignore[return-value]


@pytest.mark.parametrize("step", [1, 2, 3, 11])
def test_a_run_goes_on_from_any_step(step: int, folder: Path, tmp_path: Path) -> None:
    through = Setup(fixed).fit(20, tmp_path)
    assert_same_end(through, Setup(fixed).fit(20, tmp_path, resume=folder / f"step={step}.ckpt"))


def test_checkpoints_hold_float32_and_go_on_without_autoprec(folder: Path, tmp_path: Path) -> None:
    content = torch.load(folder / "step=11.ckpt", weights_only=True)
    (state,) = content["optimizer_states"]
    assert_all_wide(state["state"])
    assert any(not torch.equal(row["exp_avg"], row["exp_avg"].bfloat16().float()) for row in state["state"].values())
    assert all(torch.equal(row["exp_avg_sq"], row["exp_avg_sq"].bfloat16().float()) for row in state["state"].values())
    AdamW(Net().parameters()).load_state_dict(state)
    with pytest.warns(UserWarning, match="AutoPrecisionCallback"):
        result = Setup(lambda: None).fit(15, tmp_path, resume=folder / "step=11.ckpt")
    assert result.trainer.global_step == 15
    assert_all_wide(result.trainer.optimizers[0].state)


def test_a_plain_checkpoint_goes_on_with_narrow_moments(tmp_path: Path) -> None:
    looks = SeesMoments()
    Setup(lambda: None).fit(8, tmp_path, save_at=8)
    with pytest.warns(UserWarning, match="no autoprec state"):
        result = Setup(partial(fixed, after=10), others=[lambda: looks]).fit(
            14, tmp_path, resume=tmp_path / "step=8.ckpt"
        )
    assert looks.seen == [{"float32"}] * 2 + [{"bfloat16"}] * 4, "steps are those of the optimizer, not of this run"
    assert steps_of(result.callback) == 4


class Two(Net):
    """Two optimizers under manual optimization, of which one steps every other time, a group each for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        if batch_idx % 2 == 0:  # checkpoints do not hold gradients
            self.zero_grad()
        for optimizer in optimizers[: 1 + batch_idx % 2]:
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.net[0].parameters()},
            {"params": self.net[1].parameters(), "lr": 1e-3},
        ]
        return [Adam(groups, lr=1e-2), AdamW(self.net[3:].parameters(), lr=1e-2)], []


def fp16_units() -> AutoPrecisionCallback:
    """Some steps are skipped: the loss scale begins too high, and the data have spikes."""
    start = {0: Action(precision={"*": "fp16"})}
    scale = LossScaleConfig(init_scale=2.0**18, growth_interval=6)
    options = config(loss_scale=scale, formats=("fp32", "fp16"))
    return AutoPrecisionCallback(ScriptedController(steps=start), config=options, verbose=False)


def spiked() -> StatefulLoader:
    return StatefulLoader(spikes=[5, 20, 55])


@pytest.mark.filterwarnings("ignore:autoprec. 3 steps in a row:UserWarning")
@pytest.mark.parametrize(
    ("module", "options", "stop"), [(Net, {}, 38), (Net, {"accumulate_grad_batches": 2}, 38), (Two, {}, 39)]
)
def test_skipped_steps_lose_nothing(module: Any, options: dict[str, Any], stop: int, tmp_path: Path) -> None:
    through = assert_resumes(Setup(fp16_units, module, spiked, options), tmp_path, stop)
    assert through.callback is not None
    assert through.callback.skipped_steps > 1
    assert steps_of(through.callback) > 20


@pytest.mark.parametrize("looks_on", [False, True])
def test_a_skipped_step_leaves_moments_as_they_are(looks_on: bool) -> None:
    class Poisons(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 4 else loss

    class Keeps(Callback):
        def __init__(self) -> None:
            self.kept: list[list[Tensor]] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.kept.append([moment.clone() for moment in moments(trainer.optimizers[0])])

    keeps = Keeps()
    done = run(
        Poisons(plain_adamw), config=config(second_moment_after=4), callbacks=[keeps], max_epochs=1, looks_on=looks_on
    )
    assert done.callback.skipped_steps == 1
    before, skipped, after = keeps.kept[3:6]
    for left, right in zip(before, skipped, strict=True):
        assert_same_bits(left, right)
    assert {moment.dtype for moment in after} == {torch.bfloat16}


# ---- what is said ----


def said(optimizer: Callable[[Any], Any], **options: Any) -> tuple[str, list[str]]:
    """The table, and warnings about the setting."""
    knobs = options.pop("knobs", ("precision",))
    with pytest.warns(UserWarning, match="second_moment") as warned:
        done = run(Plain(optimizer), config=config(**options), ap={"knobs": knobs}, max_epochs=1)
    assert done.callback.steering is not None
    return summarize(done.callback.steering, "p"), [str(w.message) for w in warned if "second_moment" in str(w.message)]


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (plain_adamw, {"fused_step": False}, "`fused_step=False` leaves every step to the optimizer"),
        (plain_adamw, {"knobs": ("loss_scale",)}, "it is not in `knobs`"),
        (partial(SGD, lr=0.1), {}, "`SGD` is not torch's own Adam or AdamW"),
        (partial(AdamW, amsgrad=True), {}, "`AdamW` has `amsgrad=True`, with which it takes its steps itself"),
    ],
)
def test_it_is_told_once_where_moments_stay_wide(optimizer: Any, options: dict[str, Any], reason: str) -> None:
    table, warned = said(optimizer, **options)
    assert len(warned) == 1
    assert "Passed `AutoPrecisionConfig(second_moment='bf16')`. All second moments stay in float32" in warned[0]
    assert reason in warned[0]
    assert f"moments    all second moments stayed in fp32: {warned[0].split('float32: ')[1][:-1]}" in table


def test_without_kernels_it_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "chosen", lambda: "reference")
    table, (warned,) = said(plain_adamw)
    assert "steps on `cpu` are taken by eager PyTorch" in warned
    assert "all second moments stayed in fp32" in table


def test_a_changed_step_is_told_as_well() -> None:
    def changed(params: Any) -> Any:
        optimizer: Any = AdamW(params)
        optimizer._init_group = optimizer._init_group
        return optimizer

    assert "the step of `AdamW` was changed by other code" in said(changed)[0]


@pytest.mark.filterwarnings("ignore:Passed `AutoPrecisionConfig:UserWarning")
def test_one_of_two_optimizers_is_told_apart() -> None:
    class Half(Two):
        def configure_optimizers(self) -> Any:
            return [Adam(self.net[:3].parameters()), SGD(self.net[3:].parameters(), lr=0.1)], []

    done = run(Half(), config=config(), max_epochs=1, validates=True)
    assert done.callback.steering is not None
    text = summarize(done.callback.steering, "p")
    assert "some second moments stayed in fp32: `SGD` is not torch's own Adam or AdamW" in text
    assert steps_of(done.callback) == 8


def test_the_table_counts_steps() -> None:
    done = run(Plain(plain_adamw), config=config(second_moment_after=6))
    assert done.callback.steering is not None
    text = summarize(done.callback.steering, "p")
    assert "took 16 optimizer steps, 10 of them with second moments in bf16" in text
    assert "stayed in fp32" not in text


def test_a_switch_that_never_came_is_told() -> None:
    done = run(Plain(plain_adamw), config=config(second_moment_after=500))
    assert done.callback.steering is not None
    expected = "all second moments stayed in fp32: no kernel took a step of a weight with 500 steps behind it"
    assert expected in summarize(done.callback.steering, "p")
