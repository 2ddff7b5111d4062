"""Does a short calibration choose what a long measurement would, and do its costs predict how long steps take?

    python -m benchmarks.calibrate_check                  all rows of the whole-step benchmark, a few minutes
    python -m benchmarks.calibrate_check --quick          three rows, shorter
    python -m benchmarks.calibrate_check --row gpt-2-128

Each row trains in one fit in float32, then in bfloat16, then with every other layer in bfloat16. The fit calibrates
with its normal budget at the first decision and predicts the step time of each following map before it runs. With one
thread steps are timed in the thread's processor time, so that other processes do not count. Afterwards every workload
is measured long and exhaustively, and the formats that calibration finds fastest are judged by that. A pick is right if
its long time is within 3 % of the best. The regret of a row is the time that its wrong picks cost, as a share of its
step in float32. At last a model of 200 layers is calibrated once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, CalibrationConfig, Controller
from autoprec.calibration.layer_runs import Choice, LayerRuns
from autoprec.calibration.pricing import Pricing
from autoprec.calibration.timing import make_lap
from autoprec.calibration.workloads import Workload
from autoprec.cost_table import NOISE
from autoprec.cost_watch import CostWatch
from benchmarks.workloads import WORKLOADS

QUICK_ROWS = ("mlp-512-64", "gpt-2-128", "cnn-32")
FORMATS = ("fp32", "bf16", "int8")
LAYERS = 200


@dataclass
class Row:
    """What one row has shown.

    Attributes:
        name: Name of the row.
        picks: For each workload of each unit whether its pick was right.
        regret: Time that wrong picks cost, as a share of the step.
        errors: Relative errors of predicted step times, positive where a step was faster.
        seconds: How long calibration took.
    """

    name: str
    picks: list[bool] = field(default_factory=list)
    regret: float = 0.0
    errors: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line of the table."""
        errors = ", ".join(f"{error:+.0%}" for error in self.errors)
        right = f"{sum(self.picks)} of {len(self.picks)} picks right"
        return f"{self.name:<14} {right}, regret {self.regret:.1%}, predictions off by {errors}, {self.seconds:.1f} s"


class Tour(Controller):
    """Leads a fit through maps and notes predicted and measured step times.

    Args:
        maps: Formats by pattern, one mapping for each decision but the last.
    """

    name = "tour"

    def __init__(self, maps: Sequence[Mapping[str, str]]) -> None:
        self.callback: AutoPrecisionCallback | None = None
        self.errors: list[float] = []
        self.first_step_ms = 0.0
        self._maps = list(maps)
        self._predicted_ms: float | None = None

    def decide(self, observation: Any) -> Action | None:
        """Asks for the next map."""
        assert self.callback is not None
        assert self.callback.steering is not None
        costs, formats = self.callback.steering.costs, self.callback.precision_map()
        step_ms = costs.step_ms
        assert step_ms is not None, "there are enough steps between two decisions"
        self.first_step_ms = self.first_step_ms or step_ms
        if self._predicted_ms is not None:
            self.errors.append((self._predicted_ms - step_ms) / step_ms)
        if not self._maps:
            return None
        wanted = self._maps.pop(0)
        names = list(costs.table.units)
        chosen = wanted or {name: ("bf16", "fp32")[index % 2] for index, name in enumerate(names)}
        following = {name: chosen.get(name, chosen.get("*", format_name)) for name, format_name in formats.items()}
        self._predicted_ms = costs.model.predict_ms(costs.table.map_ms(following))
        return Action(precision=chosen)


def calibrated_fit(
    module: pl.LightningModule, batches: Sequence[Any], steps: int, tour: Tour
) -> tuple[CostWatch, AutoPrecisionCallback]:
    """Trains a module along a tour and returns what is known of its costs."""
    config = AutoPrecisionConfig(formats=FORMATS, calibration=CalibrationConfig(enabled=True, cache=False))
    callback = tour.callback = AutoPrecisionCallback(
        tour, knobs=("precision",), interval=steps, config=config, verbose=False
    )
    data = [batches[index % len(batches)] for index in range(3 * (steps + 1) + 1)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback], **quiet)  # type: ignore[arg-type]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with warnings.catch_warnings(), mock.patch("autoprec.cost_watch.perf_counter", clock):
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert callback.steering is not None
    return callback.steering.costs, callback


def long_ms(workload: Workload, choices: Sequence[Choice], rounds: int, lap_s: float) -> dict[Choice, float]:
    """Times all choices of a workload in turns, long."""
    device = torch.device("cpu")
    lap, runs = make_lap(device), LayerRuns(workload, device)
    calls = {choice: runs.in_turn(choice) for choice in choices}
    counts: dict[Choice, int] = {}
    for choice, call in calls.items():
        lap(call, 2)
        counts[choice] = max(1, min(500, round(lap_s / max(lap(call, 1), 1e-9))))
    laps: dict[Choice, list[float]] = {choice: [] for choice in choices}
    order = list(choices)
    for _ in range(rounds):
        for choice in order:
            laps[choice].append(lap(calls[choice], counts[choice]))
        order.reverse()
    return {choice: statistics.median(seconds) * 1e3 for choice, seconds in laps.items()}


def measure_row(name: str, steps: int, rounds: int, lap_s: float) -> Row:
    """Trains a row, then judges its calibration."""
    row, workload = Row(name), WORKLOADS[name]
    tour = Tour([{"*": "bf16"}, {}])
    module = workload.make_module(lambda params: AdamW(params, 1e-4))
    costs, callback = calibrated_fit(module, workload.make_batches(), steps, tour)
    row.errors, row.seconds = tour.errors, costs.calibrator.spent_s
    assert callback.steering is not None
    units = callback.steering.knobs.units
    pricing = Pricing(units, {name: formats_of(units[name].legal) for name in costs.table.units}, "cpu", True)
    lost_ms = 0.0
    for each, choices in pricing.demand(costs.workloads).items():
        known = {choice: cost.ms for choice in choices if (cost := costs.calibrator.cost(each, choice)) is not None}
        if len(known) < 2:
            continue
        times = long_ms(each, list(known), rounds, lap_s)
        pick, best = min(known, key=lambda choice: known[choice]), min(times.values())
        count = sum(counts[each] for counts in costs.workloads.values())
        row.picks += [times[pick] <= best * (1.0 + NOISE)] * count
        lost_ms += count * (times[pick] - best)
    row.regret = lost_ms / tour.first_step_ms
    return row


def formats_of(legal: Sequence[str]) -> list[str]:
    """Those of the formats in question that are legal, widest first."""
    return [name for name in FORMATS if name in legal]


class Deep(pl.LightningModule):
    """200 linear layers of six widths, on 128 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [(64, 96, 128, 192, 256, 384)[index * 7 % 6] for index in range(LAYERS + 1)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Runs all layers, each on what the one before returned."""
        x = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()

    def configure_optimizers(self) -> SGD:
        """SGD."""
        return SGD(self.parameters(), 1e-3)


def last_line(rows: Sequence[Row], seconds: float) -> str:
    """Sums up all rows.

    Args:
        rows: The rows.
        seconds: How long calibration of the deep model took.
    """
    picks = [pick for row in rows for pick in row.picks]
    errors = [abs(error) for row in rows for error in row.errors]
    share, regret = sum(picks) / max(len(picks), 1), max((row.regret for row in rows), default=0.0)
    error = statistics.median(errors) if errors else float("nan")
    return f"calibrate: picks_right={share:.3f} regret={regret:.4f} prediction_error={error:.3f} seconds={seconds:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rows, shorter")
    parser.add_argument("--row", nargs="+", choices=list(WORKLOADS), help="only these rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    names = options.row or (QUICK_ROWS if options.quick else list(WORKLOADS))
    steps, rounds, lap_s = (10, 7, 0.005) if options.quick else (16, 11, 0.02)
    rows = []
    for name in names:
        rows.append(measure_row(name, steps, rounds, lap_s))
        print(rows[-1], flush=True)
    costs, _ = calibrated_fit(Deep(), [torch.randn(128, 64)], 10, Tour([{"*": "bf16"}, {}]))
    shapes = len(costs.calibrator.measured)
    print(f"{LAYERS} layers of {shapes} shapes took {costs.calibrator.spent_s:.1f} s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([vars(row) for row in rows], file, indent=1)
    print(last_line(rows, costs.calibrator.spent_s))


if __name__ == "__main__":
    main()
