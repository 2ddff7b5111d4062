"""One run of the transfer study: a real ``Trainer.fit`` that is charged step by step and evaluated at fixed steps.

The held-out loss is that of the weights in float32 outside the Trainer, so that no way of training is judged in its own
format. What was reached within a budget of time follows from the points of the run (``transfer_report``).
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn import functional as F

from autoprec import AutoPrecisionCallback, NonFiniteTrainingError
from autoprec.envs.reward import is_diverged
from autoprec.formats import get_format
from autoprec.units import find_units
from benchmarks.convergence_runs import quiet
from benchmarks.transfer_arms import ARMS, INTERVAL, RULE, Arm
from benchmarks.transfer_charge import MEASURED, SIMULATED, StepCharge, profile_of, unit_shares
from benchmarks.transfer_tasks import Task

POINTS = 20
"""Points of a held-out curve within the steps of the twin; they go on at that distance."""
MOST_STEPS = 4
"""Most steps of a run, in units of the twin's."""
LIMIT_S = 45.0
"""Most seconds of a run."""
Formats = Callable[[], Mapping[str, str]]


@dataclass(eq=False)
class Meter(pl.Callback):
    """Charges every batch, evaluates at fixed ones, and ends the run where all of its budgets are spent.

    Must stand behind autoprec's callback, so that decisions are charged and what is read is what they led to. The
    Trainer's ``max_steps`` follows from the share of the budget that is spent, so that a policy which asks how much of
    the run is over gets that.

    Args:
        plain: A copy of the module that weights are loaded into for an evaluation.
        task: What is trained.
        formats: Returns the format of each unit.
        shares: Share of each unit in the multiplications of a step.
        charges: Simulated charges by name.
        budgets: What the run may spend by charge; it ends when all of them are spent.
    """

    plain: pl.LightningModule
    task: Task
    formats: Formats
    shares: Mapping[str, float]
    charges: Mapping[str, StepCharge]
    budgets: Mapping[str, float]
    spent: dict[str, float] = field(default_factory=dict)
    points: list[list[float | None]] = field(default_factory=list)
    maps: list[list[Any]] = field(default_factory=list)
    batch_sizes: list[list[int]] = field(default_factory=list)
    batches: int = 0
    backoffs: int = 0
    bits: float = 0.0
    _map: dict[str, str] = field(default_factory=dict)
    _last_s: float = 0.0
    _last_scale: float = 0.0
    _deadline: float = math.inf

    @property
    def every(self) -> int:
        """Batches between evaluations."""
        return max(1, self.task.steps // POINTS)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates the first weights and starts the clock."""
        self._deadline = time.monotonic() + LIMIT_S
        self.spent = dict.fromkeys((MEASURED, *self.charges), 0.0)
        self._note_scale(trainer)
        self._evaluate(pl_module)
        self._last_s = time.process_time()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Reads the formats of the batch that begins."""
        self._stop_clock()
        now = self.formats()
        if changed := {unit: name for unit, name in now.items() if self._map.get(unit) != name}:
            self._map.update(changed)
            self.maps.append([self.batches, changed])
        self._last_s = time.process_time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Charges the batch."""
        self._stop_clock()
        self._charge(len(batch[0]))
        self._note_scale(trainer)
        if self.batches % self.every == 0:
            self._evaluate(pl_module)
            self._set_end(trainer)
        self._last_s = time.process_time()

    def _stop_clock(self) -> None:
        self.spent[MEASURED] += time.process_time() - self._last_s

    def _charge(self, size: int) -> None:
        self.batches += 1
        if not self.batch_sizes or self.batch_sizes[-1][1] != size:
            self.batch_sizes.append([self.batches - 1, size])
        for name, charge in self.charges.items():
            self.spent[name] += charge.step(self._map, size / self.task.batch_size)
        self.bits += sum(share * get_format(self._map[unit]).bits for unit, share in self.shares.items())

    def _note_scale(self, trainer: pl.Trainer) -> None:
        """GradScaler lowers its scale when it skips a step, and only then."""
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            scale = float(scaler.get_scale())
            self.backoffs += scale < self._last_scale
            self._last_scale = scale

    def _evaluate(self, module: pl.LightningModule) -> None:
        loss, accuracy = evaluate(self.plain, module, self.task)
        self.points.append([self.batches, loss, accuracy, *(round(spent, 4) for spent in self.spent.values())])

    def _set_end(self, trainer: Any) -> None:
        share = min(self.spent[name] / budget for name, budget in self.budgets.items())
        is_over = self.batches >= MOST_STEPS * self.task.steps or time.monotonic() > self._deadline
        step = trainer.global_step
        # never before the next evaluation, which is where the run is ended
        expected = max(math.ceil(step / share), step + self.every + 1) if share > 0 else MOST_STEPS * self.task.steps
        trainer.fit_loop.epoch_loop.max_steps = step if share >= 1.0 or is_over else expected


def evaluate(plain: pl.LightningModule, module: pl.LightningModule, task: Task) -> tuple[float | None, float]:
    """Returns held-out loss, ``None`` where it is not finite, and accuracy of a module's weights in float32.

    Args:
        plain: A copy to load them into.
        module: The module.
        task: What it trains.
    """
    _, held_out = task.material()
    plain.load_state_dict(module.state_dict())
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        logits, labels = task.answer(plain, held_out)
        loss = float(F.cross_entropy(logits, labels))
    accuracy = float((logits.argmax(1) == labels).float().mean())
    return loss if math.isfinite(loss) else None, round(accuracy, 5)


class Prices(pl.Callback):
    """Gives a run the costs of a simulated device, as a calibration there would have measured them.

    Args:
        steered: Callback of the run.
        charge: What the device charges.
    """

    def __init__(self, steered: AutoPrecisionCallback, charge: StepCharge) -> None:
        self._steered, self._charge = steered, charge

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the table of costs; with calibration switched off nothing else writes to it."""
        assert self._steered.steering is not None, "fit has begun"
        costs = self._steered.steering.costs
        costs.table = self._charge.table()
        self._charge.note_step(costs.model)


def run(task: Task, arm: Arm, charge: str | None, seed: int, budgets: Mapping[str, float]) -> dict[str, Any]:
    """Trains once and returns what JSON can hold.

    Args:
        task: What is trained.
        arm: How.
        charge: The charge that a policy decides for; ``None`` for a static arm, which is the same for all of them.
        seed: Seed of the first weights and of the order of the samples.
        budgets: What the run may spend by charge; it ends when all of them are spent.
    """
    started = time.monotonic()
    torch.manual_seed(seed)
    module = task.model()
    plain: Any = copy.deepcopy(module).eval()
    shares = shares_of(task, plain)
    simulated = [name for name in SIMULATED if charge in (None, name)]  # a map for one device may not exist on another
    charges = {name: StepCharge(profile_of(name), shares) for name in simulated}
    callback = arm.callback(charge or MEASURED)
    meter = Meter(plain, task, _formats_of(arm, callback, shares), shares, charges, budgets)
    callbacks: list[Any] = [meter] if callback is None else [callback, meter]
    if callback is not None and charge in charges:
        callbacks.insert(1, Prices(callback, charges[charge]))
    error = _fit(module, task, callbacks, arm.trainer_options(), seed)
    return {
        "error": error,
        "charges": [*meter.spent],
        "points": meter.points,
        "diverged": _has_diverged(meter.points, error),
        "batches": meter.batches,
        "skipped": meter.backoffs if callback is None else callback.skipped_steps,
        "rollbacks": 0 if callback is None else sum(one.knob == "rollback" for one in callback.history),
        "mean_bits": round(meter.bits / max(1, meter.batches), 3),
        "maps": meter.maps,
        "batch_sizes": meter.batch_sizes,
        "emulated": _emulated(module, meter.maps),
        "shares": {unit: round(share, 5) for unit, share in shares.items()},
        "wall_s": round(time.monotonic() - started, 1),
    }


def measure_prices(task: Task) -> dict[str, Any]:
    """Times the layers of a task in their formats, which leaves the times in the cache that later runs read.

    Args:
        task: What is trained.
    """
    torch.manual_seed(0)
    module = task.model()
    plain: Any = copy.deepcopy(module).eval()
    (arm,) = [arm for arm in ARMS if arm.name == RULE]
    callback = arm.callback(MEASURED)
    assert callback is not None
    options = {**arm.trainer_options(), "max_steps": 3 * INTERVAL}
    error = _fit(module, task, [callback], options, seed=0)
    assert callback.steering is not None
    table = callback.steering.costs.table.to_dict()
    times = {unit: {name: round(cost[0], 4) for name, cost in formats.items()} for unit, formats in table.items()}
    return {"error": error, "ms": times, "shares": shares_of(task, plain)}


def shares_of(task: Task, module: pl.LightningModule) -> dict[str, float]:
    """Returns the share of each unit in the multiplications of a step.

    Args:
        task: What is trained.
        module: Its module.
    """
    _, held_out = task.material()
    return unit_shares(module, task.answer, tuple(part[: task.batch_size] for part in held_out))


def _formats_of(arm: Arm, callback: AutoPrecisionCallback | None, shares: Mapping[str, float]) -> Formats:
    if callback is None or arm.is_static:
        fixed = dict.fromkeys(shares, arm.format)
        return lambda: fixed

    def current() -> Mapping[str, str]:
        assert callback.steering is not None, "fit has begun"
        return callback.steering.knobs.formats

    return current


def _fit(
    module: pl.LightningModule, task: Task, callbacks: list[Any], options: dict[str, Any], seed: int
) -> str | None:
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some arms are meant to go wrong
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # lightning 2.6.6 with torch 2.13
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"max_steps": MOST_STEPS * task.steps, **options},
        )
        try:
            trainer.fit(module, task.loader(seed))
        except RuntimeError as stopped:
            return f"{type(stopped).__name__}: {stopped}"
    return None


def _has_diverged(points: Sequence[Sequence[float | None]], error: str | None) -> bool:
    losses = np.array([math.nan if point[1] is None else point[1] for point in points])
    is_stopped = error is not None and error.startswith(NonFiniteTrainingError.__name__)
    return is_stopped or bool(is_diverged(losses, losses[:1]).any())


def _emulated(module: pl.LightningModule, maps: Sequence[Sequence[Any]]) -> list[str]:
    """Formats that some unit ran in and that this machine does not compute itself for its kind of layer."""
    units = {unit.name: unit for unit in find_units(module)}
    used = {(unit, name) for _, changed in maps for unit, name in changed.items() if units[unit].has_matrix}
    return sorted({name for unit, name in used if units[unit].is_emulated(name)})
