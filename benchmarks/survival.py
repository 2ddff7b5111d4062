"""Whether a run of the divergence study survived, and in a few words what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.formats import rank

Run = Mapping[str, Any]


def failure(run: Run, reference_loss: float | None, factor: float) -> str | None:
    """Returns why a run did not survive, ``None`` if it did.

    Args:
        run: What ``divergence_runs.run`` returned.
        reference_loss: Final loss of the reference with the same seed.
        factor: Largest final loss of a survivor in units of the reference's.
    """
    if run["error"] is not None:
        return f"stopped: {run['error']}"
    if run["nonfinite_weights"]:
        return "weights are not finite"
    if run["nonfinite_buffers"]:
        return "buffers are not finite"
    if run["final_loss"] is None:
        return "the final loss is not finite"
    if run["val_loss"] is None:
        return "the Trainer's validation is not finite"
    if reference_loss is None:
        return "the reference has no finite loss"
    ratio = run["final_loss"] / reference_loss
    return None if ratio <= factor else f"the final loss is {ratio:.3g} times the reference's"


def symptoms(run: Run, reference: Run) -> str:
    """Returns what can be seen of a run from outside, for the table.

    Args:
        run: What ``divergence_runs.run`` returned.
        reference: The same of the reference.
    """
    parts = [part for part in (_of_weights(run, reference), _of_buffers(run), _of_scale(run)) if part]
    if run["error"] is not None:
        parts.append(run["error"].split(".")[0])
    elif run["val_loss"] is None and run["final_loss"] is not None:
        parts.append("validation not finite")
    return "; ".join(parts) or "nothing"


def _of_weights(run: Run, reference: Run) -> str:
    last, largest, usual = run["last_moved"], run["largest_weight"], reference["largest_weight"]
    if run["nonfinite_step"] is not None:
        return f"weights not finite from step {run['nonfinite_step']} on"
    if last == 0:
        return "weights never moved"
    if largest > 100.0 * usual:
        return f"largest weight {largest:.2g}, {usual:.2g} in the reference"
    if last < 0.95 * run["steps"]:
        return f"weights last moved in step {last}"
    share, others = run["moved_share"], reference["moved_share"]
    slowed = f"{share:.0%} of the weights moved in the last tenth of the run, {others:.0%} in the reference"
    return slowed if share < 0.5 * others else ""


def _of_buffers(run: Run) -> str:
    names = run["nonfinite_buffers"]
    return f"{names[-1]} not finite, and {len(names) - 1} more buffers" if names else ""


def _of_scale(run: Run) -> str:
    scale = run["loss_scale"]
    return f"loss scale {scale:.2g}" if scale is not None and scale < 1.0 else ""


def answers(decisions: Sequence[Any]) -> dict[str, Any]:
    """Returns what a callback did that can have saved a run, as JSON holds it.

    Args:
        decisions: The callback's history.
    """
    raised: dict[str, list[Any]] = {}
    for one in decisions:
        if one.knob == "precision" and one.outcome == "applied" and rank(one.applied) < rank(one.before):
            raised.setdefault(one.unit, [one.step + 1, one.applied, one.reason])
    clips = [one.step + 1 for one in decisions if one.knob == "clip" and one.outcome == "applied"]
    backoffs = [one for one in decisions if one.knob == "loss_scale" and one.applied < one.before]
    return {"raised": raised, "clips_from": min(clips, default=None), "backoffs": len(backoffs)}


def deeds(run: Run) -> str:
    """Returns what the callback of a run did, for the table."""
    found = run["answers"]
    steps: dict[tuple[int, str], list[str]] = {}
    for unit, (step, name, _) in found["raised"].items():
        steps.setdefault((step, name), []).append(unit)
    parts = [f"{', '.join(units)} to {name} in step {step}" for (step, name), units in sorted(steps.items())]
    if found["clips_from"] is not None:
        parts.append(f"clips from step {found['clips_from']} on")
    if found["backoffs"]:
        parts.append(f"lowered the loss scale {found['backoffs']}x")
    if run["undone_steps"]:
        parts.append(f"undid {run['undone_steps']} steps")
    return "; ".join(parts) or "nothing"
