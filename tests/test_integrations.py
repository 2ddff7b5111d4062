"""What people put beside the callback: Lightning's own callbacks, tuners, loggers, profilers, Trainer flags, peft.

Where nothing is steered the result must be that of the same Trainer without the callback, bit for bit; where layers are
steered it must run, count right and leave the layers as they were.

Time budget: 60 s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, RuleConfig, ScriptedController
from tests.small_fits import Full, Outcome, Plain, assert_identical, loader, outcome, quiet, rows, seed


class Net(Full):
    """A backbone with running statistics and a head."""

    def __init__(self, batch_size: int = 8, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.lr = batch_size, lr
        del self.net
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 2)
        self.example_input_array = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.backbone(x)))  # type: ignore[no-any-return]

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> Any:
        return loader(64, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(16, 8)


MOVES = {
    0: Action(precision={"*": "bf16"}),
    3: Action(precision={"backbone.0": "fp16", "backbone.1": "bf16"}, loss_scale=256.0, clip=5.0),
    6: Action(precision={"backbone.3": "int8", "head": "fp32"}),
}


def masked() -> AutoPrecisionCallback:
    return AutoPrecisionCallback(knobs=(), interval=3, verbose=False)


def steered() -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "fp16", "int8"))
    return AutoPrecisionCallback(ScriptedController(MOVES), interval=3, config=config, verbose=False)


Make = Callable[[], Any]


def fit(others: Sequence[Any], make: Make = Net, **options: Any) -> tuple[Trainer, Any]:
    seed()
    module = make()
    trainer = quiet(**{"max_epochs": 2, "callbacks": list(others), **options})
    trainer.fit(module)
    return trainer, module


def assert_works(others: Make = list, options: Make = dict, make: Make = Net) -> tuple[Trainer, Any, Outcome]:
    """Masked it changes nothing; steered it runs, moves, and cleans up."""
    plain = outcome(*fit(others(), make, **options()))
    watched = outcome(*fit([masked(), *others()], make, **options()))
    assert_identical(plain, watched)
    callback = steered()
    trainer, net = fit([callback, *others()], make, **options())
    assert {d.applied for d in callback.history if d.knob == "precision"} == {"bf16", "fp16", "int8", "fp32"}
    # SWA's pass over the data for running statistics moves Lightning's counter, too
    extra = any(isinstance(each, StochasticWeightAveraging) for each in others())
    assert callback.applied_steps + callback.skipped_steps == trainer.global_step - extra
    assert all(bool(torch.isfinite(value).all()) for value in net.state_dict().values() if value.is_floating_point())
    kinds = {type(part) for part in net.modules()}
    assert not any("_autoprec_base" in vars(kind) for kind in kinds)
    return trainer, net, plain


# callbacks that only look


@pytest.mark.parametrize(
    "make",
    [
        lambda: [EarlyStopping("val_loss", patience=1)],
        lambda: [Timer(duration={"hours": 1})],
        lambda: [TQDMProgressBar()],
        lambda: [RichProgressBar()],
        lambda: [ModelSummary(max_depth=-1)],
    ],
    ids=["EarlyStopping", "Timer", "TQDM", "Rich", "ModelSummary"],
)
def test_callback_that_looks(make: Make) -> None:
    bars = any(isinstance(callback, (TQDMProgressBar, RichProgressBar)) for callback in make())
    summary = any(isinstance(callback, ModelSummary) for callback in make())
    assert_works(make, lambda: {"enable_progress_bar": bars, "enable_model_summary": summary})


def test_early_stopping_stops() -> None:
    stop = EarlyStopping("val_loss", patience=0, min_delta=1e6)
    callback = steered()
    trainer, _ = fit([callback, stop], max_epochs=9)
    assert trainer.current_epoch == 2
    assert callback.applied_steps + callback.skipped_steps == 16


def test_learning_rate_monitor_and_device_stats(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    logger = CSVLogger(tmp_path)
    others = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True)]
    fit([steered(), *others], logger=logger, log_every_n_steps=1)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"lr-AdamW", "autoprec/bits", "val_loss"} <= set(header)
    assert any("cpu_percent" in name for name in header)


def test_throughput_monitor(tmp_path: Path) -> None:
    class Counts(Net):
        flops_per_batch = 1000

    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    logger = CSVLogger(tmp_path)
    fit([steered(), monitor], Counts, logger=logger, log_every_n_steps=1)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "autoprec/bits" in header
    assert any("batches_per_sec" in name for name in header)


def test_model_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    trainer, module = fit([steered(), checkpoint], enable_checkpointing=True)
    again = Net.load_from_checkpoint(checkpoint.best_model_path, weights_only=True)
    assert set(again.state_dict()) == set(module.state_dict())
    (seen,) = trainer.validate(again, verbose=False)
    (same,) = trainer.validate(Net(), ckpt_path=checkpoint.best_model_path, verbose=False, weights_only=True)
    assert same == seen
    assert seen["val_loss"] == pytest.approx(float(checkpoint.best_model_score))  # type: ignore[arg-type]


# callbacks that act


def test_stochastic_weight_averaging() -> None:
    options = {"max_epochs": 5}
    trainer, net, _ = assert_works(
        lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)], lambda: options
    )
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_a19_ema_weight_averaging_is_fp32_and_moves() -> None:
    averages: list[Any] = []

    class Peek(EMAWeightAveraging):
        def on_train_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
            averages.append({key: value.clone() for key, value in self._average_model.module.state_dict().items()})  # type: ignore[union-attr]
            super().on_train_end(trainer, pl_module)

    _, _, _ = assert_works(lambda: [Peek(decay=0.99)])
    plain, watched, ours = averages
    for key, value in ours.items():
        assert value.dtype == plain[key].dtype == watched[key].dtype
        if value.is_floating_point():
            assert not torch.equal(value, plain[key])
            torch.testing.assert_close(value, plain[key], rtol=0.2, atol=0.05)


def test_gradient_accumulation_scheduler() -> None:
    trainer, _, _ = assert_works(lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})], lambda: {"max_epochs": 3})
    assert trainer.global_step == 8 + 2 + 4


def test_accumulation_is_not_a_knob() -> None:
    callback = AutoPrecisionCallback(ScriptedController({1: Action(accumulate=2)}), verbose=False)
    trainer, _ = fit([callback, GradientAccumulationScheduler({0: 2})])
    assert trainer.accumulate_grad_batches == 2
    assert [(d.knob, d.outcome) for d in callback.history if d.knob == "accumulate"] == [("accumulate", "refused")]


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist:UserWarning")
@pytest.mark.parametrize("trains_norms", [True, False])
def test_backbone_finetuning_adds_parameters_in_mid_run(trains_norms: bool) -> None:
    """Frozen layers keep their unit; a param group comes in while the run goes on."""

    def make() -> list[Callback]:
        return [BackboneFinetuning(2, lambda epoch: 1.5, train_bn=trains_norms, verbose=False)]

    trainer, net, _ = assert_works(make, lambda: {"max_epochs": 4})
    assert len(trainer.optimizers[0].param_groups) > 1
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("make_permanent", [True, False])
def test_model_pruning(make_permanent: bool) -> None:
    """Pruned weights are computed in a pre-hook before each forward."""

    class Bare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
            del self.backbone, self.head

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    def make() -> list[Callback]:
        return [ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=make_permanent)]

    plain = outcome(*fit(make(), Bare))
    assert_identical(plain, outcome(*fit([masked(), *make()], Bare)))
    callback = AutoPrecisionCallback("fixed:bf16", interval=3, verbose=False)
    _, net = fit([callback, *make()], Bare)
    weight = net.net[0].weight if make_permanent else net.net[0].weight_orig * net.net[0].weight_mask
    assert float((weight == 0).float().mean()) > 0.4
    assert set(callback.precision_map().values()) == {"bf16"}


# tuners


@pytest.mark.filterwarnings("ignore:.*batch size.*:UserWarning")
def test_batch_size_finder() -> None:
    """Runs before our callback's first hook, with all callbacks taken out, and restores a checkpoint."""

    def make() -> list[Callback]:
        return [BatchSizeFinder(steps_per_trial=2, init_val=8, max_trials=2)]

    _, net, _ = assert_works(make)
    assert net.batch_size == 16


def test_learning_rate_finder() -> None:
    def make() -> list[Callback]:
        return [LearningRateFinder(min_lr=1e-4, max_lr=1e-1, num_training_steps=20)]

    trainer, net, _ = assert_works(make)
    assert net.lr != 0.01


def test_tuner_then_fit() -> None:
    """``Tuner.lr_find`` is a fit of its own."""
    seed()
    callback = steered()
    module = Net()
    trainer = quiet(max_epochs=2, callbacks=[callback])
    plugin = trainer.precision_plugin
    found = Tuner(trainer).lr_find(module, num_training=20)
    assert found is not None
    assert trainer.precision_plugin is plugin
    trainer.fit(module)
    assert callback.applied_steps + callback.skipped_steps == trainer.global_step == 16
    assert [d.step for d in callback.history if d.knob == "precision"][0] == 0


# flags of the Trainer


@pytest.mark.parametrize("flag", [True, 3])
def test_fast_dev_run(flag: Any) -> None:
    callback = steered()
    trainer, _ = fit([callback], fast_dev_run=flag)
    assert callback.applied_steps == trainer.global_step == int(flag)


@pytest.mark.filterwarnings("ignore:You are trying to .self.log..:UserWarning")
def test_barebones() -> None:
    callback = steered()
    seed()
    module = Net()
    trainer = Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=2, callbacks=[callback])
    trainer.fit(module)
    assert callback.applied_steps + callback.skipped_steps == 16


@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
def test_overfit_batches() -> None:
    assert_works(options=lambda: {"overfit_batches": 4, "max_epochs": 4})


@pytest.mark.parametrize(
    "options",
    [
        {"num_sanity_val_steps": 2},
        {"num_sanity_val_steps": 0, "limit_val_batches": 0},
        {"limit_val_batches": 1, "limit_train_batches": 7},
        {"val_check_interval": 3},
        {"check_val_every_n_epoch": None, "val_check_interval": 5},
        {"reload_dataloaders_every_n_epochs": 1},
        {"max_epochs": -1, "max_steps": 13},
        {"detect_anomaly": True},
        {"inference_mode": False},
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "max_epochs": 4},
        {"precision": "bf16-mixed"},
        {"log_every_n_steps": 0},
        {"log_every_n_steps": 1},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_flag(options: dict[str, Any]) -> None:
    assert_works(options=lambda: options)


def test_sanity_check_counts_nothing() -> None:
    seen: list[int] = []
    callback = steered()
    look = LambdaCallback(on_sanity_check_end=lambda *args: seen.append(callback.applied_steps + len(callback.history)))
    fit([callback, look], num_sanity_val_steps=2)
    assert seen == [0]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What ``Trainer(deterministic=True)`` leaves behind."""
    before = {key: os.environ.get(key) for key in ("CUBLAS_WORKSPACE_CONFIG", "HOROVOD_FUSION_THRESHOLD")}
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


@pytest.mark.usefixtures("deterministic")
def test_deterministic() -> None:
    """Same seed, same bits, whatever is steered."""
    assert_works(options=lambda: {"deterministic": True})
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "fp16", "int8"), rule=RuleConfig(stable_cv=10.0))

    def run() -> Outcome:
        return outcome(*fit([AutoPrecisionCallback(interval=2, config=config, verbose=False)], deterministic=True))

    assert_identical(run(), run())


@pytest.mark.parametrize("precision", ["32-true", 32, "bf16-mixed", "bf16", "64-true", "bf16-true", "16-true"])
@pytest.mark.filterwarnings("ignore:.precision=bf16. is supported for historical reasons:UserWarning")
def test_precision_of_every_kind(precision: Any) -> None:
    class Any_(Full):
        def loss(self, batch: Sequence[Tensor]) -> Tensor:
            out = self.net(batch[0])
            return nn.functional.mse_loss(out, batch[1].to(out.dtype))

    seed()
    module = Any_()
    callback = AutoPrecisionCallback("fixed:int8", verbose=False)
    trainer = quiet(max_epochs=1, precision=precision, callbacks=[callback])
    before = trainer.precision
    trainer.fit(module, loader(), loader(16))
    assert callback.applied_steps == 8
    is_steered = "true" not in str(trainer.precision) or trainer.precision == "32-true"
    assert ("int8" in callback.precision_map().values()) is is_steered
    assert trainer.precision == before
    assert trainer.validate(module, loader(16), verbose=False)


def test_16_mixed_on_a_cpu() -> None:
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        trainer = quiet(max_epochs=1, precision="16-mixed", callbacks=[callback := steered()])
    trainer.fit(Net())
    assert trainer.precision == "bf16-mixed"
    assert callback.applied_steps + callback.skipped_steps == 8


# data


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
@pytest.mark.filterwarnings("ignore:.train_dataloader. yielded .None.:UserWarning")
def test_loader_that_yields_none() -> None:
    class Holes:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[Any]:
            for index, batch in enumerate(loader()):
                yield None if index % 3 == 1 else batch

    class Gaps(Net):
        def train_dataloader(self) -> Any:
            return Holes()

    plain = outcome(*fit([], Gaps))
    assert_identical(plain, outcome(*fit([masked()], Gaps)))
    callback = steered()
    trainer, _ = fit([callback], Gaps)
    assert callback.applied_steps + callback.skipped_steps == trainer.global_step == 10


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from list(zip(*rows(40).tensors, strict=True))


def test_iterable_dataset_without_a_length() -> None:
    class Streams(Net):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=8)

    assert_works(make=Streams)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_several_loaders(mode: Any) -> None:
    class Several(Net):
        def train_dataloader(self) -> Any:
            return CombinedLoader({"a": loader(64), "b": loader(40, 4)}, mode)

        def loss(self, batch: Any) -> Tensor:
            parts = batch.values() if isinstance(batch, dict) else [batch]
            return sum(super(Several, self).loss(part) for part in parts)  # type: ignore[return-value]

    assert_works(make=Several)


def test_datamodule() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(shuffle=True)

        def val_dataloader(self) -> Any:
            return [loader(16), loader(16)]

    class Takes(Full):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))

    seed()
    callback = AutoPrecisionCallback("fixed:bf16", verbose=False)
    trainer = quiet(max_epochs=2, callbacks=[callback])
    trainer.fit(Takes(), datamodule=Data())
    assert callback.applied_steps == 16
    assert callback.batch_size == 8


# profilers and loggers


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden:UserWarning")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle:UserWarning")  # torch 2.11
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: SimpleProfiler(folder, "simple"),
        lambda folder: AdvancedProfiler(folder, "advanced"),
        lambda folder: PyTorchProfiler(folder, "torch", export_to_chrome=False),
    ],
    ids=["simple", "advanced", "pytorch"],
)
def test_profiler(make: Any, tmp_path: Path) -> None:
    callback = steered()
    fit([callback], profiler=make(tmp_path))
    assert callback.applied_steps + callback.skipped_steps == 16
    assert any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


def test_profiler_sees_our_hooks(tmp_path: Path) -> None:
    profiler = SimpleProfiler(tmp_path, "simple")
    fit([steered()], profiler=profiler)
    assert any("AutoPrecisionCallback.on_train_batch_start" in name for name in profiler.recorded_durations)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_tensorboard_with_graph(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    fit([steered()], logger=logger, log_every_n_steps=1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"autoprec/bits", "autoprec/loss_scale", "val_loss"} <= scalars
    assert [event.step for event in events.Scalars("autoprec/bits")] == list(range(16))


def test_f05_wandb_watch_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    seen: list[str] = []
    try:
        logger = WandbLogger(save_dir=tmp_path, offline=True)
        module = Net()
        logger.watch(module, log="all", log_freq=1)
        original = logger.experiment._log

        def log(data: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(data)
            return original(data, *args, **kwargs)

        monkeypatch.setattr(logger.experiment, "_log", log)
        callback = steered()
        fit([callback], lambda: module, logger=logger, log_every_n_steps=1)
        assert callback.applied_steps + callback.skipped_steps == 16
        assert set(callback.precision_map().values()) >= {"fp16", "int8"}
    finally:
        wandb.finish()
        for name in set(os.environ) - set(before):
            os.environ.pop(name)
    assert any(name.startswith("gradients/") for name in seen)
    assert list(tmp_path.rglob("*.wandb"))


# other libraries


@pytest.mark.parametrize("policy", ["fixed:bf16", "fixed:fp16", "rule"])
def test_peft_lora(policy: str) -> None:
    peft = pytest.importorskip("peft")

    class Lora(Full):
        def __init__(self) -> None:
            super().__init__()
            self.net = peft.get_peft_model(self.net, peft.LoraConfig(r=4, target_modules=["0", "2"]))

    plain = outcome(*fit_with_loader([], Lora))
    assert_identical(plain, outcome(*fit_with_loader([masked()], Lora)))
    module = Lora()
    keys = list(module.state_dict())
    frozen = {name: value.clone() for name, value in module.named_parameters() if not value.requires_grad}
    config = AutoPrecisionConfig(rule=RuleConfig(stable_cv=10.0))
    callback = AutoPrecisionCallback(policy, interval=2, config=config, verbose=False)
    fit_with_loader([callback], lambda: module)
    wanted = policy.removeprefix("fixed:")
    formats = callback.precision_map()
    assert len(formats) == 6
    if wanted != "rule":
        assert set(formats.values()) == {wanted}
    assert list(module.state_dict()) == keys
    assert all(torch.equal(value, frozen[name]) for name, value in module.named_parameters() if name in frozen)
    merged = module.net.merge_and_unload()  # type: ignore[operator]
    assert type(merged[0]) is nn.Linear


def fit_with_loader(callbacks: Sequence[Any], make: Make) -> tuple[Trainer, Plain]:
    seed()
    module = make()
    trainer = quiet(max_epochs=2, callbacks=list(callbacks))
    trainer.fit(module, loader(), loader(16))
    return trainer, module


def test_torchao_float8_layers() -> None:
    """A subclass of Linear with a forward of its own runs through a cast region, or untouched, and says so."""
    float8 = pytest.importorskip("torchao.float8")
    seed()
    module = Plain()
    module.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(module, config=config, module_filter_fn=lambda part, name: name == "net.2")
    kind = type(module.net[2])
    callback = AutoPrecisionCallback("fixed:bf16", verbose=False)
    quiet(max_epochs=1, callbacks=[callback]).fit(module, loader())
    assert type(module.net[2]) is kind
    assert callback.precision_map()["net.0"] == "bf16"
    assert callback.applied_steps == 8


def test_nested_trainer_with_a_callback_of_its_own() -> None:
    """With ``AUTOPREC_AUTO=1`` the Trainer that a hook uses for evaluation has the callback, too."""

    class Evaluates(Net):
        def on_train_epoch_end(self) -> None:
            quiet(callbacks=[masked()]).validate(Net(), verbose=False)

    callback = steered()
    trainer, _ = fit([callback], Evaluates)
    assert callback.applied_steps + callback.skipped_steps == trainer.global_step == 16
