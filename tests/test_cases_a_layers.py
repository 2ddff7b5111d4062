"""Cases A-07 to A-12 and A-18: layers and operations that do not take every format, shared weights, live parameters.

Time budget: 40 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from autoprec import Action, AutoPrecisionCallback, NonFiniteTrainingError
from tests.support import (
    Ask,
    Manual,
    Task,
    Watch,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    loader,
    rows,
    scripted,
    sgd,
    squares,
    state_of,
    watch_dtypes,
    weights_of,
)

EVERYTHING = {name: Action(precision={"*": name}) for name in ("fp32", "bf16", "fp16", "int8")}


def raised(ap: AutoPrecisionCallback) -> dict[str | None, str]:
    """Units that the guard moved to fp32, with the reason."""
    return {d.unit: d.reason for d in rows(ap.history, "precision", "applied") if d.reason.startswith("guard")}


# ---- masks ----

ROWS = 16


class Masked(nn.Module):
    """Scores of a small attention, masked in some way, between ordinary layers."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.scores, self.last = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 1)
        self.mask = mask

    def forward(self, x: Tensor) -> Any:
        return self.last(self.mask(self.scores(self.first(x))).softmax(-1))


def diagonal(scores: Tensor) -> Tensor:
    return torch.eye(scores.shape[0], scores.shape[1], dtype=torch.bool)


def masked_fill(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scores: scores.masked_fill(diagonal(scores), value)


def masked_fill_in_place(scores: Tensor) -> Tensor:
    scores = scores * 1.0
    return scores.masked_fill_(diagonal(scores), -1e9)


def index_assignment(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[diagonal(scores)] = -1e9
    return scores


def where(scores: Tensor) -> Tensor:
    return torch.where(diagonal(scores), torch.full_like(scores, -1e9), scores)


def additive(scores: Tensor) -> Tensor:
    return scores + diagonal(scores) * -1e9


def clamped_min(scores: Tensor) -> Tensor:
    return scores.clamp(min=-1e9)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": masked_fill(-1e9),
    "fp32_min": masked_fill(torch.finfo(torch.float32).min),
    "in_place": masked_fill_in_place,
    "index_assignment": index_assignment,
    "where": where,
    "additive": additive,
    "clamp": clamped_min,
    "minus_infinity": masked_fill(-math.inf),
}


def masked_task(mask: Callable[[Tensor], Tensor], **kwargs: Any) -> Task:
    return Task(Masked(mask), torch.rand(4 * ROWS, 4), ROWS, **kwargs)


def test_a07_mask_constant_raises_only_the_layer_before_it() -> None:
    ap, task = scripted({0: EVERYTHING["fp16"]}), masked_task(masked_fill(-1e9))
    seen, before = watch_dtypes(task), weights_of(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.first": "fp16", "net.scores": "fp32", "net.last": "fp16"}
    (unit,), (reason,) = zip(*raised(ap).items(), strict=True)
    assert unit == "net.scores"
    assert "masked_fill" in reason
    assert seen["net.scores"][-1] is torch.float32
    assert seen["net.first"][-1] is torch.float16
    assert ap.applied_steps == 4
    assert not any(map(torch.equal, weights_of(task)[:1], before[:1]))
    assert_finite(task)


@pytest.mark.parametrize("mask", list(MASKS))
def test_a07_every_way_to_mask_trains_in_fp16(mask: str) -> None:
    ap, task = scripted({0: EVERYTHING["fp16"]}), masked_task(MASKS[mask])
    watch, before = Watch(ap), weights_of(task)
    cpu(callbacks=[ap, watch]).fit(task)
    assert all(map(math.isfinite, watch.losses))
    assert_finite(task)
    assert not any(map(torch.equal, weights_of(task)[:2], before[:2]))
    # whatever was raised has a reason, and the first layer is never to blame
    assert ap.precision_map()["net.first"] == "fp16"
    assert all(raised(ap).values())


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "fp32_min"])  # beyond the largest bf16
def test_a07_bf16_needs_no_help(mask: str) -> None:
    ap, task = scripted({0: EVERYTHING["bf16"]}), masked_task(MASKS[mask])
    cpu(callbacks=[ap]).fit(task)
    assert set(ap.precision_map().values()) == {"bf16"}
    assert ap.skipped_steps == 0
    assert_finite(task)


def test_a07_first_window_computes_what_fp32_would() -> None:
    """The constant is not limited to the range of fp16 where that would change the result."""
    losses = []
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        ap, task = scripted({0: EVERYTHING[name]}), masked_task(masked_fill(-1e9))
        watch = Watch(ap)
        cpu(callbacks=[ap, watch]).fit(task)
        losses.append(watch.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a07_fp16_from_the_trainer_is_helped_as_well() -> None:
    ap, task = scripted(), masked_task(masked_fill(-1e9))
    cpu(plugins=fp16cpu(128), callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.first": "fp16", "net.scores": "fp32", "net.last": "fp16"}
    assert ap.applied_steps == 4


def test_a07_refused_format_stays_refused() -> None:
    """The policy may ask again and again: it costs a line in the record each time, and never the run."""
    again = {window: Action(precision={"net.scores": "fp16"}) for window in range(4)}
    ap, task = scripted({**again, 0: EVERYTHING["fp16"]}), masked_task(masked_fill(-1e9))
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map()["net.scores"] == "fp32"
    refused = rows(ap.history, "precision", "refused")
    assert [d.step for d in refused] == [1, 2, 3]
    assert all("holds" in d.reason for d in refused)


def late(scores: Tensor, calls: list[int]) -> Tensor:
    """Masks only in the third batch, as a batch without padding does not."""
    calls.append(1)
    return scores.masked_fill(diagonal(scores), -1e9) if len(calls) > 2 else scores


def test_a07_branch_that_the_first_window_did_not_take() -> None:
    """A mask that appears later must not end the run either."""
    ap, task = scripted({0: EVERYTHING["fp16"]}), masked_task(functools.partial(late, calls=[]))
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map()["net.scores"] == "fp32"
    assert ap.applied_steps == 4
    assert_finite(task)


class LateMask(nn.Module):
    """The same behind a layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scores, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Any:
        return self.last(late(self.scores(self.norm(self.first(x))), self.calls).softmax(-1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a07_repeated_step_writes_statistics_once(accumulate: int) -> None:
    """The fifth batch is the first of a window, the sixth would be its second."""
    results = []
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        task = Task(LateMask(), torch.rand(6 * ROWS, 4), ROWS)
        ap = scripted({0: EVERYTHING[name]})
        cpu(callbacks=[ap], accumulate_grad_batches=accumulate).fit(task)
        assert ap.applied_steps == 6 // accumulate
        results.append(state_of(task))
    assert int(results[1]["net.norm.num_batches_tracked"]) == 6
    for key in ("net.norm.running_mean", "net.norm.running_var"):
        torch.testing.assert_close(results[1][key], results[0][key], rtol=1e-2, atol=1e-2)


class SecondFails(LightningModule):
    """The first optimizer has stepped when the second net meets its mask, in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), Masked(functools.partial(late, calls=[]))
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for net, optimizer in zip((self.a, self.b), optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(net(batch).float().mean())
            optimizer.step()
            self.steps += net is self.a

    def configure_optimizers(self) -> Any:
        return sgd(self.a.parameters()), sgd(self.b.parameters())

    def train_dataloader(self) -> Any:
        return loader(torch.ones(4 * ROWS, 4), ROWS)


def test_a07_step_that_has_taken_effect_is_not_repeated() -> None:
    """It cannot be: the first optimizer would step twice. The user's own error tells what is wrong."""
    task = SecondFails()
    before = weights_of(task.a)[0]
    with pytest.raises(RuntimeError, match="without overflow"):
        cpu(callbacks=[scripted({0: EVERYTHING["fp16"]})]).fit(task)
    assert task.steps == 3
    torch.testing.assert_close(weights_of(task.a)[0], before - 3 * 0.1, rtol=1e-3, atol=1e-3)


def fully_masked(scores: Tensor) -> Tensor:
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[0] = True
    return scores.masked_fill(mask, -math.inf)


@pytest.mark.parametrize("name", list(EVERYTHING))
def test_a07_fully_masked_row_does_not_go_unnoticed(name: str) -> None:
    """Its softmax is NaN in every format: each step is skipped and counted, and the weights stay."""
    ap, task = scripted({0: EVERYTHING[name]}), masked_task(fully_masked)
    before = weights_of(task)
    with pytest.warns(UserWarning, match="(?i)no step was applied"):
        cpu(callbacks=[ap]).fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (4, 0)
    assert all(map(torch.equal, weights_of(task), before))


def test_a07_fully_masked_rows_end_the_run_in_the_end() -> None:
    ap, task = scripted({0: EVERYTHING["fp16"]}), masked_task(fully_masked)
    with pytest.raises(NonFiniteTrainingError) as caught:
        cpu(callbacks=[ap], max_epochs=100).fit(task)
    assert ap.skipped_steps <= 40
    assert "net.last" in str(caught.value)
    assert "from the operations before it" in str(caught.value)


def test_a07_attention_of_torch_with_a_large_mask() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)
            return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask))

    for name in ("bf16", "fp16"):
        ap, task = scripted({0: EVERYTHING[name]}), Task(Attention(), torch.rand(32, 4, 4))
        cpu(callbacks=[ap]).fit(task)
        assert ap.applied_steps == 4
        assert ap.skipped_steps == 0
        assert_finite(task)


# ---- activation checkpointing ----


class Checkpointed(nn.Module):
    """Two linear layers, recomputed in the backward."""

    def __init__(self, use_reentrant: bool, body: nn.Module | None = None, times: int = 1) -> None:
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.use_reentrant = use_reentrant
        self.times = times

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()  # the reentrant form needs it
        for _ in range(self.times):
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return x


def checkpointed(use_reentrant: bool, ask: tuple[str, int, Action] | None, start: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    net = Checkpointed(use_reentrant, **kwargs)
    task = Task(net, torch.rand(24, 16))
    ap = scripted({0: Action(precision={"*": start})}, knobs=("precision",))
    asks = [] if ask is None else [Ask(ap, *ask)]
    watch, seen = Watch(ap), watch_dtypes(task)
    cpu(callbacks=[ap, *asks, watch]).fit(task)
    return ap, watch, seen


LAYER = "net.body.0"
TARGETS = [("bf16", "fp16"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "int8"), ("int8", "fp8")]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("start", "target"), TARGETS)
def test_a08_precision_requested_before_the_backward_waits(use_reentrant: bool, start: str, target: str) -> None:
    ask = ("on_before_backward", 1, Action(precision={LAYER: target}))
    ap, watch, seen = checkpointed(use_reentrant, ask, start)
    _, expected, _ = checkpointed(use_reentrant, None, start)
    for window in (0, 1):
        assert all(map(torch.equal, watch.gradients[window], expected.gradients[window]))
    assert not all(map(torch.equal, watch.gradients[2], expected.gradients[2]))
    assert [(d.step, d.outcome) for d in rows(ap.history, "precision") if d.requested == target] == [
        (1, "deferred"),
        (2, "applied"),
    ]
    # forward and recomputation of each of the three batches
    assert len(seen[LAYER]) == 6
    assert seen[LAYER][0::2] == seen[LAYER][1::2]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp8", "int8"])
def test_a08_recomputation_changes_nothing(use_reentrant: bool, name: str) -> None:
    """Gradients equal those of the same layers without checkpointing, bit for bit."""
    _, watch, seen = checkpointed(use_reentrant, None, name)
    torch.manual_seed(0)
    plain = Task(Checkpointed(use_reentrant).body, torch.rand(24, 16))
    ap = scripted({0: Action(precision={"*": name})}, knobs=("precision",))
    expected = Watch(ap)
    cpu(callbacks=[ap, expected]).fit(plain)
    assert len(watch.gradients) == 3
    for ours, theirs in zip(watch.gradients, expected.gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_mixed_formats_and_operations_between_them(use_reentrant: bool) -> None:
    """What runs between units takes the precision of the unit before it, in the recomputation as in the forward."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            y = torch.matmul(y, y.transpose(0, 1)) @ x
            return self.c(self.norm(self.b(y) + x))

    ask = ("on_before_backward", 1, Action(precision={"net.body.b": "fp32", "net.body.a": "bf16"}))
    results = []
    for asked in (ask, None):
        torch.manual_seed(0)
        task = Task(Checkpointed(use_reentrant, Between(), times=2), torch.rand(24, 16))
        mixed = {"net.body.a": "fp16", "net.body.b": "bf16", "net.body.c": "int8"}
        ap = scripted({0: Action(precision=mixed)}, knobs=("precision",))
        watch = Watch(ap)
        cpu(callbacks=[ap, watch] + ([Ask(ap, *asked)] if asked else [])).fit(task)
        assert (ap.applied_steps, ap.skipped_steps) == (3, 0)
        results.append(watch.gradients)
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a08_every_base_precision(use_reentrant: bool, precision: Any) -> None:
    torch.manual_seed(0)
    ap, task = scripted(), Task(Checkpointed(use_reentrant), torch.rand(24, 16))
    ask = Ask(ap, "on_before_backward", 1, Action(precision={LAYER: "fp16"}))
    seen = watch_dtypes(task)
    cpu(precision=precision, callbacks=[ap, ask]).fit(task)
    assert ap.applied_steps == 3
    assert seen[LAYER][0::2] == seen[LAYER][1::2]
    assert seen[LAYER][-1] is torch.float16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_dropout_is_drawn_alike_in_the_recomputation(use_reentrant: bool) -> None:
    results = []
    for wrap in (True, False):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
        net: nn.Module = Checkpointed(use_reentrant, body) if wrap else body
        task = Task(net, torch.rand(24, 16))
        ap = scripted({0: EVERYTHING["bf16"]}, knobs=("precision",))
        watch = Watch(ap)
        torch.manual_seed(1)
        cpu(callbacks=[ap, watch]).fit(task)
        results.append(watch.gradients)
    for ours, theirs in zip(*results, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_manual_optimization(use_reentrant: bool) -> None:
    results = []
    for is_asking in (True, False):
        torch.manual_seed(0)
        task = Manual(Checkpointed(use_reentrant), torch.rand(24, 16))
        ap = scripted({0: EVERYTHING["bf16"]}, knobs=("precision",))
        asks = [Ask(ap, "on_before_backward", 1, Action(precision={LAYER: "fp16"}))] if is_asking else []
        watch = Watch(ap)
        cpu(callbacks=[ap, *asks, watch]).fit(task)
        results.append(watch.gradients)
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, results[0][2], results[1][2]))


def test_a08_recomputation_is_not_counted_as_a_forward() -> None:
    """An overflow in the recomputation would be reported twice, and buffers written twice."""
    body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    task = Task(Checkpointed(False, body), torch.rand(24, 16) * 1e5)
    ap = scripted({0: EVERYTHING["fp16"]})
    cpu(callbacks=[ap], max_epochs=2).fit(task)
    assert ap.steering is not None
    assert ap.steering.overflows.get(LAYER) == 1
    assert ap.precision_map()[LAYER] == "fp32"
    assert_finite(task)


# ---- tied weights ----


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.body(self.emb(ids)))


def next_token(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    logits = net(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def tied_task(**kwargs: Any) -> Task:
    return Task(TiedModel(), torch.randint(0, 16, (32, 5)), loss=next_token, **kwargs)


def test_a09_contradicting_request_goes_to_the_widest() -> None:
    ap, task = scripted({0: Action(precision={"net.head": "int8", "net.emb": "fp32"})}), tied_task()
    net: Any = task.net
    keys, before = list(task.state_dict()), net.emb.weight
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert list(ap.precision_map()) == ["net.emb", "net.body"]
    assert ap.precision_map()["net.emb"] == "fp32"
    assert net.head.weight is net.emb.weight is before
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert sum(p is before for p in held) == 1
    assert list(task.state_dict()) == keys
    decision = ap.history.last("precision", "net.emb")
    assert decision is not None
    assert (decision.outcome, decision.applied) == ("limited", "fp32")
    assert "net.head" in decision.reason
    assert "net.emb" in decision.reason


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"net.head": "bf16"}, "bf16"),
        ({"net.emb": "int8"}, "int8"),
        ({"net.head": "bf16", "net.emb": "bf16"}, "bf16"),
        ({"net.emb": "fp16", "net.head": "bf16"}, "bf16"),
        ({"net.head": "int8", "net.emb": "fp16"}, "fp16"),
        ({"*": "int8", "net.head": "bf16"}, "bf16"),
        ({"net.*": "fp16"}, "fp16"),
    ],
)
def test_a09_both_layers_run_in_the_format_of_their_unit(request_: dict[str, str], expected: str) -> None:
    ap, task = scripted({0: Action(precision=request_)}), tied_task()
    seen = watch_dtypes(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map()["net.emb"] == expected
    assert seen["net.emb"][-1] is seen["net.head"][-1]
    net: Any = task.net
    assert net.head.weight is net.emb.weight
    assert ap.applied_steps == 4


def test_a09_contradiction_between_windows_is_a_change_of_the_group() -> None:
    """What was asked for the one layer earlier is replaced by what is asked for the other one later."""
    script = {0: Action(precision={"net.head": "bf16"}), 2: Action(precision={"net.emb": "fp32"})}
    ap, task = scripted(script), tied_task()
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    assert [m["net.emb"] for m in watch.maps] == ["bf16", "bf16", "fp32", "fp32"]


def test_a09_contradiction_in_a_deferred_request() -> None:
    ap, task = scripted({0: EVERYTHING["bf16"]}), tied_task()
    ask = Ask(ap, "on_before_backward", 0, Action(precision={"net.head": "int8", "net.emb": "fp16"}))
    cpu(callbacks=[ap, ask]).fit(task)
    assert ap.precision_map()["net.emb"] == "fp16"
    decision = ap.history.last("precision", "net.emb")
    assert decision is not None
    assert decision.applied == "fp16"
    assert any("share weights" in d.reason for d in rows(ap.history, "precision"))


def test_a09_gradients_of_both_uses_arrive() -> None:
    """The tied weight's gradient in bf16 is that of fp32 up to rounding."""
    results = []
    for name in ("fp32", "bf16"):
        torch.manual_seed(0)
        ap, task = scripted({0: EVERYTHING[name]}), tied_task()
        watch = Watch(ap)
        cpu(callbacks=[ap, watch]).fit(task)
        results.append(watch.gradients[0][0])
    assert F.cosine_similarity(results[0].flatten(), results[1].flatten(), dim=0) > 0.999


class SharedLayers(nn.Module):
    """One module under two names, and three layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(8, 8)
        self.c, self.d, self.e = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.d.weight = self.e.weight = self.c.weight

    def forward(self, x: Tensor) -> Any:
        return self.e(self.d(self.c(self.b(self.a(x)))))


def test_a09_shared_modules_and_ties_of_three() -> None:
    ap = scripted({0: Action(precision={"net.c": "int8", "net.e": "bf16", "net.a": "bf16"})})
    task = Task(SharedLayers(), torch.rand(32, 8))
    seen, keys = watch_dtypes(task), list(task.state_dict())
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.a": "bf16", "net.c": "bf16"}
    assert {dtype for dtypes in seen.values() for dtype in dtypes} == {torch.bfloat16}
    net: Any = task.net
    assert net.c.weight is net.d.weight is net.e.weight
    assert net.a is net.b
    assert list(task.state_dict()) == keys


# ---- live parameters ----


class Foreign(Optimizer):
    """An optimizer the project has never seen; it insists on what optimizers may rely on."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._update(parameter, group["lr"])
        return loss

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        assert parameter.dtype is gradient.dtype is torch.float32
        assert parameter.data_ptr() == self.state[parameter].setdefault("address", parameter.data_ptr())
        moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
        assert moment.dtype is parameter.dtype
        moment.lerp_(gradient, 0.1)
        parameter.sub_(lr * torch.sign(moment) * moment.abs().sqrt())


class Sharp(Foreign):
    """Sharpness-aware: it moves the weights before its closure is evaluated a second time."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        steps = [0.05 * p.grad.sign() for p in parameters]
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.add_(step)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.sub_(step)
                self._update(parameter, 0.01)
        return loss


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": sgd,
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "foreign": Foreign,
    "sharpness_aware": Sharp,
}


class Dtypes(Callback):
    """Collects the dtypes that a user can see, and the identities of parameters."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.identities: set[tuple[int, ...]] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.dtypes |= {p.grad.dtype for p in pl_module.parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.dtypes |= {p.dtype for p in pl_module.parameters()}
        self.identities.add(tuple(map(id, pl_module.parameters())))
        for state in trainer.optimizers[0].state.values():
            self.dtypes |= {v.dtype for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("lower", ["bf16", "int8"])
def test_a10_parameters_gradients_and_moments_stay_fp32(name: str, lower: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    task = Task(net, torch.rand(72, 16), optimizer=OPTIMIZERS[name])
    script = {3: Action(precision={"net.0": lower}), 6: Action(precision={"net.0": "fp32"})}
    ap, look = scripted(script), Dtypes()
    seen, identity = watch_dtypes(task), tuple(map(id, task.parameters()))
    watch = Watch(ap)
    cpu(callbacks=[ap, look, watch]).fit(task)
    assert look.dtypes == {torch.float32}
    assert look.identities == {identity}
    assert torch.bfloat16 in seen["net.0"]
    assert [m["net.0"] for m in watch.maps] == ["fp32"] * 3 + [lower] * 3 + ["fp32"] * 3
    assert (ap.applied_steps, ap.skipped_steps) == (9, 0)
    assert watch.losses[-1] < watch.losses[0]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a10_precision_changes_the_compute_only(name: str) -> None:
    """A map of fp32 for every layer trains bit for bit as the plain Trainer does."""
    results = []
    for callbacks in ([], [scripted({0: EVERYTHING["fp32"], 3: EVERYTHING["fp32"]}, knobs=("precision",))]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        task = Task(net, torch.rand(48, 4), optimizer=OPTIMIZERS[name])
        cpu(callbacks=callbacks).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("bad_call", [2, 3])
def test_a10_no_optimizer_takes_a_non_finite_gradient(name: str, bad_call: int) -> None:
    """``bad_call`` counts evaluations of the loss: a sharpness-aware optimizer has two in each step."""
    calls: list[int] = []

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        calls.append(1)
        return squares(net, batch, index) * (math.nan if len(calls) - 1 == bad_call else 1.0)

    task = Task(nn.Linear(4, 1), torch.rand(40, 4), loss=loss, optimizer=OPTIMIZERS[name])
    ap = scripted()
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 4)
    skipped = bad_call // 2 if name == "sharpness_aware" else bad_call
    assert all(map(torch.equal, watch.weights[skipped], watch.weights[skipped - 1]))
    assert_finite(task)


def test_a10_parameter_group_added_in_mid_run() -> None:
    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.01})

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    task = Task(net, torch.rand(48, 4), optimizer=lambda p: torch.optim.AdamW(list(p)[2:], lr=0.01))
    before = weights_of(task)
    ap, look = scripted({1: EVERYTHING["bf16"]}), Dtypes()
    cpu(callbacks=[ap, Unfreeze(), look]).fit(task)
    assert look.dtypes == {torch.float32}
    assert not any(map(torch.equal, weights_of(task), before))
    assert ap.applied_steps == 6


# ---- recurrent layers ----


class Carried(nn.Module):
    """Keeps its hidden state from batch to batch."""

    def __init__(self, rnn: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 1)
        self.hidden: Any = None
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Any:
        output, hidden = self.rnn(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden) if isinstance(hidden, tuple) else hidden.detach()
        first = hidden[0] if isinstance(hidden, tuple) else hidden
        self.dtypes.append(first.dtype)
        return self.head(output)


class CarriedCell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.rnn, self.head = cell, nn.Linear(4, 1)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Any:
        for step in range(x.shape[1]):
            self.hidden = self.rnn(x[:, step], self.hidden)
        self.hidden = tuple(h.detach() for h in self.hidden) if isinstance(self.hidden, tuple) else self.hidden.detach()
        output = self.rnn(x[:, 0], self.hidden)
        return self.head(output[0] if isinstance(output, tuple) else output)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Carried(nn.LSTM(4, 4, batch_first=True)),
    "gru": lambda: Carried(nn.GRU(4, 4, batch_first=True)),
    "rnn": lambda: Carried(nn.RNN(4, 4, batch_first=True, nonlinearity="relu")),
    "deep_bidirectional_lstm": lambda: Carried(nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True, dropout=0.1), 8),
    "projected_lstm": lambda: Carried(nn.LSTM(4, 4, batch_first=True, proj_size=2), 2),
    "lstm_cell": lambda: CarriedCell(nn.LSTMCell(4, 4)),
    "gru_cell": lambda: CarriedCell(nn.GRUCell(4, 4)),
    "rnn_cell": lambda: CarriedCell(nn.RNNCell(4, 4)),
}

SWITCHES = {1: "fp16", 3: "bf16", 5: "fp32"}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", list(RECURRENT))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a11_recurrent_layer_survives_every_switch(name: str, precision: Any) -> None:
    task = Task(RECURRENT[name](), torch.rand(64, 3, 4))
    ap = scripted({at: Action(precision={"net.rnn": format_}) for at, format_ in SWITCHES.items()})
    watch, before = Watch(ap), weights_of(task)
    cpu(precision=precision, callbacks=[ap, watch]).fit(task)
    assert list(ap.precision_map()) == ["net.rnn", "net.head"]  # one unit, whatever the number of its weights
    expected = ["fp16", "fp16", "bf16", "bf16", "fp32", "fp32", "fp32"]
    assert [m["net.rnn"] for m in watch.maps[1:]] == expected
    assert (ap.applied_steps, ap.skipped_steps) == (8, 0)
    assert all(map(math.isfinite, watch.losses))
    assert not any(map(torch.equal, weights_of(task), before))


def test_a11_every_switch_of_all_layers_at_once() -> None:
    """The layers around it change as well, so that inputs and carried state come in every dtype."""
    net = nn.Sequential(nn.Linear(4, 4), Carried(nn.LSTM(4, 4, batch_first=True)))
    order = ["bf16", "fp16", "int8", "fp32", "bf16", "int8", "fp16", "fp32"]
    ap, task = scripted({i: Action(precision={"*": f}) for i, f in enumerate(order)}), Task(net, torch.rand(64, 3, 4))
    cpu(callbacks=[ap]).fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (8, 0)
    assert_finite(task)


@pytest.mark.parametrize("name", ["fp8", "int8", "tf32"])
def test_a11_format_that_it_cannot_run_in_is_refused_beforehand(name: str) -> None:
    ap, task = scripted({1: Action(precision={"net.rnn": name})}), Task(RECURRENT["lstm"](), torch.rand(32, 3, 4))
    cpu(callbacks=[ap]).fit(task)
    (decision,) = ap.history
    assert (decision.outcome, decision.unit, decision.applied) == ("refused", "net.rnn", "fp32")
    assert "cannot run in" in decision.reason
    assert ap.applied_steps == 4


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a11_packed_sequences(name: str) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            lengths = torch.tensor([3, 2, 2, 1, 1, 1, 1, 1])
            packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)
            output, (hidden, _) = self.rnn(packed)
            return self.head(hidden[0]) + output.data.float().mean()

    ap, task = scripted({0: EVERYTHING[name]}), Task(Packed(), torch.rand(32, 3, 4))
    before = weights_of(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == dict.fromkeys(("net.embed", "net.rnn", "net.head"), name)
    assert ap.applied_steps == 4
    assert not any(map(torch.equal, weights_of(task), before))


def test_a11_fp32_map_equals_the_plain_run() -> None:
    results = []
    for callbacks in ([], [scripted({0: EVERYTHING["fp32"]}, knobs=("precision",))]):
        torch.manual_seed(0)
        task = Task(RECURRENT["lstm"](), torch.rand(64, 3, 4))
        cpu(callbacks=callbacks).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


# ---- operations without a half version ----


class Spectral(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(width, 1)
        self.operation = operation

    def forward(self, x: Tensor) -> Any:
        return self.last(self.operation(self.first(x)))


class Scattered(nn.Module):
    """Writes activations into a preallocated float32 buffer."""

    buffer: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.write = write
        self.register_buffer("buffer", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.write(self.buffer.clone(), self.first(x)))


class OwnFunction(torch.autograd.Function):
    """A user's operation that was only ever written for float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def gram(x: Tensor) -> Tensor:
    return x.transpose(0, 1) @ x + torch.eye(8)


def index_put(buffer: Tensor, y: Tensor) -> Tensor:
    buffer[torch.arange(8)] = y
    return buffer


def index_add(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.index_add_(0, torch.arange(8), y)


def index_copy(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.index_copy(0, torch.arange(8), y)


def scatter(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.scatter(0, torch.arange(8).unsqueeze(1).expand(8, 8), y)


def scatter_add(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.scatter_add_(0, torch.arange(8).unsqueeze(1).expand(8, 8), y)


def masked_scatter(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.masked_scatter_(torch.ones(8, 8, dtype=torch.bool), y)


def slice_assignment(buffer: Tensor, y: Tensor) -> Tensor:
    buffer[:, :] = y
    return buffer


SPECTRAL: dict[str, Callable[[], nn.Module]] = {
    "rfft": lambda: Spectral(lambda x: torch.fft.rfft(x).abs(), 5),
    "fft2": lambda: Spectral(lambda x: torch.fft.fft2(x).real),
    "eigh": lambda: Spectral(lambda x: torch.linalg.eigvalsh(gram(x)).expand(8, 8)),
    "solve": lambda: Spectral(lambda x: torch.linalg.solve(gram(x), x.transpose(0, 1)).transpose(0, 1)),
    "inverse": lambda: Spectral(lambda x: torch.linalg.inv(gram(x))),
    "cholesky": lambda: Spectral(lambda x: torch.linalg.cholesky(gram(x))),
    "svd": lambda: Spectral(lambda x: torch.linalg.svdvals(gram(x)).expand(8, 8)),
    "det": lambda: Spectral(lambda x: torch.logdet(gram(x)) + x),
    "complex": lambda: Spectral(lambda x: torch.view_as_complex(x.unflatten(1, (4, 2))).abs(), 4),
    "polar": lambda: Spectral(lambda x: torch.complex(x, x).angle() + x),
    "cdist": lambda: Spectral(lambda x: torch.cdist(x, x) + 0.1),
    "quantile": lambda: Spectral(lambda x: x - torch.quantile(x, 0.5)),
    "own_function": lambda: Spectral(lambda x: OwnFunction.apply(x)),  # type: ignore[no-untyped-call]
    "own_function_alias": lambda: Spectral(OwnFunction.apply),
    "own_matmul": lambda: Spectral(lambda x: torch.mm(x, torch.eye(8))),
    "index_put": lambda: Scattered(index_put),
    "index_add": lambda: Scattered(index_add),
    "index_copy": lambda: Scattered(index_copy),
    "scatter": lambda: Scattered(scatter),
    "scatter_add": lambda: Scattered(scatter_add),
    "masked_scatter": lambda: Scattered(masked_scatter),
    "slice_assignment": lambda: Scattered(slice_assignment),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", list(SPECTRAL))
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a12_operation_without_a_half_version_trains(name: str, low: str) -> None:
    task = Task(SPECTRAL[name](), torch.rand(32, 8), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    ap = scripted({0: EVERYTHING[low]})
    watch, before = Watch(ap), weights_of(task)
    cpu(callbacks=[ap, watch]).fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (4, 0)
    assert all(map(math.isfinite, watch.losses))
    assert not any(map(torch.equal, weights_of(task), before))
    assert ap.precision_map()["net.last"] == low  # at most the layer before the operation gives way
    assert set(raised(ap)) <= {"net.first"}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a12_unsupported_operation_pins_its_layer_after_one_failure(low: str) -> None:
    task = Task(Scattered(index_put), torch.rand(32, 8))
    ap = scripted({0: EVERYTHING[low]})
    seen = watch_dtypes(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.first": "fp32", "net.last": low}
    assert seen["net.first"] == [getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[low]), *[torch.float32] * 3]
    (unit,), (reason,) = zip(*raised(ap).items(), strict=True)
    assert unit == "net.first"
    assert "__setitem__" in reason


def test_a12_loss_is_that_of_fp32_up_to_rounding() -> None:
    for name in ("rfft", "index_put", "scatter", "eigh"):
        losses = []
        for format_ in ("fp32", "bf16"):
            torch.manual_seed(0)
            task = Task(SPECTRAL[name](), torch.rand(32, 8), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
            ap = scripted({0: EVERYTHING[format_]})
            watch = Watch(ap)
            cpu(callbacks=[ap, watch]).fit(task)
            losses.append(watch.losses)
        assert losses[1] == pytest.approx(losses[0], rel=0.05), name


class ComplexParts(nn.Module):
    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.register_buffer("filter", torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        spectrum = torch.fft.rfft(self.first(x).float()) * self.filter * self.gain
        return self.last(torch.fft.irfft(spectrum, n=8))


@pytest.mark.parametrize("low", ["bf16", "fp16", "int8"])
def test_a12_complex_buffers_and_parameters_are_not_touched(low: str) -> None:
    task = Task(ComplexParts(), torch.rand(32, 8), optimizer=lambda p: torch.optim.SGD(p, lr=1e-2))
    net: Any = task.net
    before, gain = net.filter.clone(), net.gain
    ap = scripted({0: EVERYTHING[low]})
    cpu(callbacks=[ap]).fit(task)
    assert torch.equal(net.filter, before)
    assert net.gain is gain
    assert net.gain.dtype is torch.complex64
    assert ap.applied_steps == 4
    assert ap.precision_map()["net.last"] == low


def test_a12_numpy_has_no_bf16() -> None:
    """Metrics in a training step often go through numpy."""

    class Metrics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Any:
            y = self.first(x)
            self.seen.append(float(y.detach().numpy().mean()))
            return self.last(y)

    ap, task = scripted({0: EVERYTHING["bf16"]}), Task(Metrics(), torch.rand(32, 8))
    cpu(callbacks=[ap]).fit(task)
    assert ap.applied_steps == 4
    assert ap.precision_map() == {"net.first": "fp32", "net.last": "bf16"}


def test_a12_error_that_is_the_users_own_is_not_swallowed() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.first(x) @ torch.ones(3, 3)

    ap = scripted({0: EVERYTHING["bf16"]})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        cpu(callbacks=[ap]).fit(Task(Wrong(), torch.rand(32, 8)))


# ---- buffers, ids and position tables ----


class Positions(nn.Module):
    table: Tensor
    ids: Tensor
    phase: Tensor
    mask: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(4096.0).unsqueeze(1) / 10000 ** (torch.arange(8) / 8)
        self.register_buffer("table", torch.sin(angles))
        self.register_buffer("ids", torch.arange(4096))
        self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("mask", torch.arange(8) > 3)
        self.register_buffer("scratch", torch.arange(4097.0), persistent=False)
        self.embed, self.first, self.last = nn.Embedding(4096, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.seen: list[tuple[torch.dtype, torch.dtype, float]] = []

    def forward(self, x: Tensor) -> Any:
        rows_ = self.ids[-8:]
        self.seen.append((self.table.dtype, rows_.dtype, float(self.scratch[-1])))
        y = self.first(x + self.table[rows_] + self.embed(rows_)).masked_fill(self.mask, 0.0)
        rotated = torch.view_as_complex(y.float().unflatten(1, (4, 2))) * self.phase
        return self.last(torch.view_as_real(rotated).flatten(1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("low", ["bf16", "fp16", "int8", "fp8"])
def test_a18_buffers_keep_every_bit(low: str, precision: Any) -> None:
    task = Task(Positions(), torch.rand(32, 8))
    before = {name: buffer.clone() for name, buffer in task.named_buffers()}
    identities = [id(buffer) for buffer in task.buffers()]
    during: list[bool] = []

    class Look(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            during.append(all(torch.equal(b, before[n]) for n, b in pl_module.named_buffers()))

    ap = scripted({0: Action(precision={"*": low}), 2: Action(precision={"net.*": "bf16"})})
    cpu(precision=precision, callbacks=[ap, Look()]).fit(task)
    assert ap.applied_steps == 4
    assert during == [True] * 4
    assert_same_state({name: buffer.clone() for name, buffer in task.named_buffers()}, before)
    assert [id(buffer) for buffer in task.buffers()] == identities
    assert set(task.net.seen) == {(torch.float32, torch.int64, 4096.0)}  # type: ignore[arg-type]
