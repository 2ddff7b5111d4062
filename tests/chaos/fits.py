"""One fit of the fault campaign: how it is made from a setting, and everything that it leaves behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    GuardConfig,
    LossScaleConfig,
    RollbackConfig,
    ScriptedController,
)
from autoprec.map_file import save_map
from tests.chaos.control_faults import Erratic, HangingController
from tests.chaos.fault import Fault, Scene
from tests.chaos.faults import FAULTS
from tests.chaos.invariants import Reading
from tests.chaos.models import MODELS, Chaos, loaders
from tests.chaos.schedules import Schedule
from tests.chaos.settings import MAX_SKIPS, SNAPSHOT_EVERY, VARIANTS, Setting
from tests.resumed import CarriesRandomState
from tests.small_fits import differences, fp16_plugin, quiet, seed
from tests.test_no_trace import identities, process_state, random_state, replaced, structure

SCRIPT = {
    1: Action(precision={"*": "bf16"}),
    4: Action(precision={"*.0": "fp16"}, loss_scale=512.0),
    9: Action(precision={"*": "int8"}, clip=2.0),
    14: Action(precision={"*": "bf16", "*norm*": "bf16"}),
    18: Action(precision={"*": "fp32"}),
}


class Sabotage:
    """Hands training steps to the faults of a run and reads the knobs meanwhile."""

    def __init__(self, faults: Sequence[Fault], scene: Scene) -> None:
        self.faults = faults
        self.scene = scene
        self.readings: list[Reading] = []
        self.losses: list[tuple[int, float]] = []  # with their windows
        self.index = -1
        self.trainer: Trainer

    def on_batch(self, index: int, batch: Any) -> Any:
        self.index = index
        self._read()
        for fault in self.faults:
            batch = fault.on_batch(index, batch, self.trainer)
            if batch is None:
                return None
        return batch

    def on_loss(self, index: int, loss: Tensor) -> Tensor:
        for fault in self.faults:
            loss = fault.on_loss(index, loss)
        self.losses.append((self.scene.window, float(loss.detach())))
        return loss

    def _read(self) -> None:
        callback = self.scene.callback
        if callback is None or callback.steering is None:
            return
        size, accumulate = callback.batch_size, self.trainer.accumulate_grad_batches
        knobs = callback.precision_map(), callback.loss_scale, callback.clip_threshold
        self.readings.append(Reading(callback.steering.window, *knobs, size, int(accumulate)))


@dataclass
class Fit:
    """A fit and what it left behind."""

    trainer: Trainer
    module: Chaos
    callback: AutoPrecisionCallback | None
    faults: Sequence[Fault]
    sabotage: Sabotage
    error: BaseException | None
    traces: list[str]
    structure: dict[str, Any]
    random_state: Any

    @property
    def scene(self) -> Scene:
        """What the faults have noted down."""
        return self.sabotage.scene


def make_faults(schedule: Schedule) -> list[Fault]:
    """New faults, as those of another fit have struck already."""
    return [FAULTS[each.fault](each.batch, **each.options) for each in schedule.faults]


def fit(
    setting: Setting,
    faults: Sequence[Fault],
    folder: Path,
    *,
    has_callback: bool = True,
    controller: Erratic | None = None,
    first_seed: int | None = None,
    resume: Path | None = None,
) -> Fit:
    """Trains once.

    Args:
        setting: What is trained.
        faults: What strikes.
        folder: Where files go.
        has_callback: Whether autoprec takes part.
        controller: Who decides, in place of the setting's policy.
        first_seed: Of weights and order, in place of the setting's.
        resume: Checkpoint to go on from.
    """
    start = setting.seed if first_seed is None else first_seed
    seed(start)
    callback = make_callback(setting, folder, controller) if has_callback else None
    scene = Scene(setting, folder, callback)
    sabotage = Sabotage(faults, scene)
    module = MODELS[setting.model](setting.optimizer, setting.has_schedule, sabotage)
    for fault in faults:
        fault.attach(scene, module)
    trainer = sabotage.trainer = make_trainer(setting, folder, callback, faults)
    parts, plugin, before = identities(module), trainer.strategy.precision_plugin, process_state()
    handler, threads = signal.getsignal(signal.SIGINT), set(threading.enumerate())
    error: BaseException | None = None
    try:
        options: dict[str, Any] = {"ckpt_path": resume, "weights_only": True} if resume else {}
        trainer.fit(module, *loaders(MODELS[setting.model], setting.is_resumable, start), **options)
    except (Exception, KeyboardInterrupt, SystemExit) as caught:  # which one it may be is the invariants' business
        error = caught
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning's answer to Ctrl-C ignores the next one
        for fault in faults:
            fault.detach()
    traces = differences(before, process_state())
    traces += [f"{name} is another object" for name in sorted(replaced(parts, identities(module)))]
    traces += [] if trainer.strategy.precision_plugin is plugin else ["the Trainer has another plugin"]
    traces += [
        f"thread {each.name}" for each in set(threading.enumerate()) - threads if not _is_abandoned(each, faults)
    ]
    found = structure(module, trainer)
    return Fit(trainer, module, callback, faults, sabotage, error, traces, found, random_state())


def _is_abandoned(thread: threading.Thread, faults: Sequence[Fault]) -> bool:
    return thread.daemon and any(isinstance(fault, HangingController) and fault.struck for fault in faults)


def make_callback(setting: Setting, folder: Path, controller: Erratic | None) -> AutoPrecisionCallback:
    """The callback of a setting, with a guard that is as short of patience as the run is short."""
    config = AutoPrecisionConfig(
        formats=("fp32", "bf16", "fp16"),
        loss_scale=LossScaleConfig(init_scale=1024.0, growth_interval=8),
        guard=GuardConfig(max_consecutive_skips=MAX_SKIPS, hold=6),
        rollback=RollbackConfig(every=SNAPSHOT_EVERY, quarantine=4),
        decision_timeout_s=0.3 if controller is not None else 60.0,
        **VARIANTS[setting.variant],
    )
    return AutoPrecisionCallback(
        policy=controller or make_policy(setting, folder),
        knobs=setting.knobs,
        interval=4,
        config=config,
        eval_precision=setting.eval_precision,
        history_file=folder / "history.jsonl",
        verbose=False,
    )


def make_policy(setting: Setting, folder: Path) -> Any:
    """What the callback is given as ``policy``."""
    if setting.policy == "mixed":
        return ScriptedController(SCRIPT)
    if setting.policy != "map":
        return setting.policy
    path = folder.parent / "map.yaml"  # the record has its name
    save_map(path, {"*": "bf16"}, None, None)
    return path


def make_trainer(
    setting: Setting, folder: Path, callback: AutoPrecisionCallback | None, faults: Sequence[Fault]
) -> Trainer:
    """The Trainer of a setting."""
    callbacks: list[Callback] = [] if callback is None else [callback]
    callbacks += [each for fault in faults for each in fault.callbacks()]
    options: dict[str, Any] = {"precision": setting.precision}
    if setting.precision == "16-mixed":
        options = {"plugins": [fp16_plugin()]}
    if setting.saves_every:
        files = ModelCheckpoint(
            folder / "checkpoints", filename="{step}", save_top_k=-1, every_n_train_steps=setting.saves_every
        )
        callbacks += [CarriesRandomState(), files]
        options["enable_checkpointing"] = True
    if setting.model != "gan":
        options |= {"accumulate_grad_batches": setting.accumulate, "gradient_clip_val": setting.clip}
    return quiet(
        max_steps=setting.attempts,
        max_epochs=-1,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )
