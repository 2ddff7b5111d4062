"""Outputs of a run against those of the fp32 run: what is saved, and what is computed of it.

Time budget: 15 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn

from autoprec.fidelity import collect_outputs, compare_outputs
from autoprec.outputs import call, flatten

LABELS = torch.tensor([0, 1])
Pair = namedtuple("Pair", ["mean", "scale"])


@dataclasses.dataclass
class Boxes:
    boxes: Tensor
    count: int = 3


class Returns(nn.Module):
    """Returns what it was made with, whatever comes in."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, inputs: Any) -> Any:
        return self.outputs


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Compares two outputs, of one batch of inputs and labels."""

    def compare(ours: Any, theirs: Any, labels: Tensor | None = LABELS) -> dict[str, float]:
        batch = torch.zeros(1) if labels is None else (torch.zeros(2, 1), labels)
        paths = [collect_outputs(Returns(o), [batch], tmp_path / name) for o, name in ((ours, "a"), (theirs, "b"))]
        assert paths[0] is not None
        assert paths[1] is not None
        return compare_outputs(paths[0], paths[1])

    return compare


# ---- measures ----


def test_divergence_by_hand(compared: Callable[..., dict[str, float]]) -> None:
    """Rows (1/2, 1/2) against (1/4, 3/4), and (1/3, 2/3) against itself."""
    theirs = torch.tensor([[0.0, 0.0], [0.0, math.log(2)]])
    ours = torch.tensor([[0.0, math.log(3)], [5.0, 5.0 + math.log(2)]])  # a shift changes no distribution
    found = compared(ours, theirs)
    assert found["kl"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, abs=1e-6)
    assert found["top1_agreement"] == 0.5
    signal, noise = math.log(2) ** 2, math.log(3) ** 2 + 50
    assert found["logit_sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), rel=1e-4)
    assert found["max_abs_difference"] == pytest.approx(5.0)
    assert found["rows"] == 2


def test_equal_outputs_differ_by_nothing(compared: Callable[..., dict[str, float]]) -> None:
    logits = torch.randn(2, 5)
    assert compared(logits, logits.clone()) == {
        "kl": 0.0, "top1_agreement": 1.0, "logit_sqnr_db": math.inf, "max_abs_difference": 0.0, "rows": 2.0,
    }  # fmt: skip
    values = torch.zeros(2, 3)
    found = compared(values, values.clone(), None)
    assert (found["sqnr_db"], found["relative_error"]) == (math.inf, 0.0)


def test_huge_logits_do_not_overflow(compared: Callable[..., dict[str, float]]) -> None:
    theirs = torch.tensor([[3e38, -3e38, 0.0], [1e30, 1e30, 0.0]])
    ours = torch.tensor([[3e38, -3e38, 0.0], [1e30, 2e30, 0.0]])
    found = compared(ours, theirs)
    assert found["kl"] == pytest.approx(0.5e30 / 2, rel=1e-5)
    assert found["top1_agreement"] == 0.5
    assert math.isfinite(found["logit_sqnr_db"])


def test_masked_classes_count_as_impossible(compared: Callable[..., dict[str, float]]) -> None:
    theirs = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, -math.inf]])
    assert compared(theirs.clone(), theirs)["kl"] == 0.0
    assert compared(theirs.clone(), theirs)["logit_sqnr_db"] == math.inf
    opened = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -math.inf]])  # gives 1/3 where the reference gives 0
    found = compared(opened, theirs)
    assert found["kl"] == pytest.approx(math.log(3 / 2) / 2)
    assert found["max_abs_difference"] == math.inf
    assert found["logit_sqnr_db"] == -math.inf
    assert compared(theirs, opened)["kl"] == math.inf  # gives 0 where the reference gives 1/3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_is_not_finite_is_as_far_as_can_be(bad: float, compared: Callable[..., dict[str, float]]) -> None:
    theirs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    ours = torch.tensor([[1.0, bad], [0.0, 1.0]])
    found = compared(ours, theirs)
    assert (found["kl"], found["top1_agreement"], found["logit_sqnr_db"]) == (math.inf, 0.5, -math.inf)
    values = compared(ours, theirs, None)
    assert (values["sqnr_db"], values["relative_error"]) == (-math.inf, math.inf)


def test_rows_whose_reference_is_no_distribution_are_left_out(compared: Callable[..., dict[str, float]]) -> None:
    theirs = torch.tensor([[math.nan, 0.0], [0.0, 1.0]])
    found = compared(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), theirs)
    assert (found["kl"], found["top1_agreement"], found["left_out_rows"], found["rows"]) == (0.0, 1.0, 1.0, 2.0)
    nothing = compared(theirs, torch.full((2, 2), math.nan))
    assert "kl" not in nothing
    assert nothing["left_out_rows"] == 2


def test_regression_has_a_ratio_of_signal_to_noise(compared: Callable[..., dict[str, float]]) -> None:
    found = compared(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), None)
    assert found == {
        "sqnr_db": pytest.approx(20.0), "relative_error": pytest.approx(0.1), "max_abs_difference": 0.5, "rows": 2.0,
    }  # fmt: skip
    assert compared(torch.ones(2, 1), torch.zeros(2, 1), None)["sqnr_db"] == -math.inf


def test_several_outputs_are_told_apart(compared: Callable[..., dict[str, float]]) -> None:
    theirs = {"start_logits": torch.zeros(2, 4), "value": torch.ones(2, 1)}
    found = compared({"start_logits": torch.zeros(2, 4), "value": torch.full((2, 1), 1.1)}, theirs)
    assert (found["kl"], found["start_logits/kl"], found["rows"]) == (0.0, 0.0, 4.0)
    assert found["sqnr_db"] == found["value/sqnr_db"] == pytest.approx(20.0, abs=1e-4)
    assert found["max_abs_difference"] == pytest.approx(0.1, abs=1e-6)


# ---- outputs ----


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (torch.zeros(2, 3), ["output"]),
        ((torch.zeros(2, 3), [torch.zeros(2)]), ["0", "1.0"]),
        ({"logits": torch.zeros(2, 3), "loss": torch.zeros(()), "past_key_values": (torch.zeros(2),)}, ["logits"]),
        (Pair(torch.zeros(2), torch.zeros(2)), ["mean", "scale"]),
        (Boxes(torch.zeros(2, 4)), ["boxes"]),
        ({"ids": torch.zeros(2, dtype=torch.long), "empty": torch.zeros(0, 3), "text": "hello", "none": None}, []),
    ],
)
def test_nested_outputs_have_names(outputs: Any, names: list[str]) -> None:
    assert [output.name for output in flatten(outputs, None)] == names


def test_model_outputs_of_transformers_are_mappings() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    outputs = CausalLMOutputWithPast(loss=torch.zeros(()), logits=torch.zeros(2, 3, 7), hidden_states=(torch.ones(2),))
    (found,) = flatten(outputs, None)
    assert (found.name, found.class_dim) == ("logits", 2)


def test_what_lies_inside_a_model_is_no_output() -> None:
    inner = ("encoder_last_hidden_state", "encoder_hidden_states", "decoder_attentions", "cross_attentions")
    outputs = {name: torch.zeros(2, 3) for name in (*inner, "last_hidden_state")}
    assert [output.name for output in flatten(outputs, None)] == ["last_hidden_state"]


@pytest.mark.parametrize(
    ("shape", "target", "class_dim"),
    [
        ((2, 5), torch.tensor([4, 0]), 1),
        ((2, 5), torch.tensor([5, 0]), None),  # out of range
        ((2, 5), torch.tensor([1.0, 0.0]), None),
        ((2, 5), torch.tensor([[1], [0]]), None),
        ((2, 3, 5), torch.zeros(2, 3, dtype=torch.long), 2),
        ((2, 5, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), 1),
        ((2, 1), torch.tensor([0, 0]), None),
        ((2,), torch.tensor([0, 1]), None),
    ],
)
def test_integer_targets_tell_logits(shape: tuple[int, ...], target: Tensor, class_dim: int | None) -> None:
    for batch in ((torch.zeros(2), target), {"x": torch.zeros(2), "labels": target}):
        (output,) = flatten(torch.zeros(shape), batch)
        assert output.class_dim == class_dim


def test_classes_of_images_are_compared_along_their_dimension(compared: Callable[..., dict[str, float]]) -> None:
    theirs = torch.randn(2, 3, 4, 4)
    labels = torch.zeros(2, 4, 4, dtype=torch.long)
    ours = theirs + torch.randn(2, 1, 4, 4)  # a shift of all classes of a pixel
    found = compared(ours, theirs, labels)
    assert found["kl"] == pytest.approx(0.0, abs=1e-6)
    assert (found["rows"], found["top1_agreement"]) == (32, 1.0)


# ---- calls ----


class Named(nn.Module):
    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        return input_ids.float() * scale


class AnyNames(nn.Module):
    def forward(self, **batch: Tensor) -> Tensor:
        return batch["b"].float()


class Predicts(LightningModule):
    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("predict_step is there for this")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs: Tensor = batch[0]
        return inputs + float(batch_idx)


class Inherits(LightningModule):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * inputs


ONES = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        (Named(), {"input_ids": ONES, "labels": LABELS, "scale": 3.0}, 3.0),
        (AnyNames(), {"a": LABELS, "b": ONES}, 1.0),
        (nn.Identity(), {"image": ONES, "label": LABELS}, 1.0),
        (nn.Identity(), (ONES, LABELS), 1.0),
        (nn.Identity(), [ONES, LABELS], 1.0),
        (nn.Identity(), ONES, 1.0),
        (Predicts(), (ONES, LABELS), 5.0),
        (Inherits(), (ONES, LABELS), 2.0),
    ],
)
def test_a_module_is_called_as_fits_it(module: nn.Module, batch: Any, expected: float) -> None:
    assert torch.equal(call(module, batch, 4), expected * ONES)


# ---- files ----


def test_no_more_is_saved_and_no_more_batches_are_asked_for_than_allowed(tmp_path: Path) -> None:
    asked = []

    def batches() -> Iterator[Tensor]:
        for index in range(100):
            asked.append(index)
            yield torch.full((4, 8), float(index))

    path = collect_outputs(nn.Identity(), batches(), tmp_path / "outputs", limit_bytes=4 * 8 * 4 * 2 + 40)
    assert path is not None
    saved = load_file(path)
    lengths = {"000000/output": 4, "000001/output": 4, "000002/output": 1}
    assert {name: len(rows) for name, rows in saved.items()} == lengths
    assert asked == [0, 1, 2]
    assert all(rows.dtype == torch.float32 for rows in saved.values())


def test_low_precision_outputs_are_cut_like_full_ones(tmp_path: Path) -> None:
    batches = [torch.randn(4, 8) for _ in range(3)]
    ours = collect_outputs(nn.Identity(), [b.bfloat16() for b in batches], tmp_path / "a", limit_bytes=200)
    theirs = collect_outputs(nn.Identity(), batches, tmp_path / "b", limit_bytes=200)
    assert ours is not None
    assert theirs is not None
    found = compare_outputs(ours, theirs)
    assert found["rows"] == 6
    assert 40 < found["sqnr_db"] < 65  # 8 bits


@pytest.mark.parametrize("outputs", [torch.zeros(2, dtype=torch.long), "text", {}, torch.zeros(0, 3)])
def test_a_model_without_such_outputs_saves_nothing(outputs: Any, tmp_path: Path) -> None:
    assert collect_outputs(Returns(outputs), [torch.zeros(2)], tmp_path / "a") is None
    assert collect_outputs(nn.Identity(), [], tmp_path / "a") is None
    assert not (tmp_path / "a").exists()


def test_a_module_is_as_before(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(3)
    module = nn.Sequential(nn.Dropout(0.5), norm, nn.Sequential(nn.Dropout(0.5)))
    module[2].eval()
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    random_forward = lambda module, batch: module(batch) + torch.rand(())  # noqa: E731
    collect_outputs(module, [torch.randn(4, 3)], tmp_path / "a", forward=random_forward)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(4, 3)
    assert torch.equal(after, torch.get_rng_state())
    assert [part.training for part in module.modules()] == modes
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 0


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    paths = {}
    for name, outputs in {"a": torch.zeros(2, 3), "b": torch.zeros(2, 4), "c": {"other": torch.zeros(2, 3)}}.items():
        paths[name] = collect_outputs(Returns(outputs), [torch.zeros(2)], tmp_path / name)
        assert paths[name] is not None
    with pytest.raises(ValueError, match=r"have the shapes \[2, 3\] and \[2, 4\]"):
        compare_outputs(paths["a"], paths["b"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no outputs in common"):
        compare_outputs(paths["a"], paths["c"])  # type: ignore[arg-type]
