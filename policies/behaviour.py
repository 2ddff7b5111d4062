"""The behaviour report: what a policy does with precision, batch size and clip, in numbers that can be refuted.

What lives here: which measures make the report, and its forms as text and JSON. What does not: the measures
(``behaviour_measures``) and pictures (``behaviour_pictures``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.profiles import PROFILES
from autoprec.envs.proxies import BATCH_SIZES, REGIMES
from autoprec.paired import Interval
from autoprec.policies import behaviour_measures as measures
from autoprec.policies.behaviour_measures import Correlation, RaiseRates
from autoprec.policies.play import Recording

LATE_SHARE = 0.3
"""From this share of the budget on batch sizes are compared with what doubling costs: they have had time to move."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a policy did; levels count from 0, which is fp32, to narrower formats.

    Attributes:
        tasks: Tasks that were played.
        decisions: Decisions that were made.
        raised: How often offenders were raised, by ``"with guard"`` and ``"without guard"``.
        skipped: Share of optimizer steps that were skipped.
        with_instability: Rank correlation of precision with the restlessness of the unit's ranges, by regime.
        with_norm_instability: The same with that of its gradient norm.
        with_time: The same with the share of the budget that is over.
        level_by_fifth: Mean level by fifth of the budget.
        batch_by_fifth: Mean index of the batch size.
        clip_by_fifth: Mean index of the clip.
        batch_with_doubling_cost: Rank correlation over tasks of batch size and what doubling it costs.
        level_by_profile: Mean level by kind of hardware.
    """

    tasks: int
    decisions: int
    raised: Mapping[str, RaiseRates]
    skipped: Interval
    with_instability: Mapping[str, Correlation]
    with_norm_instability: Mapping[str, Correlation]
    with_time: Mapping[str, Correlation]
    level_by_fifth: tuple[float, ...]
    batch_by_fifth: tuple[float, ...]
    clip_by_fifth: tuple[float, ...]
    batch_with_doubling_cost: Interval
    level_by_profile: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as strict JSON can hold it; ``None`` for what is not known or not finite."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def table(self) -> str:
        """Returns the report as text."""
        lines = [f"{self.tasks} tasks, {self.decisions} decisions; intervals are 95% over tasks", ""]
        for name, rates in self.raised.items():
            lines += _rates_text(name, rates)
        lines += [f"skipped steps: {_interval_text(self.skipped)}", ""]
        lines += _correlations_text(
            {
                "range instability": self.with_instability,
                "norm instability": self.with_norm_instability,
                "time": self.with_time,
            }
        )
        lines += ["", "by fifth of the budget      " + "".join(f"{fifth + 1:>7}" for fifth in range(measures.FIFTHS))]
        sizes = f"batch (0 is {BATCH_SIZES[0]})"
        fifths = {"mean level": self.level_by_fifth, sizes: self.batch_by_fifth, "clip (index)": self.clip_by_fifth}
        lines += [f"  {name:<26}" + "".join(f"{value:7.2f}" for value in values) for name, values in fifths.items()]
        cost = _interval_text(self.batch_with_doubling_cost)
        lines += ["", f"batch with the cost of doubling it, after {LATE_SHARE:.0%} of the budget: {cost}"]
        by_profile = ", ".join(f"{name} {level:.2f}" for name, level in self.level_by_profile.items())
        return "\n".join([*lines, f"mean level by hardware: {by_profile}"])


def report(recording: Recording, without_guard: Recording | None = None) -> Behaviour:
    """Returns what a policy did.

    Args:
        recording: From ``play_policy(..., record=True)``, with the guard.
        without_guard: The same without it, to tell what of it is the policy's own.
    """
    regimes = np.array([task.regime for task in recording.tasks])
    groups = {"all": np.ones(len(regimes), dtype=bool), **{name: regimes == name for name in REGIMES}}
    groups = {name: chosen for name, chosen in groups.items() if chosen.any()}
    profiles = np.array([task.profile for task in recording.tasks])
    named = [*PROFILES, *sorted(set(profiles.tolist()) - set(PROFILES))]
    share = np.broadcast_to(recording.share[:, :, None], recording.level.shape)

    def correlated(other: NDArray[Any]) -> dict[str, Correlation]:
        return {name: measures.precision_correlation(recording, other, tasks) for name, tasks in groups.items()}

    played = {"with guard": recording, "without guard": without_guard}
    level = measures.mean_level(recording)
    return Behaviour(
        tasks=len(recording.tasks),
        decisions=int(recording.is_played.sum()),
        raised={name: measures.raise_rates(seen) for name, seen in played.items() if seen is not None},
        skipped=measures.skipped_share(recording),
        with_instability=correlated(measures.range_instability(recording)),
        with_norm_instability=correlated(measures.instability(recording.gradient_norm)),
        with_time=correlated(share),
        level_by_fifth=measures.by_fifth(recording, level),
        batch_by_fifth=measures.by_fifth(recording, recording.batch),
        clip_by_fifth=measures.by_fifth(recording, recording.clip),
        batch_with_doubling_cost=_batch_with_doubling_cost(recording),
        level_by_profile=measures.mean_by(recording, {name: profiles == name for name in named}, level),
    )


def _batch_with_doubling_cost(recording: Recording) -> Interval:
    late = measures.SHARES[measures.SHARES > LATE_SHARE]
    batch = measures.at_shares(recording, recording.batch, late).mean(axis=0)
    return measures.correlation_over_tasks(batch, measures.doubling_cost(recording))


def _rates_text(name: str, rates: RaiseRates) -> list[str]:
    return [
        f"raised within {measures.DECISIONS} decisions, {name} ({rates.overflows} overflows):",
        f"  after its own overflow    {_interval_text(rates.offenders)}",
        f"  same levels, no overflow  {_interval_text(rates.base)}; lift {_interval_text(rates.lift, digits=1)}",
        f"  after another's overflow  {_interval_text(rates.bystanders)}",
    ]


def _correlations_text(rows: Mapping[str, Mapping[str, Correlation]]) -> list[str]:
    lines = ["rank correlation within a run of precision with (share of the tasks in which a format moved):"]
    for name, groups in rows.items():
        for group, found in groups.items():
            text = _interval_text(Interval(found.mean, found.low, found.high))
            lines.append(f"  {name:<18} {group:<9} {text} ({found.moved:.0%})")
    return lines


def _interval_text(value: Interval, digits: int = 3) -> str:
    return "not known" if math.isnan(value.mean) else "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*value, d=digits)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
