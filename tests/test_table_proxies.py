"""A live run that is told what a proxy is told proposes what the proxy's table does.

Time budget: 10 s.
"""

from __future__ import annotations

import math

import numpy as np

from autoprec import AutoPrecisionConfig, TableSettings
from autoprec.envs.engine import FORMATS
from autoprec.envs.observing import GRADIENT_LIMIT, NEEDS_SCALE
from autoprec.envs.proxies import Bank, Distribution
from autoprec.envs.simulation import Simulation
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import propose_levels, propose_scale
from autoprec.table_policy import TableController
from tests.kernels import needs_cpu_kernels

pytestmark = needs_cpu_kernels


def readings_of(s: Simulation, run: int) -> tuple[list[UnitReading], GlobalReading]:
    ladder = [int(index) for index in s.ladder[run] if index >= 0]
    errors, costs, units = s.worst_errors()[run], s.table.cost[run], []
    for unit in range(s.tasks[run].units):
        now = costs[unit, s.formats[run, unit]]
        units.append(
            UnitReading(
                name=str(unit),
                format=FORMATS[s.formats[run, unit]],
                legal=tuple(FORMATS[index] for index in ladder),
                grad_amax=float(s.windows["gradient_amax"][run, unit]),
                errors={FORMATS[index]: float(errors[unit, index]) for index in ladder},
                times={FORMATS[index]: float(costs[unit, index] / now) for index in ladder},
            )
        )
    return units, GlobalReading(
        loss_scale=float(s.loss_scale[run]), loss_scale_limits=(1.0, 2.0**24), movable=frozenset({"batch_size"})
    )


def test_fresh_runs_get_the_same_formats_and_loss_scale() -> None:
    drawn = Distribution(units=(3, 4), widths=(32,), ladders=(0, 1, 1, 0, 0), regimes=(1, 1, 0), budget=96)
    tasks = list(Bank("train", 24, drawn))
    settings = TableSettings()
    simulation = Simulation(tasks)
    simulation.restart(dict(enumerate(tasks)))
    s, narrowed, scaled = simulation, 0, 0
    levels = propose_levels(s.worst_errors(), s.table.cost, s.ladder, s.level, settings.threshold)
    formats = np.take_along_axis(s.ladder, levels, axis=1)
    amax = s.windows["gradient_amax"][:, : s.is_unit.shape[1]].astype(np.float64)
    needs = NEEDS_SCALE[formats] & s.is_unit
    scales = propose_scale(amax, GRADIENT_LIMIT[formats], needs, np.full(len(s), math.nan), settings.headroom_bits)
    for run, task in enumerate(tasks):
        units, reading = readings_of(simulation, run)
        expected = {str(unit): FORMATS[formats[run, unit]] for unit in range(task.units)}
        # a live run does not move for what may be noise
        is_clear = all(unit.times[expected[unit.name]] < 0.97 or expected[unit.name] == "fp32" for unit in units)
        if not is_clear:
            continue
        proposal = TableController(AutoPrecisionConfig(table=settings)).propose(units, reading)
        assert proposal.formats == expected
        assert proposal.loss_scale == (None if math.isnan(scales[run]) else scales[run])
        narrowed += "fp32" not in expected.values()
        scaled += proposal.loss_scale is not None
    simulation.close()
    assert narrowed > 5
    assert scaled > 1
