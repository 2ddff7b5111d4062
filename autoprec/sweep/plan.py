"""From the parameters of a trial to what it trains: an arm, and the target with its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from autoprec.compare.arms import AUTOPREC, STATIC, Arm, parse_arm
from autoprec.compare.targets import Target
from autoprec.map_file import save_map
from autoprec.sweep.config import MAP_PREFIX, SweepConfig
from autoprec.sweep.options import callback_arguments, default_of
from autoprec.sweep.space import Params, filled

if TYPE_CHECKING:
    from optuna import Trial

START_MAP = "start_map.yaml"
"""File in the folder of a trial with the map that it trains with."""
BASELINE = "baseline"
"""User attribute of the trials that come first: a static precision, or ``autoprec``."""


@dataclass(frozen=True)
class TrialPlan:
    """What one trial trains.

    Args:
        arm: Name of the arm: ``autoprec`` or a static precision.
        arguments: Arguments of the target.
        options: Arguments of the callback by dotted names; empty in a static arm.
        map: Format by unit name or pattern that the callback trains with, ``None`` for a policy.
        reward: Weights that a policy is trained for, ``None`` for a policy by name.
    """

    arm: str
    arguments: Params
    options: Params
    map: dict[str, str] | None = None
    reward: dict[str, float] | None = None

    @property
    def is_static(self) -> bool:
        """Whether no callback takes part."""
        return self.arm != AUTOPREC


def start_params(config: SweepConfig, baseline: str) -> Params:
    """Returns the parameters of a trial that comes first.

    Args:
        config: The sweep.
        baseline: A static precision, or ``autoprec`` for the callback as it comes.
    """
    found: Params = {}
    for name, dimension in config.space().items():
        section, _, key = name.partition(".")
        if name == "arm":
            if dimension.holds(baseline):
                found[name] = baseline
        elif section == "arguments":
            found[name] = dimension.start()
        elif baseline == AUTOPREC:
            found[name] = dimension.start(default_of(key) if section == "callback" else None)
    return found


def suggest(config: SweepConfig, trial: Trial) -> TrialPlan:
    """Asks a trial for its values; a static one for the arguments of the target only.

    Args:
        config: The sweep.
        trial: The trial.
    """
    space = config.space()
    arm = trial.user_attrs.get(BASELINE)
    if config.arm is not None and (arm is None or config.arm.holds(arm)):
        arm = space["arm"].suggest(trial, "arm")
    arm = arm or AUTOPREC
    wanted = [name for name in space if name.startswith("arguments.") or (arm == AUTOPREC and name != "arm")]
    params = {name: space[name].suggest(trial, name) for name in wanted}
    return make_plan(config, arm, params)


def make_plan(config: SweepConfig, arm: str, params: Mapping[str, Any]) -> TrialPlan:
    """Returns what a trial trains.

    Args:
        config: The sweep.
        arm: Name of the arm.
        params: Parameters by name.
    """
    arguments = filled("arguments", config.arguments, params)
    if arm != AUTOPREC:
        return TrialPlan(arm, arguments, {})
    options = filled("callback", config.callback, params)
    formats = filled("map", config.map, params) or None
    policy = options.get("policy")
    if isinstance(policy, str) and policy.startswith(MAP_PREFIX):
        formats = dict(config.maps[policy.removeprefix(MAP_PREFIX)])
        options = {name: value for name, value in options.items() if name != "policy"}
    return TrialPlan(arm, arguments, options, formats, filled("reward", config.reward, params) or None)


def trial_arm(config: SweepConfig, plan: TrialPlan, folder: Path) -> Arm:
    """Returns the arm of a trial; writes its map, or trains its policy, where it has one.

    Args:
        config: The sweep.
        plan: What the trial trains.
        folder: Folder of the trial.
    """
    if plan.is_static:
        return parse_arm(plan.arm)
    arguments = {"verbose": False, **callback_arguments(plan.options)}
    if plan.map is not None:
        save_map(folder / START_MAP, plan.map)
        arguments["policy"] = str(folder / START_MAP)
    if plan.reward is not None:
        from autoprec.sweep.reward_policies import policy_for

        arguments["policy"] = str(policy_for(plan.reward, config.policy_training, config.out / "policies"))
    return Arm(AUTOPREC, config.precision, None, None, arguments)


def reference_arm(config: SweepConfig) -> Arm:
    """Returns the arm that step times are a ratio to."""
    assert config.reference in STATIC, "checked when the sweep was read"
    return parse_arm(config.reference)


def trial_target(target: Target, arguments: Mapping[str, Any]) -> Target:
    """Returns a target with arguments, in the words that its kind takes.

    Args:
        target: The target without them.
        arguments: Values by name.
    """
    dashes = "" if target.kind == "function" else "--"
    # a script gets its words as they are, without the quotes by which YAML would know them for text
    is_plain = target.kind == "script"
    words = tuple(
        f"{dashes}{name}={value if is_plain and isinstance(value, str) else word_of(value)}"
        for name, value in arguments.items()
    )
    return replace(target, arguments=words)


def word_of(value: Any) -> str:
    """Returns a value as a word that YAML reads back as the same value.

    Args:
        value: What YAML can hold.
    """
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...").strip()
