"""Implementation choices in real fits: what runs, what is said of it, resume, recomputation, and no trace.

Time budget: 40 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, ScriptedController, onednn
from autoprec.attention import AttentionSignature
from autoprec.summary import summarize
from tests.small_fits import Outcome, differences, outcome, quiet, seed

BUILTIN = F.scaled_dot_product_attention
SHAPE = (8, 2, 8, 8)
ALL_CHOICES = {"expand": {"fp32": "onednn"}, "features.0": {"fp32": "channels_last", "bf16": "channels_last"}}
ALL_CHOICES["features.3"] = ALL_CHOICES["features.0"]
pytestmark = pytest.mark.skipif(not onednn.is_available(), reason="this torch has no oneDNN linear")


class Mixed(pl.LightningModule):
    """A chain of convolutions, attention over its channels, and linear layers.

    The result of the chain is viewed, which one in ``channels_last`` would not allow.
    """

    def __init__(self, checkpoints: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.expand = nn.Linear(16, 48)
        self.head = nn.Linear(16, 2)
        self.checkpoints, self.fails = checkpoints, fails
        self.losses: list[float] = []
        self.seen_in_validation: list[bool] = []
        self.strides: set[tuple[int, ...]] = set()

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.expand(x).view(len(x), 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(len(x), 8, 16)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.features(x)
        self.strides.add(maps.stride())
        x = maps.view(len(x), 8, 16)
        x = checkpoint(self.attend, x, use_reentrant=False) if self.checkpoints else self.attend(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 2:
            raise KeyError("mine")
        loss = F.mse_loss(self(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen_in_validation.append(F.scaled_dot_product_attention is BUILTIN)
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Chooses(Callback):
    """Makes choices before the first window, as a calibration does."""

    def __init__(self, ap: AutoPrecisionCallback, choices: dict[str, dict[str, str]], dtype: str | None) -> None:
        self.ap, self.choices, self.dtype = ap, choices, dtype

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        steering = self.ap.steering
        assert steering is not None
        for name, choices in self.choices.items():
            steering.knobs.set_implementations(name, choices)
        if self.dtype is not None:
            signature = AttentionSignature(SHAPE, SHAPE, SHAPE, self.dtype, is_causal=True)
            steering.runtime.attention[signature] = "matmul"


class Run:
    """A fit of :class:`Mixed` and what is left of it."""

    def __init__(
        self,
        choices: dict[str, dict[str, str]] | None = None,
        dtype: str | None = None,
        *,
        steps: int = 6,
        module: Mixed | None = None,
        script: dict[int, Action] | None = None,
        config: AutoPrecisionConfig | None = None,
        folder: Path | None = None,
        resume: Path | None = None,
        **options: Any,
    ) -> None:
        seed(3)
        self.module = module or Mixed()
        self.ap = AutoPrecisionCallback(policy=ScriptedController(steps=script), config=config)
        callbacks: list[Callback] = [self.ap]
        if resume is None:
            callbacks.append(Chooses(self.ap, choices or {}, dtype))
        if folder is not None:
            callbacks.append(ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=8, filename="{step}"))
            options["enable_checkpointing"] = True
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 1, 4, 4, generator=generator), torch.randn(64, 2, generator=generator))
        self.trainer = quiet(max_steps=steps, callbacks=callbacks, num_sanity_val_steps=0, **options)
        batches = DataLoader(data, batch_size=8)
        self.trainer.fit(self.module, batches, DataLoader(data, batch_size=8), ckpt_path=resume, weights_only=True)

    @property
    def steering(self) -> Any:
        return self.ap.steering

    @property
    def outcome(self) -> Outcome:
        return outcome(self.trainer, self.module)

    @property
    def summary(self) -> str:
        return summarize(self.steering, "scripted")


def assert_close(left: Run, right: Run, tolerance: float) -> None:
    assert left.module.losses != []
    torch.testing.assert_close(
        torch.tensor(left.module.losses), torch.tensor(right.module.losses), rtol=tolerance, atol=tolerance
    )


def assert_no_trace(module: nn.Module) -> None:
    assert F.scaled_dot_product_attention is BUILTIN
    assert type(module.features) is nn.Sequential
    assert not any("_autoprec" in part.__dict__ for part in module.modules())


def test_all_choices_in_fp32() -> None:
    found, usual = Run(ALL_CHOICES, "float32"), Run()
    assert "implementations: 2 conv layers channels_last, 1 linear layer onednn, attention matmul at 1 shape" in (
        found.summary
    )
    assert "implementations" not in usual.summary
    assert_close(found, usual, 1e-4)
    assert found.module.losses != usual.module.losses  # rounding tells that something else ran
    assert found.module.strides == usual.module.strides == {(128, 16, 4, 1)}
    assert_no_trace(found.module)
    before, after = usual.module.state_dict(), found.module.state_dict()
    assert {name: (each.stride(), each.dtype) for name, each in before.items()} == {
        name: (each.stride(), each.dtype) for name, each in after.items()
    }


def test_choices_move_no_knob() -> None:
    found, usual = Run(ALL_CHOICES, "float32"), Run()
    assert list(found.steering.history) == list(usual.steering.history)
    assert found.ap.precision_map() == usual.ap.precision_map()


@pytest.mark.parametrize("is_private", [True, False])
def test_low_precision(is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_CHECK", "1")
    config = AutoPrecisionConfig(fused_step=is_private)
    script = {0: Action(precision={"*": "bf16"})}
    found = Run(ALL_CHOICES, "bfloat16", script=script, config=config)
    assert "implementations: 2 conv layers channels_last, attention matmul at 1 shape" in found.summary
    assert_close(found, Run(script=script, config=config), 0.05)
    assert_no_trace(found.module)


def test_bf16_mixed_that_nothing_else_steers() -> None:
    found, usual = Run({}, "bfloat16", precision="bf16-mixed"), Run(precision="bf16-mixed")
    assert found.summary.count("attention matmul at 1 shape") == 1
    assert not found.steering.knobs.is_steering
    assert_close(found, usual, 0.05)
    assert_no_trace(found.module)


def test_nothing_is_patched_where_nothing_was_chosen() -> None:
    class Looks(Mixed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert F.scaled_dot_product_attention is BUILTIN
            assert type(self.features) is nn.Sequential
            return super().training_step(batch, batch_idx)

    run = Run({"expand": {"fp32": "onednn"}}, module=Looks())
    assert "implementations: 1 linear layer onednn" in run.summary


def test_validation_keeps_torchs_own() -> None:
    run = Run(ALL_CHOICES, "float32", steps=10)
    assert run.module.seen_in_validation
    assert all(run.module.seen_in_validation)


def test_a_choice_waits_while_another_format_is_used() -> None:
    script = {1: Action(precision={"expand": "bf16"}), 4: Action(precision={"expand": "fp32"})}
    run = Run({"expand": {"fp32": "onednn"}}, script=script, steps=6)
    assert run.steering.knobs.units["expand"].implemented == {"onednn": 3}
    assert run.steering.knobs.unit_formats.implementations == {"expand": "onednn"}


def test_a_choice_can_be_taken_back() -> None:
    run = Run({"expand": {"fp32": "onednn"}}, steps=1)
    run.steering.knobs.set_implementations("expand", {"fp32": "default"})
    assert run.steering.knobs.unit_formats.implementations == {}


def test_wrong_choices_are_refused() -> None:
    knobs = Run(steps=1).steering.knobs
    with pytest.raises(ValueError, match="There is no unit of that name"):
        knobs.set_implementations("absent", {"fp32": "onednn"})
    with pytest.raises(ValueError, match="'onednn' for conv in fp32"):
        knobs.set_implementations("features.0", {"fp32": "onednn"})


def test_recomputation_runs_as_the_forward_did() -> None:
    seed(3)  # as in a run
    found = Run(ALL_CHOICES, "float32", module=Mixed(checkpoints=True)), Run(ALL_CHOICES, "float32")
    assert "attention matmul" in found[0].summary
    assert not differences(found[0].module.state_dict(), found[1].module.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning: the folder has files already
def test_a_resumed_run_has_the_same_bits_and_choices(tmp_path: Path) -> None:
    through = Run(ALL_CHOICES, "float32", steps=12, folder=tmp_path)
    resumed = Run(steps=12, folder=tmp_path, resume=tmp_path / "step=8.ckpt")
    assert resumed.steering.knobs.unit_formats.implementations == through.steering.knobs.unit_formats.implementations
    assert resumed.steering.runtime.attention == through.steering.runtime.attention
    assert "attention matmul at 1 shape" in resumed.summary
    assert not differences(through.module.state_dict(), resumed.module.state_dict())
    assert not differences(through.outcome.optimizers, resumed.outcome.optimizers)


def test_no_trace_after_an_exception() -> None:
    module = Mixed(fails=True)
    with pytest.raises(KeyError, match="mine"):
        Run(ALL_CHOICES, "float32", module=module)
    assert_no_trace(module)


class TestChains:
    def test_hooks_on_a_layer_keep_its_chain_as_it_is(self) -> None:
        module = Mixed()
        seen: set[tuple[int, ...]] = set()
        module.features[2].register_forward_hook(lambda layer, args, output: seen.add(output.stride()))
        run = Run(ALL_CHOICES, module=module)
        assert seen == {(128, 16, 4, 1)}
        assert "channels_last" not in run.summary

    def test_a_part_that_is_called_alone_returns_what_it_always_does(self) -> None:
        class Slices(Mixed):
            def forward(self, x: Tensor) -> Tensor:
                self.strides.add(self.features[0](x).stride())
                return super().forward(x)

        run = Run(ALL_CHOICES, module=Slices())
        assert run.module.strides == {(128, 16, 4, 1)}
        assert "2 conv layers channels_last" in run.summary

    def test_one_that_chooses_otherwise_keeps_the_chain_as_it_is(self) -> None:
        choices = {"features.0": ALL_CHOICES["features.0"]}
        assert "channels_last" not in Run(choices).summary

    def test_a_layout_of_the_users_own_stays(self) -> None:
        module = Mixed()
        convert: Any = module.features.to
        convert(memory_format=torch.channels_last)
        run = Run(ALL_CHOICES, module=module.train(), steps=0)
        with torch.no_grad():
            assert module.features(torch.randn(2, 1, 4, 4)).is_contiguous(memory_format=torch.channels_last)
        assert "channels_last" not in run.summary
