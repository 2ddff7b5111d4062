"""How what a calibration found about attention becomes what a fit runs: cases, memory, resume.

Time budget: 15 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, CalibrationConfig
from autoprec.attention import AttentionSignature, example, saved_bytes
from autoprec.attention_costs import choose, find_cases, key_of
from autoprec.calibration.attention import AttentionCase
from autoprec.calibration.calibrator import Calibrator
from autoprec.calibration.layer_runs import Measured
from autoprec.layers import Runtime
from autoprec.summary import summarize
from tests.small_fits import differences, quiet, seed
from tests.test_implementations_fits import Mixed

SHAPE = (2, 2, 40, 8)
SOME = AttentionSignature(SHAPE, SHAPE, SHAPE, "bfloat16", is_causal=True)
MASKED = AttentionSignature(SHAPE, SHAPE, SHAPE, "float32", "float", (40, 40))
GROUPED = AttentionSignature(SHAPE, (2, 1, 40, 8), (2, 1, 40, 8), "float32", enable_gqa=True)
DROPPED = SOME._replace(has_dropout=True)


def seen(*signatures: AttentionSignature, calls: int = 1) -> Runtime:
    runtime = Runtime("cpu")
    runtime.attention_seen.update(dict.fromkeys(signatures, calls))
    return runtime


def test_calls_with_dropout_are_no_cases() -> None:
    cases = find_cases(seen(SOME, DROPPED), "cpu")
    assert [case.key for case in cases] == [key_of(SOME)]
    assert set(cases[0].runs) == {"default", "matmul"}
    assert cases[0].saved_bytes["matmul"] == saved_bytes(SOME, "matmul")


@pytest.mark.parametrize(
    "other",
    [
        SOME._replace(key=(1, *SHAPE[1:]), value=(1, *SHAPE[1:])),
        SOME._replace(value=(2, 2, 40, 4)),
        SOME._replace(key=(2, 1, 40, 8), value=(2, 1, 40, 8)),
        MASKED._replace(mask_shape=()),
        MASKED._replace(mask_shape=(1, 2, 2, 40, 40)),
    ],
    ids=["one sample", "width of values", "one head", "mask of one", "mask of five"],
)
def test_calls_that_products_cannot_run_are_no_cases(other: AttentionSignature) -> None:
    assert [case.key for case in find_cases(seen(other, MASKED), "cpu")] == [key_of(MASKED)]


def test_nothing_is_drawn_for_cases_that_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision asks for the cases, and most of them are known by then."""
    drawn: list[Any] = []
    monkeypatch.setattr("autoprec.attention.torch.rand", lambda *sizes, **_: drawn.append(sizes))
    monkeypatch.setattr("autoprec.attention.torch.randn", lambda *sizes, **_: drawn.append(sizes))
    assert len(find_cases(seen(SOME, MASKED), "cpu")) == 2
    assert not drawn


@pytest.mark.parametrize("signature", [SOME, MASKED, GROUPED], ids=["causal", "mask", "groups"])
def test_implementations_of_a_case_compute_the_same(signature: AttentionSignature) -> None:
    (case,) = find_cases(seen(signature), "cpu")
    operands, _ = example(signature, seed=1)
    default, products = (case.runs[name](*operands).float() for name in ("default", "matmul"))
    torch.testing.assert_close(products, default, rtol=2e-2, atol=2e-2)
    wide = case.runs["default"](*(each.detach().double() for each in operands))  # a mask follows
    torch.testing.assert_close(default.double(), wide, rtol=2e-2, atol=2e-2)


def test_what_was_found_runs_within_memory() -> None:
    runtime = seen(SOME, MASKED, calls=3)
    found = {key_of(SOME): "matmul", key_of(MASKED): "matmul"}
    more = 3 * (saved_bytes(SOME, "matmul") - saved_bytes(SOME, "default"))
    assert more > 0
    choose(runtime, found, more)
    assert runtime.attention == {SOME: "matmul"}
    choose(runtime, found, more - 1)
    assert MASKED not in runtime.attention or SOME not in runtime.attention
    choose(runtime, found, 2**40)
    assert runtime.attention == {SOME: "matmul", MASKED: "matmul"}
    choose(runtime, {**found, key_of(SOME): "default"}, 2**40)
    assert runtime.attention == {MASKED: "matmul"}


def test_calls_that_were_not_seen_keep_their_choice() -> None:
    runtime = seen(SOME)
    runtime.attention[MASKED] = "matmul"
    choose(runtime, {}, 2**40)
    assert runtime.attention == {MASKED: "matmul"}


# ---- in fits ----


class Fit:
    """A fit with a calibration that finds what it is told to find."""

    def __init__(
        self,
        times: Mapping[str, float],
        monkeypatch: pytest.MonkeyPatch,
        config: Mapping[str, Any] | None = None,
        interval: int = 3,
        **fit: Any,
    ) -> None:
        def compare(calibrator: Calibrator, cases: Sequence[AttentionCase], budget_s: float) -> Any:
            self.asked += [case.key for case in cases]
            return {
                case.key: {n: Measured(ms, 1e-7, case.saved_bytes[n], 0) for n, ms in times.items()} for case in cases
            }

        self.asked: list[str] = []
        monkeypatch.setattr(Calibrator, "compare_attention", compare)
        monkeypatch.setattr(Calibrator, "measure", lambda *_: None)
        calibration = CalibrationConfig(**{"enabled": True, "cache": False, **(config or {})})
        config_of_all = AutoPrecisionConfig(calibration=calibration)
        self.ap = AutoPrecisionCallback("fixed:fp32", interval=interval, config=config_of_all)
        seed(3)
        self.module = Mixed()
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 1, 4, 4, generator=generator), torch.randn(64, 2, generator=generator))
        callbacks = [self.ap, *fit.pop("callbacks", [])]
        self.trainer = quiet(max_steps=14, callbacks=callbacks, num_sanity_val_steps=0, **fit.pop("trainer", {}))
        batches = DataLoader(data, batch_size=8)
        self.trainer.fit(self.module, batches, DataLoader(data, batch_size=8), weights_only=True, **fit)

    @property
    def steering(self) -> Any:
        return self.ap.steering


def test_the_faster_one_runs_and_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit({"default": 2.0, "matmul": 1.0}, monkeypatch)
    assert len(set(fit.asked)) == 1
    assert list(fit.steering.runtime.attention.values()) == ["matmul"]
    assert fit.steering.runtime.attention_ran
    assert "attention matmul at 1 shape" in summarize(fit.steering, "fixed:fp32")
    assert fit.steering.costs.has_decided


@pytest.mark.parametrize("times", [{"default": 1.0, "matmul": 1.0}, {"default": 1.0, "matmul": 3.0}], ids=str)
def test_torchs_own_stays_where_it_is_as_fast(times: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(times, monkeypatch)
    assert fit.asked
    assert not fit.steering.runtime.attention
    assert not fit.steering.runtime.attention_ran


def test_a_memory_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.attention_costs.saved_bytes", lambda signature, name: 1000 * (name == "matmul"))
    fit = Fit({"default": 2.0, "matmul": 1.0}, monkeypatch, {"memory_budget_bytes": 0})
    assert fit.asked
    assert not fit.steering.runtime.attention


def test_nothing_is_looked_at_without_a_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit({"default": 2.0, "matmul": 1.0}, monkeypatch, {"enabled": False})
    assert not fit.asked
    assert not fit.steering.runtime.attention_seen


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning: the folder has files already
@pytest.mark.parametrize("interval", [3, 7, 8])  # decided before the checkpoint, only seen by then, later
def test_a_resumed_run_goes_on_with_what_was_found(
    interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**options: Any) -> Fit:
        saves = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=8, filename="{step}")
        trainer = {"enable_checkpointing": True}
        times = {"default": 2.0, "matmul": 1.0}
        return Fit(times, monkeypatch, interval=interval, callbacks=[saves], trainer=trainer, **options)

    whole = run()
    resumed = run(ckpt_path=tmp_path / "step=8.ckpt")
    assert resumed.steering.runtime.attention == whole.steering.runtime.attention != {}
    assert not differences(whole.module.state_dict(), resumed.module.state_dict())
