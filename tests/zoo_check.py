"""What must hold when a model of the zoo trains under a format map: one function, ``check``, used by tests and scripts.

Each run is compared with a plain bf16-mixed run of the same model, seed and data in the same process. Whatever plain
training leaves behind on the module, the optimizers and the random generators is right; anything else is a trace.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec import Action, AutoPrecisionCallback, Decision, ScriptedController
from autoprec.units import Unit, find_units
from tests.zoo_models import ZOO, ZooModel

MAPS = ("bf16", "fp16", "int8", "mixed")
STEPS = 20
SEED = 7
_EPOCHS = 2
_MIDDLE = 13
_MIXED = ("fp32", "bf16", "fp16", "int8")
_LOSS_TOLERANCE = 0.05


@dataclass
class Result:
    """One model under one map. ``failures`` is empty if everything held, ``raised`` is what the guard did and why."""

    model: str
    map: str
    failures: list[str] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)
    refused: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def expect(self, holds: bool, failure: str) -> None:
        if not holds:
            self.failures.append(failure)


@dataclass
class Fit:
    """What one fit left behind."""

    module: LightningModule
    trainer: Trainer
    watch: Watch
    random_state: dict[str, Any]
    is_plugin_back: bool


class Watch(Callback):
    """Collects losses, and looks at the module and saves a checkpoint in the middle of training."""

    def __init__(self, path: Path, steered: AutoPrecisionCallback | None = None) -> None:
        self.path = path
        self.steered = steered
        self.losses: list[float] = []
        self.layout: dict[str, Any] = {}
        self.weights: dict[str, Tensor] = {}
        self.gradients: set[torch.dtype] = set()
        self.precision_map: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients |= {p.grad.dtype for p in pl_module.parameters() if p.grad is not None}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if len(self.losses) == _MIDDLE * trainer.accumulate_grad_batches:
            self.layout = layout_of(pl_module)
            self.weights = {key: value.clone() for key, value in pl_module.state_dict().items()}
            self.precision_map = dict(self.steered.precision_map()) if self.steered else {}
            trainer.save_checkpoint(self.path)


def check(model: str, map_name: str, folder: Path) -> Result:
    """Trains one model under one map and returns everything that did not hold.

    ``map_name`` is ``"mixed"`` (a seeded format for every unit, drawn again in the middle) or the name of a format,
    which is asked for with the pattern ``"*"``. Errors of the fit itself are raised.
    """
    entry, result = ZOO[model], Result(model, map_name)
    reference = plain_fit(model, folder)
    process = state_of_process()
    script = script_for(model, map_name)
    callback = AutoPrecisionCallback(policy=ScriptedController(steps=script), knobs=("precision", "loss_scale"))
    fit = _fit(entry, folder / f"{model}-{map_name}.ckpt", callback)
    result.skipped = callback.skipped_steps
    result.refused = sum(decision.outcome == "refused" for decision in callback.history)
    result.raised = {str(d.unit): d.reason for d in callback.history if is_raise(d)}
    result.formats = dict(Counter(fit.watch.precision_map.values()))
    _check_numbers(result, fit, reference)
    _check_layout(result, fit, entry)
    _check_map(result, fit, callback, script)
    _check_checkpoints(result, fit, entry, folder)
    _check_teardown(result, fit, reference, process)
    return result


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what Lightning and transformers say about small data and missing GPUs; other warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for message in ("The '.*' does not have many workers", ".isinstance.treespec, LeafSpec"):
            warnings.filterwarnings("ignore", message)
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@lru_cache(maxsize=2)
def plain_fit(model: str, folder: Path) -> Fit:
    """The same training as static bf16-mixed."""
    return _fit(ZOO[model], folder / f"{model}-plain.ckpt", None)


def script_for(model: str, map_name: str) -> dict[int, Action]:
    """The actions of a map, by optimizer window."""
    if map_name != "mixed":
        return {0: Action(precision={"*": map_name})}
    generator = random.Random(zlib.crc32(model.encode()))
    names = [unit.name for unit in find_units(build(ZOO[model]))]
    return {
        step: Action(precision={name: generator.choice(_MIXED) for name in names}) for step in (0, STEPS // _EPOCHS)
    }


def build(entry: ZooModel) -> LightningModule:
    """A fresh module with the same weights each time; leaves the generators seeded."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return entry.build()


def _fit(entry: ZooModel, path: Path, callback: AutoPrecisionCallback | None) -> Fit:
    module, watch = build(entry), Watch(path, callback)
    trainer = Trainer(
        accelerator="cpu",
        precision="32-true" if callback else "bf16-mixed",
        max_epochs=_EPOCHS,
        limit_train_batches=STEPS // _EPOCHS * entry.trainer.get("accumulate_grad_batches", 1),
        limit_val_batches=2,
        num_sanity_val_steps=0,
        callbacks=[callback, watch] if callback else [watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path.parent,
        **entry.trainer,
    )
    plugin = trainer.strategy.precision_plugin
    trainer.fit(module, entry.batches())
    return Fit(module, trainer, watch, state_of_generators(), trainer.strategy.precision_plugin is plugin)


def _check_numbers(result: Result, fit: Fit, reference: Fit) -> None:
    losses = fit.watch.losses
    bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    result.expect(not bad, f"loss not finite in batches {bad}")
    result.expect(len(losses) == len(reference.watch.losses), f"trained {len(losses)} batches")
    broken = [key for key, value in fit.module.state_dict().items() if not bool(torch.isfinite(value).all())]
    result.expect(not broken, f"state not finite: {broken}")
    result.expect(fit.watch.gradients <= {torch.float32}, f"user code saw gradients in {fit.watch.gradients}")
    result.expect(fit.trainer.global_step == reference.trainer.global_step, f"global_step {fit.trainer.global_step}")
    initial = build(ZOO[result.model]).state_dict()
    moved = any(not torch.equal(value, initial[key]) for key, value in fit.module.state_dict().items())
    result.expect(moved, "no weight has moved")
    if result.map == "bf16" and losses:
        ours, static = losses[0], reference.watch.losses[0]
        close = abs(ours - static) <= _LOSS_TOLERANCE * max(abs(static), 0.1)
        result.expect(close, f"first loss {ours:.5f}, static bf16-mixed {static:.5f}")


def _check_layout(result: Result, fit: Fit, entry: ZooModel) -> None:
    before = layout_of(build(entry))
    for moment, layout in (("in", fit.watch.layout), ("after", layout_of(fit.module))):
        result.failures.extend(f"state_dict {moment} fit: {text}" for text in differences(before, layout))


def _check_map(result: Result, fit: Fit, callback: AutoPrecisionCallback, script: Mapping[int, Action]) -> None:
    final = callback.precision_map()
    result.expect(bool(fit.watch.precision_map), "no precision map in fit")
    result.expect(bool(final), "no precision map after fit")
    units = find_units(fit.module)
    names = {name for unit in units for name in unit.names}
    layers = {name for name, module in fit.module.named_modules() if type(module) in (nn.Linear, nn.Conv2d)}
    result.expect(layers <= names, f"layers that belong to no unit: {sorted(layers - names)}")
    wanted = script[max(script)].precision or {}
    for unit in units:
        asked = wanted.get(unit.name, wanted.get("*") if unit.has_matrix and unit.reason is None else None)
        result.expect(unit.name in final, f"unit {unit.name} is not in the precision map")
        if asked is not None and unit.name in final:
            result.failures.extend(_check_unit(unit, asked, fit.watch.precision_map.get(unit.name), callback))


def _check_unit(unit: Unit, asked: str, got: str | None, callback: AutoPrecisionCallback) -> Iterable[str]:
    """A unit runs in what was asked for, or the history says why not."""
    record = [d for d in callback.history if d.knob == "precision" and d.unit == unit.name]
    if asked not in unit.legal:
        refused = any(d.outcome == "refused" and d.requested == asked and d.reason for d in record)
        if got == asked or not refused:
            yield f"unit {unit.name}: illegal {asked} gave {got}, history {[d.outcome for d in record]}"
        return
    # the guard may hold a unit that it raised before
    if any(d.outcome == "refused" and d.requested == asked for d in record) and not any(map(is_raise, record)):
        yield f"unit {unit.name}: legal {asked} was refused: {record[-1].reason}"
    elif got != asked and not any(d.applied == got and d.reason for d in record):
        yield f"unit {unit.name}: {asked} gave {got} without a record"


def is_raise(decision: Decision) -> bool:
    return decision.knob == "precision" and decision.outcome == "applied" and decision.reason.startswith("guard")


def _check_checkpoints(result: Result, fit: Fit, entry: ZooModel, folder: Path) -> None:
    """Both checkpoints load into a plain model, which then computes what the trained one does."""
    after = folder / f"{result.model}-{result.map}-after.ckpt"
    fit.trainer.save_checkpoint(after)
    for moment, path, weights in (
        ("in", fit.watch.path, fit.watch.weights),
        ("after", after, fit.module.state_dict()),
    ):
        fresh = build(entry)
        fresh.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
        wrong = [key for key, value in fresh.state_dict().items() if not torch.equal(value, weights[key])]
        result.expect(not wrong, f"checkpoint {moment} fit holds other values: {wrong}")
        path.unlink()
    batch = next(iter(entry.batches()))
    trained, plain = fit.module.eval(), fresh.eval()
    with torch.no_grad():
        ours, theirs = entry.probe(trained, batch), entry.probe(plain, batch)
    result.expect(
        torch.equal(ours, theirs), f"after fit the module computes {ours.item()}, a plain one {theirs.item()}"
    )
    result.expect(ours.dtype is torch.float32, f"after fit the loss is {ours.dtype}")


def _check_teardown(result: Result, fit: Fit, reference: Fit, process: Mapping[str, Any]) -> None:
    result.expect(fit.is_plugin_back, f"the precision plugin was not put back: {fit.trainer.strategy.precision_plugin}")
    parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("module", traces_of(reference.module), traces_of(fit.module)),
        ("optimizer", traces_of_optimizers(reference.trainer), traces_of_optimizers(fit.trainer)),
        ("process", process, state_of_process()),
        ("random generators", reference.random_state, fit.random_state),
    ]
    for part, expected, found in parts:
        result.failures.extend(f"{part} after fit: {text}" for text in differences(expected, found))


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Names every key whose value differs, the first five in words."""
    keys = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    texts = [f"{key} is {found.get(key)!s:.120}, expected {expected.get(key)!s:.120}" for key in keys[:5]]
    return [*texts, f"and {len(keys) - 5} more"] if len(keys) > 5 else texts


def layout_of(module: nn.Module) -> dict[str, Any]:
    """Keys, shapes and dtypes of the state dict, in order, and of the parameters."""
    layout: dict[str, Any] = {key: (tuple(v.shape), v.dtype) for key, v in module.state_dict().items()}
    layout["(order)"] = list(module.state_dict())
    layout["(parameters)"] = [(name, p.dtype, p.requires_grad, type(p)) for name, p in module.named_parameters()]
    return layout


def traces_of(module: nn.Module) -> dict[str, Any]:
    """Where a tool can leave something behind on a module: classes, attributes, hooks."""
    traces: dict[str, Any] = {}
    for name, child in module.named_modules():
        traces[f"class of {name or 'the root'}"] = type(child)
        traces[f"attributes of {name or 'the root'}"] = sorted(vars(child))
        traces[f"hooks of {name or 'the root'}"] = {k: len(v) for k, v in vars(child).items() if "_hooks" in k and v}
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        traces[f"parameter {name}"] = (
            sorted(vars(parameter)),
            [len(group or ()) for group in hooks],
            getattr(parameter, "grad_dtype", None),
            None if parameter.grad is None else parameter.grad.dtype,
        )
    return traces


def traces_of_optimizers(trainer: Trainer) -> dict[str, Any]:
    traces: dict[str, Any] = {}
    for index, optimizer in enumerate(trainer.strategy.optimizers):
        traces[f"{index} class"] = type(optimizer)
        traces[f"{index} attributes"] = sorted(vars(optimizer))
        traces[f"{index} hooks"] = {k: len(v) for k, v in vars(optimizer).items() if k.endswith("_hooks") and v}
        traces[f"{index} state"] = [
            {key: getattr(value, "dtype", type(value)) for key, value in state.items()}
            for state in optimizer.state.values()
        ]
        traces[f"{index} groups"] = [sorted(group) for group in optimizer.param_groups]
    for index, config in enumerate(trainer.strategy.lr_scheduler_configs):
        traces[f"schedule {index}"] = (type(config.scheduler), sorted(vars(config.scheduler)))
    return traces


def state_of_generators() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "python": zlib.crc32(repr(random.getstate()).encode()),
        "numpy": zlib.crc32(repr((numpy_state[1].tolist(), numpy_state[2:])).encode()),
    }


# of progress bars and of tests that start processes; they come and go on their own
_FOREIGN_THREADS = {"tqdm_monitor", "child-process-observer"}


def state_of_process() -> dict[str, Any]:
    """Global flags, environment, mode stacks and functions that a tool may replace."""
    state: dict[str, Any] = {
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "autocast dtype": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": (torch.get_num_threads(), sorted({t.name for t in threading.enumerate()} - _FOREIGN_THREADS)),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "environment": dict(os.environ),
    }
    for owner in (torch, F, Tensor, nn.Module, nn.Linear, nn.Conv2d, nn.Embedding, nn.LSTM, torch.optim.Optimizer):
        for name, value in list(vars(owner).items()):
            if callable(value) and not isinstance(value, type):
                state[f"{owner.__name__}.{name}"] = id(value)
    hooks = vars(nn.modules.module)
    state["global module hooks"] = {
        k: len(v) for k, v in hooks.items() if k.startswith("_global") and hasattr(v, "__len__")
    }
    return state
