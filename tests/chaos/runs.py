"""Runs a schedule: fits with and without faults, with and without the callback, and what is to be learnt of them."""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoprec import AutoPrecisionCallback, Decision, NonFiniteTrainingError
from tests.chaos.control_faults import BadController, Erratic
from tests.chaos.fault import Effect, Fault
from tests.chaos.faults import FAULTS
from tests.chaos.features import lost_and_undone
from tests.chaos.fits import Fit, fit, make_faults
from tests.chaos.invariants import Evidence, Violation, violations
from tests.chaos.models import MODELS
from tests.chaos.process_faults import Kill
from tests.chaos.raising_faults import OptimizerRaises
from tests.chaos.schedules import Schedule
from tests.chaos.settings import Setting
from tests.small_fits import differences, outcome

NEVER = 10**9
FEW_SEEDS, MANY_SEEDS = 4, 12
DEVIATIONS = 4.0  # of a difference between two runs; one in thirty thousand is larger
FIRST_MAPS = {"fixed:bf16": "bf16", "fixed:fp16": "fp16", "fixed:int8": "int8"}


@dataclass(frozen=True)
class Report:
    """What became of a schedule.

    Args:
        struck: Faults that struck.
        violations: What did not hold.
    """

    struck: int
    violations: list[Violation]


def run(schedule: Schedule, folder: Path) -> Report:
    """Runs a schedule and its comparisons.

    Args:
        schedule: What to run.
        folder: An empty folder.
    """
    for name in ("killed", "ours", "twin", "plain"):
        (folder / name).mkdir()
    died = schedule.is_killed and die(schedule, folder / "killed")
    faults = make_faults(schedule)
    ours = fit(schedule, faults, folder / "ours", controller=erratic(schedule, faults))
    plain = fit(schedule, without_effect(schedule, ours), folder / "plain", has_callback=False)
    evidence = collect(schedule, ours, plain)
    if schedule.is_killed:
        evidence.resumed = resume(schedule, ours, folder / "killed")
    if ours.error is None and evidence.effect != Effect.ANY:
        twin = fit(schedule, (), folder / "twin", controller=erratic(schedule, ()))
        left, right = (vars(outcome(each.trainer, each.module)) for each in (ours, twin))
        evidence.differences = differences(left, right)
        evidence.loss, evidence.twin_loss = ours.module.final_loss(), twin.module.final_loss()
        if evidence.effect == Effect.RECOVERABLE:
            evidence.twin_loss = max(evidence.twin_loss, shorter(schedule, ours, twin, folder / "twin"))
        evidence.noise = lambda: noise(schedule, folder / "twin", evidence.loss - evidence.twin_loss)
    struck = sum(bool(fault.struck) for fault in faults) + died
    return Report(struck, violations(evidence))


def shorter(schedule: Schedule, ours: Fit, twin: Fit, folder: Path) -> float:
    """Final loss of the twin when it takes as few steps as the run with faults has: lost steps are lost progress."""
    lost = _untaken(ours) - _untaken(twin)
    windows = -(-lost // 2) if schedule.model == "gan" else lost
    setting = replace(schedule, steps=max(schedule.steps - windows, 1), saves_every=0)
    return fit(setting, (), folder, controller=erratic(schedule, ())).module.final_loss()


def _untaken(found: Fit) -> int:
    assert found.callback is not None
    return found.trainer.global_step - found.callback.applied_steps


def erratic(schedule: Schedule, faults: Sequence[Fault]) -> Erratic | None:
    """The controller of a schedule in which one fails; without the fault, a healthy one that decides the same."""
    if not any(issubclass(FAULTS[each.fault], BadController) for each in schedule.faults):
        return None
    name = FIRST_MAPS.get(schedule.policy)
    fault = next((each for each in faults if isinstance(each, BadController)), None)
    return Erratic({"*": name} if name else None, fault)


def without_effect(schedule: Schedule, ours: Fit) -> list[Fault]:
    """The faults of a run without the callback that is to end as ours did: hooks of all, effects of what ended it."""
    faults = make_faults(schedule)
    for new, old in zip(faults, ours.faults, strict=True):
        ended = ours.error is not None and (old.allows(ours.error) or any(_is_of(old, e) for e in ours.scene.raised))
        if not ended and not new.leaves_out:
            new.batch = NEVER
    if isinstance(ours.error, NonFiniteTrainingError):  # something has to end this run where ours ended
        optimizer = ours.trainer.global_step % len(ours.trainer.optimizers)
        faults.append(OptimizerRaises(ours.sabotage.index, place="after", optimizer=optimizer))
    return faults


def _is_of(fault: Fault, error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_locals.get("self") is fault:
            return True
        traceback = traceback.tb_next
    return False


def noise(setting: Setting, folder: Path, excess: float) -> float:
    """Spread of the final loss without autoprec; over more seeds where a few do not cover the excess."""
    losses: list[float] = []
    for count in (FEW_SEEDS, MANY_SEEDS):
        for start in range(len(losses), count):
            plain = fit(replace(setting, saves_every=0), (), folder, has_callback=False, first_seed=1000 + start)
            losses.append(plain.module.final_loss())
        if max(losses) - min(losses) >= excess:
            return max(losses) - min(losses)
    return spread(losses)


def spread(losses: Sequence[float]) -> float:
    """What two runs may differ by that differ in nothing that matters: in their seed, or in one step less.

    The range of a few runs leaves out the tail: in some orders of the data a single step less costs more than that,
    without autoprec as well. A difference of two runs has the root of two times the deviation of one.

    Args:
        losses: Final losses over seeds.
    """
    return max(max(losses) - min(losses), DEVIATIONS * math.sqrt(2.0) * statistics.stdev(losses))


def collect(setting: Setting, ours: Fit, plain: Fit) -> Evidence:
    """Gathers what the invariants look at, but for comparisons with further runs."""
    assert ours.callback is not None
    steering = ours.callback.steering
    assert steering is not None, f"fit has not begun: {ours.error!r}"
    lost, undone = lost_and_undone(steering)
    return Evidence(
        setting=setting,
        faults=ours.faults,
        error=ours.error,
        raised=ours.scene.raised,
        history=list(ours.callback.history),
        windows=steering.window + steering._has_stepped,
        applied=steering.applied_steps,
        skipped=steering.skipped_steps,
        user_skipped=steering.user_skipped_steps,
        lost=lost,
        undone=undone,
        attempts=ours.trainer.global_step,
        readings=ours.sabotage.readings,
        asked=ours.scene.asked,
        non_finite=non_finite(ours),
        gradient_dtypes=[
            name
            for name, parameter in ours.module.named_parameters()
            if getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype
        ],
        traces=traces(ours, plain),
        checkpoints=wrong_checkpoints(setting, ours),
    )


def non_finite(found: Fit) -> list[str]:
    """Names of tensors that hold inf or NaN."""
    tensors: dict[str, Tensor] = dict(found.module.state_dict())
    for index, optimizer in enumerate(found.trainer.optimizers):
        for key, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer {index} {key} {name}": v for name, v in state.items() if isinstance(v, Tensor)}
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


_LIGHTNINGS_OWN = ("_current_fx_name", "_last_val_time")


def traces(ours: Fit, plain: Fit) -> list[str]:
    """What is not as it was before, or not as in the run without the callback."""
    found = [each for each in ours.traces if each not in plain.traces]
    steering = ours.callback.steering if ours.callback is not None else None
    # other batches draw otherwise, and end in another place
    has_same_batches = steering is not None and not any(
        each.knob in ("batch_size", "accumulate") and each.outcome != "refused" for each in steering.history
    )
    left, right = dict(plain.structure), dict(ours.structure)
    left_out: tuple[str, ...] = ()
    if ours.error is not None or not has_same_batches:  # gradients may have gone for the activations of a forward
        left_out += ("gradient",)
    if type(ours.error) is not type(plain.error):  # inside a batch parameters are toggled, and faults have hooks
        left_out += ("parameter", "optimizer")
    left, right = ({k: v for k, v in each.items() if not k.startswith(left_out)} for each in (left, right))
    named = [each for key in left.keys() | right.keys() for each in _named(key, left.get(key), right.get(key))]
    if ours.error is not None:  # what Lightning remembers of the hook that it was in
        named = [each for each in named if not any(name in each for name in _LIGHTNINGS_OWN)]
    found += named
    has_gone_on = steering is not None and not any(lost_and_undone(steering))
    # a step that is skipped before its second closure draws for one only
    is_drawn_from = ours.scene.setting.optimizer != "two closures"
    is_comparable = ours.error is None and has_gone_on and is_drawn_from and has_same_batches
    if is_comparable and differences(plain.random_state, ours.random_state):
        found.append("the global random states stand elsewhere")
    return found


def _named(key: str, left: Any, right: Any) -> list[str]:
    """Differences of one entry of a structure, and of sets of attributes the names that are in one only."""
    pairs = zip(left, right, strict=False) if isinstance(left, tuple) and isinstance(right, tuple) else ((left, right),)
    found = []
    for a, b in pairs:
        if isinstance(a, dict) and isinstance(b, dict):
            found += [f"{key} has lost {name}" for name in sorted(a.keys() - b.keys())]
            found += [f"{key} has {name}" for name in sorted(b.keys() - a.keys())]
            both = sorted(a.keys() & b.keys())
            found += [f"{key}.{name}: {b[name]}, was {a[name]}" for name in both if a[name] != b[name]]
        elif a != b:
            found.append(f"{key}: {b}, was {a}")
    return found


def wrong_checkpoints(setting: Setting, found: Fit) -> list[str]:
    """What is wrong with the newest checkpoints."""
    wrong = []
    for path in checkpoints(found.scene.folder)[-2:]:
        try:
            weights = torch.load(path, weights_only=True)["state_dict"]
            plain = MODELS[setting.model](setting.optimizer, setting.has_schedule, found.sabotage)
            plain.load_state_dict(weights)
        except Exception as error:  # whatever it is, the file does not load
            wrong.append(f"{path.name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
        wrong += [f"{path.name}: {name} is {v.dtype}" for name, v in weights.items() if v.dtype != dtypes[name]]
        wrong += [f"{path.name}: {name} is not finite" for name, v in weights.items() if not torch.isfinite(v).all()]
    return wrong


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))


# ---- kill -9 ----


def die(schedule: Schedule, folder: Path) -> bool:
    """Trains in a process of its own until it is killed; returns whether it was."""
    process = os.fork()
    if process == 0:
        try:
            faults = make_faults(schedule)
            for fault in faults:
                fault.is_armed = isinstance(fault, Kill)
            fit(schedule, faults, folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def resume(schedule: Schedule, through: Fit, folder: Path) -> list[str]:
    """Goes on from the newest checkpoint of the killed process; returns where it ends otherwise than the whole run."""
    files = checkpoints(folder)
    resumed = fit(schedule, make_faults(schedule), folder, resume=files[-1] if files else None)
    if files and through.callback is not None:
        saved = torch.load(files[-1], weights_only=True)["AutoPrecision"]
        end = missing_copy(list(through.callback.history), saved)
        if end is not None:  # the resumed run has to go another way from there on
            windows = range(saved["window"], end)
            return differences(_course(through, windows), _course(resumed, windows), "before going back")
    if resumed.error is not None or through.error is not None:
        same = type(resumed.error) is type(through.error)
        return [] if same else [f"{resumed.error!r} instead of {through.error!r}"]
    left, right = outcome(through.trainer, through.module), outcome(resumed.trainer, resumed.module)
    left.losses = left.losses[-len(right.losses) :] if right.losses else []
    found = differences(vars(left), vars(right))
    if through.callback is not None and resumed.callback is not None:
        found += differences(_decided(through.callback), _decided(resumed.callback), "callback")
    return found


def missing_copy(history: Sequence[Decision], saved: Mapping[str, Any]) -> int | None:
    """Window in which a run went back to a copy that is older than a checkpoint; copies are not in checkpoints.

    Args:
        history: The record of the run that was not killed.
        saved: The state of autoprec in the checkpoint.
    """
    newest = saved["applied_steps"] - (saved["skipping_since"] is None)  # of copies made before windows were skipped
    for row in history:
        is_return = row.knob == "rollback" and row.outcome == "applied" and row.step >= saved["window"]
        if is_return and isinstance(row.applied, int) and row.applied <= newest:
            return row.step
    return None


def _course(found: Fit, windows: range) -> dict[str, Any]:
    """What a run did until the last of the windows, and saw in each of them."""
    assert found.callback is not None
    # when a step was applied again is added to a row afterwards
    rows = [replace(row, recovered_at=None).to_dict() for row in found.callback.history if row.step < windows.stop]
    readings = [vars(reading) for reading in found.sabotage.readings if reading.window in windows]
    losses = [each for each in found.sabotage.losses if each[0] in windows]
    return {"history": rows, "knobs": readings, "losses": losses}


def _decided(callback: AutoPrecisionCallback) -> dict[str, Any]:
    assert callback.steering is not None
    return {
        "map": callback.precision_map(),
        "loss scale": callback.loss_scale,
        "clip": callback.clip_threshold,
        "counters": [callback.steering.window, callback.applied_steps, callback.skipped_steps],
        "history": callback.history.state(),
    }
