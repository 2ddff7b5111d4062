"""Cases A-09 and A-11: shared weights and recurrent layers.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from autoprec import Action
from tests.support import (
    Ask,
    Task,
    Watch,
    all_in,
    assert_finite,
    assert_same_state,
    cpu,
    rows,
    scripted,
    state_of,
    watch_dtypes,
    weights_of,
)

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


@pytest.mark.parametrize("is_widest_last", [True, False])
def test_a09_contradicting_request_goes_to_the_widest(is_widest_last: bool) -> None:
    request = {"net.head": "int8", "net.emb": "fp32"} if is_widest_last else {"net.head": "fp32", "net.emb": "int8"}
    ap, task = scripted({0: all_in("bf16"), 1: Action(precision=request)}), tied_task()
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
        ({"net.emb": "bf16", "net.head": "int8"}, "bf16"),
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
    ap, task = scripted({0: all_in("bf16")}), tied_task()
    ask = Ask(ap, "on_before_backward", 0, Action(precision={"net.head": "fp16", "net.emb": "int8"}))
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
        ap, task = scripted({0: all_in(name)}), tied_task()
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

    ap, task = scripted({0: all_in(name)}), Task(Packed(), torch.rand(32, 3, 4))
    before = weights_of(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == dict.fromkeys(("net.embed", "net.rnn", "net.head"), name)
    assert ap.applied_steps == 4
    assert not any(map(torch.equal, weights_of(task), before))


def test_a11_fp32_map_equals_the_plain_run() -> None:
    results = []
    for callbacks in ([], [scripted({0: all_in("fp32")}, knobs=("precision",))]):
        torch.manual_seed(0)
        task = Task(RECURRENT["lstm"](), torch.rand(64, 3, 4))
        cpu(callbacks=callbacks).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)
