"""What a fit reports: the metrics it logs, and the short table at its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autoprec import metric_names
from autoprec.formats import FORMATS, get_format
from autoprec.knobs import Knobs, steered_units
from autoprec.learning_rate import LearningRate
from autoprec.ops import describe
from autoprec.steering import Steering
from autoprec.units import Unit


def metrics(steering: Steering) -> dict[str, float]:
    """Returns what is logged while a model trains, by metric name."""
    knobs = steering.knobs
    values = {
        metric_names.LOSS_SCALE: knobs.loss_scale.scale,
        metric_names.APPLIED_STEPS: float(steering.applied_steps),
        metric_names.SKIPPED_STEPS: float(steering.skipped_steps),
    }
    if steering.learning_rate.factor != 1.0:
        values[metric_names.LR_FACTOR] = steering.learning_rate.factor
    if steering.lost_windows:
        values[metric_names.LOST_WINDOWS] = float(steering.lost_windows)
    if math.isfinite(knobs.clip):
        values[metric_names.CLIP_THRESHOLD] = knobs.clip
    if steering.telemetry.norms:
        values[metric_names.GRAD_NORM] = steering.telemetry.norms[-1]
    noise_scale, _ = steering.telemetry.noise.scale.estimate
    if math.isfinite(noise_scale):
        values[metric_names.NOISE_SCALE] = noise_scale
    return values


def mean_bits(knobs: Knobs) -> float:
    """Returns the bits of the formats in use, averaged over the parameters of all steered units."""
    units = steered_units(knobs)
    total = sum(unit.parameter_count for unit in units)
    if not total:
        return 32.0
    return sum(get_format(knobs.formats[unit.name]).bits * unit.parameter_count for unit in units) / total


def summarize(steering: Steering, policy: str, notes: Sequence[str] = ()) -> str:
    """Describes a finished fit in a few lines of text.

    Args:
        steering: State of the fit.
        policy: Name of the policy.
        notes: What it has to say.
    """
    knobs = steering.knobs
    lines = [f"autoprec, policy {policy}, started from {knobs.base.precision}"]
    lines += _format_lines(steering)
    lines += [f"  plan       {note}" for note in notes]
    lines += _implementation_lines(steering)
    lines += _step_lines(steering)
    if knobs.loss_scale.enabled:
        lines.append(f"  loss scale {knobs.loss_scale.scale:g}")
    else:
        lines.append("  loss scale not in use (nothing runs in fp16)")
    lines.append(_clip_line(steering))
    lines += _learning_rate_lines(steering.learning_rate)
    lines += _noise_lines(steering)
    lines += _batch_lines(steering)
    lines += _kernel_lines(steering)
    lines += steering.costs.lines()
    lines += _fault_lines(steering)
    lines += [f"  overflow   {name}: {count}" for name, count in steering.fallback.overflows.items()]
    lines += _refusals(steering)
    return "\n".join(lines)


def _step_lines(steering: Steering) -> list[str]:
    """What became of the windows, and what there is to go back to."""
    steps = f"  steps      {steering.applied_steps} applied, {steering.skipped_steps} skipped as non-finite"
    if steering.user_skipped_steps:
        steps += f", {steering.user_skipped_steps} without a loss"
    if steering.undone_windows:
        steps += f", {steering.undone_windows} undone"
    lines = [steps]
    if steering.skipped_steps and not steering.applied_steps:
        lines.append("  NO STEP WAS APPLIED: the weights are those that training started with")
    if steering.lost_samples or steering.lost_windows:
        windows, samples = steering.lost_windows, steering.lost_samples
        lost = f"{windows} window{'' if windows == 1 else 's'}"
        lines.append(f"  memory     {lost} lost to out-of-memory errors; {samples} samples did not train")
    if steering.copies:
        times = f"{steering.rollbacks} rollback{'' if steering.rollbacks == 1 else 's'}"
        lines.append(f"  rollback   {steering.copies}, {times}")
    return lines


def _noise_lines(steering: Steering) -> list[str]:
    noise_scale, error = steering.telemetry.noise.scale.estimate
    if not math.isfinite(noise_scale):
        return []
    batch = steering.telemetry.noise.effective_batch
    return [f"  noise      scale {noise_scale:.3g} +- {error:.2g} samples, {batch:g} in a step"]


def _fault_lines(steering: Steering) -> list[str]:
    faults = [decision for decision in steering.history if decision.knob == "policy"]
    lines = [
        f"  POLICY FAILED in window {fault.step}, what it was asked there did not happen: {fault.reason}"
        for fault in faults
    ]
    if steering.policy_failures > len(faults):
        lines.append(f"  POLICY FAILED {steering.policy_failures} times in all")
    return lines


def _batch_lines(steering: Steering) -> list[str]:
    """The batch where a run has moved it."""
    knobs, factor = steering.knobs, steering.batch_factor
    if factor == 1.0 and not steering.lost_samples:
        return []
    parts = knobs.accumulation.value
    line = f"  batch      size {knobs.batch_size.size}, {parts} micro-batch{'' if parts == 1 else 'es'} a step"
    return [f"{line} (effective batch {factor:g} x the first)"]


def _kernel_lines(steering: Steering) -> list[str]:
    """What measured gradients and took steps, and why not more of it was left to kernels."""
    lines = [f"  kernels    gradient statistics by {describe('grad_stats', steering.runtime.device_type)}"]
    if steering.kernel_steps:
        line = f"  kernels    took {steering.kernel_steps} optimizer steps"
        if steering.narrow_steps:
            line += f", {steering.narrow_steps} of them with second moments in {steering.config.second_moment}"
        if steering.copied_layers:
            line += f", {steering.copied_layers} layers on kept copies of their weights"
        elif steering.onlooker is not None:
            line += f"; gradients stay in .grad for {steering.onlooker}"
        lines.append(line)
    return lines + _moment_lines(steering)


def _moment_lines(steering: Steering) -> list[str]:
    """Where second moments stayed in float32 though 16 bits were asked for."""
    config, reason = steering.config, steering.wide_reason
    if config.second_moment == "fp32" or (steering.narrow_steps and reason is None):
        return []
    if reason is None:
        reason = f"no kernel took a step of a weight with {max(config.second_moment_after, 1)} steps behind it"
    return [f"  moments    {'some' if steering.narrow_steps else 'all'} second moments stayed in fp32: {reason}"]


def no_decision(steering: Steering, interval: int) -> str:
    """Says why a policy that looks at measurements was never asked, ``""`` if that needs no words.

    Args:
        steering: State of the fit.
        interval: Applied steps between decisions.
    """
    if steering.applied_steps > interval or "precision" in steering.knobs.masked:
        return ""
    return (
        f"\n  no decision was due: {steering.applied_steps} steps were applied, and a policy decides after every"
        f" {interval} (`AutoPrecisionCallback(interval=...)`)"
    )


def _format_lines(steering: Steering) -> list[str]:
    knobs = steering.knobs
    if "precision" in knobs.masked:
        return [f"  precision  not steered: {knobs.masked['precision']}"]
    units = steered_units(knobs)
    left_alone = [unit for unit in knobs.units.values() if unit.reason is not None]
    parameters = sum(unit.parameter_count for unit in knobs.units.values()) or 1
    compute = {unit.name: steering.telemetry.units[unit.name].compute for unit in units}
    total_compute = sum(compute.values())
    lines = []
    for name in FORMATS:
        members = [unit for unit in units if knobs.formats[unit.name] == name]
        if not members:
            continue
        share = sum(unit.parameter_count for unit in members) / parameters
        line = f"  {name:<10} {len(members)} unit{'' if len(members) == 1 else 's'}, {share:.1%} of parameters"
        if total_compute:
            line += f", {sum(compute[unit.name] for unit in members) / total_compute:.1%} of compute"
        remarks = _remarks(steering, name, members)
        lines.append(f"{line} ({'; '.join(remarks)})" if remarks else line)
    return lines + _left_alone_lines(left_alone)


def _implementation_lines(steering: Steering) -> list[str]:
    """What ran otherwise than torch runs it at the same precision; nothing where nothing did."""
    counted: Counter[tuple[str, str]] = Counter()
    for unit in steered_units(steering.knobs):
        counted.update((unit.kind, name) for name in unit.implemented)
    parts = [f"{count} {kind} layer{'' if count == 1 else 's'} {name}" for (kind, name), count in counted.items()]
    shapes = len(steering.runtime.attention_ran)
    if shapes:
        parts.append(f"attention matmul at {shapes} shape{'' if shapes == 1 else 's'}")
    return [f"  implementations: {', '.join(parts)}"] if parts else []


def _remarks(steering: Steering, name: str, members: Sequence[Unit]) -> list[str]:
    """Where a format is not what ran: emulation, calls that fell back, units whose forward nobody called."""
    remarks = []
    emulated = sum(unit.is_emulated(name) for unit in members)
    if emulated:
        remarks.append(f"{'' if emulated == len(members) else f'{emulated} of them '}emulated on this device")
    formats = steering.knobs.unit_formats
    if formats.map_limit is not None:  # compiled calls are not counted
        return remarks
    ran = sum((unit.ran for unit in members), Counter[tuple[str, str]]())
    calls = sum(count for (asked, _), count in ran.items() if asked == name)
    others = {other: count for (asked, other), count in ran.items() if asked == name != other}
    remarks += [f"{count} of {calls} calls ran in {other}" for other, count in others.items()]
    silent = [unit.name for unit in members if formats.is_never_called(unit, steering.applied_steps)]
    if silent:
        remarks.append(f"{', '.join(silent[:3])}{f' and {len(silent) - 3} more' if silent[3:] else ''}: never called")
    return remarks


def _left_alone_lines(units: Sequence[Unit], limit: int = 3) -> list[str]:
    """One line for each reason; the units run in the precision of what is before them."""
    names: dict[str, list[str]] = {}
    for unit in units:
        names.setdefault(str(unit.reason), []).append(unit.name)
    lines = []
    for reason, group in names.items():
        more = f" and {len(group) - limit} more" if len(group) > limit else ""
        lines.append(f"  left alone {', '.join(group[:limit])}{more}: {reason}")
    return lines


def _clip_line(steering: Steering) -> str:
    knobs = steering.knobs
    if "clip" in knobs.masked:
        return f"  clip       not steered: {knobs.masked['clip']}"
    threshold = "off" if math.isinf(knobs.clip) else f"{knobs.clip:.3g}"
    if not steering.telemetry.norms:
        return f"  clip       {threshold}"
    share = sum(steering.telemetry.clipped) / max(len(steering.telemetry.clipped), 1)
    median = steering.telemetry.median_norm
    return f"  clip       {threshold} (median norm {median:.3g}, {share:.0%} of the last steps clipped)"


def _learning_rate_lines(rates: LearningRate) -> list[str]:
    if rates.is_neutral:
        return []
    parts = [f"{name} x {factor:.3g}" for name, factor in rates.named.items()]
    if rates.batch_factor != 1.0 and rates.rule != "none":
        parts.insert(0, f"rule {rates.rule} for {rates.batch_factor:g} times the first effective batch")
    return [f"  lr         x {rates.factor:.3g} inside the optimizer's step ({', '.join(parts)})"]


def _refusals(steering: Steering, limit: int = 5) -> list[str]:
    counted: dict[str, int] = {}
    for decision in steering.history:
        if decision.outcome == "refused" and decision.knob != "policy":
            key = f"{decision.unit or decision.knob} to {decision.requested}: {decision.reason}"
            counted[key] = counted.get(key, 0) + 1
    lines = [f"  refused    {key}" + (f" ({count} times)" if count > 1 else "") for key, count in counted.items()]
    more = [f"  refused    ... and {len(lines) - limit} more, see `callback.history`"] if len(lines) > limit else []
    return lines[:limit] + more
