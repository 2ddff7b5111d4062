"""What ``autoprec calibrate`` measures: a short fit under the table policy, whose costs are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, CalibrationConfig, __version__
from autoprec.commands.one_fit import OneFit
from autoprec.compare.targets import Target
from autoprec.cost_table import CostTable


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Args:
        formats: Formats to compare, ``None`` for what policies choose from by default.
        budget_s: Seconds that timing may take.
        steps: Most optimizer steps.
        threads: Threads for one operation, ``None`` for what torch uses.
        cache: Whether results are read from disk and kept there.

    Raises:
        ValueError: If a format is unknown.
    """

    formats: tuple[str, ...] | None = None
    budget_s: float = 20.0
    steps: int = 12
    threads: int | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> AutoPrecisionConfig:
        """Returns the settings of the callback."""
        calibration = CalibrationConfig(enabled=True, budget_s=self.budget_s, cache=self.cache)
        return AutoPrecisionConfig(formats=self.formats, calibration=calibration)


def measure(target: Target, settings: Settings, prints_to_stderr: bool) -> dict[str, Any]:
    """Returns costs and choices of the units of a target, as JSON can hold them.

    Args:
        target: What is trained.
        settings: What to measure.
        prints_to_stderr: Whether standard output is left to the command.

    Raises:
        TargetError: If the target does not train.
    """
    callback = AutoPrecisionCallback("table", interval=1, config=settings.config(), verbose=False)
    callback.is_of_command = True  # type: ignore[attr-defined]
    found: dict[str, Any] = {}

    def after_fit(trainer: Any, arguments: dict[str, Any]) -> None:
        found.update(_document(target, settings, callback, trainer))

    fit = OneFit(target, lambda: [callback, _Stop(callback, settings.steps)], {}, after_fit)
    fit.run(settings.threads, prints_to_stderr)
    return found


class _Stop(Callback):
    """Ends the fit once the costs are there and the policy has decided on them, or after some steps."""

    def __init__(self, steered: AutoPrecisionCallback, steps: int) -> None:
        self._steered = steered
        self._steps = steps
        self._after: int | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steering = self._steered.steering
        if steering is None:
            return
        if steering.costs.table and self._after is None:
            self._after = steering.window + 2  # another window is measured, and a decision follows it
        if steering.window >= min(self._steps, self._after or self._steps):
            trainer.should_stop = True


def _document(target: Target, settings: Settings, callback: AutoPrecisionCallback, trainer: Any) -> dict[str, Any]:
    steering = callback.steering
    assert steering is not None, "a fit has ended"
    costs, calibrator = steering.costs, steering.costs.calibrator
    chosen, units = callback.precision_map(), steering.knobs.units
    known = {name: _unit(name, costs.table, costs.workloads.get(name, {}), chosen[name]) for name in costs.table.units}
    fastest = _fastest(costs.table)
    without = {
        name: unit.reason or "no layer of a kind that can be timed alone"
        for name, unit in units.items()
        if name not in known and unit.has_matrix
    }
    return {
        "target": target.text,
        "autoprec": __version__,
        "torch": torch.__version__,
        "device": str(trainer.strategy.root_device),
        "threads": torch.get_num_threads(),
        "seconds": calibrator.spent_s,
        "measured": len(calibrator.measured),
        "from_cache": len(calibrator.from_cache),
        "notes": list(calibrator.notes),
        "cache": str(_cache_folder()) if settings.cache else None,
        "units": {name: {**each, "kind": units[name].kind} for name, each in known.items()},
        "not_timed": without,
        "attention": dict(costs.attention),
        "map_ms": {
            "fp32": costs.table.map_ms(dict.fromkeys(known, "fp32")),
            "fastest": costs.table.map_ms(fastest),
            "chosen": costs.table.map_ms(chosen),
        },
    }


def _unit(name: str, table: CostTable, workloads: Mapping[Any, int], chosen: str) -> dict[str, Any]:
    offered = table.formats(name)
    formats: dict[str, Any] = {}
    for each in offered:
        cost = table.cost(name, each)
        assert cost is not None, "the table names it"
        why = table.why_too_slow(name, each, offered)
        formats[each] = {**cost._asdict(), "pays": why is None, "why_not": why}
    return {"calls": {str(workload): count for workload, count in workloads.items()}, "formats": formats} | {
        "choice": chosen
    }


def _fastest(table: CostTable) -> dict[str, str]:
    return {name: min(table.formats(name), key=lambda each: table.unit_ms(name, each) or 0.0) for name in table.units}


def _cache_folder() -> Any:
    from autoprec.calibration.cache import cache_folder

    return cache_folder()
