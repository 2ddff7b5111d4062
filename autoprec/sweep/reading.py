"""Sweeps read from YAML or a mapping, and all that is checked of them before anything trains."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from autoprec import AutoPrecisionCallback
from autoprec.compare.arms import AUTOPREC, STATIC
from autoprec.formats import FORMATS
from autoprec.sweep.config import MAP_PREFIX, SweepConfig, SweepError
from autoprec.sweep.options import OptionError, callback_arguments, default_of
from autoprec.sweep.space import Dimension, load_yaml
from autoprec.target_functions import TargetError

_TAGS = ("searched", "fixed")


def load_config(path: str | Path, **changes: Any) -> SweepConfig:
    """Reads a sweep from YAML.

    Args:
        path: The file. A target in a file is looked for in the working directory, then beside this file.
        changes: Fields that are to be otherwise.

    Raises:
        SweepError: If there is no such file, or it is not a sweep. The message has the path of each key.
    """
    path = Path(path)
    try:
        document = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # a day that no month has is a ValueError
        raise SweepError(f"Cannot read `{path}`: {error}") from error
    if not isinstance(document, dict):
        raise SweepError(f"`{path}` holds no settings. Write `target: train.py:build`, and see docs/sweep.md.")
    return checked_config({**document, **changes}, f"`{path}`", path.parent)


def checked_config(document: Mapping[str, Any], source: str = "The sweep", folder: Path | None = None) -> SweepConfig:
    """Returns a sweep whose target exists and whose options the callback has.

    Args:
        document: Settings by name.
        source: What messages call them.
        folder: Where a file of the target is looked for besides the working directory.

    Raises:
        SweepError: If something is wrong. The message has the path of each key.
    """
    try:
        config = SweepConfig.model_validate(dict(document))
        config.identity()
    except ValidationError as error:
        raise SweepError(f"{source} is not a sweep.\n{_said(error)}") from error
    except (ValueError, RecursionError) as error:  # an alias of YAML that holds itself
        raise SweepError(f"{source} is not a sweep: {error}. Write values that JSON can hold.") from error
    if folder is not None and (found := _beside(config.target, folder)) is not None:
        config = config.model_copy(update={"target": found})
    try:
        config.load_target()
    except TargetError as error:
        raise SweepError(f"{source}, `target`: {error}") from error
    faults = [
        *_arm_faults(config),
        *_callback_faults(config),
        *_map_faults(config),
        *_reward_faults(config),
        *_grid_faults(config),
    ]
    if faults:
        raise SweepError(f"{source} is not a sweep.\n" + "\n".join(f"  `{key}`: {text}" for key, text in faults))
    return config


def _beside(target: str, folder: Path) -> str | None:
    file, colon, function = target.rpartition(":") if Path(target).suffix not in (".yaml", ".yml") else (target, "", "")
    file = file or target
    if Path(file).suffix in (".py", ".yaml", ".yml") and not Path(file).is_file() and (folder / file).is_file():
        return f"{folder / file}{colon}{function if colon else ''}"
    return None


def _arm_faults(config: SweepConfig) -> list[tuple[str, str]]:
    if config.arm is None:
        return []
    unknown = [choice for choice in config.arm.choices or () if choice not in (*STATIC, AUTOPREC)]
    if config.arm.choices is None or unknown:
        return [("arm", f"it has `choices` out of {', '.join((AUTOPREC, *STATIC))}; passed {unknown or 'a range'}.")]
    return []


def _callback_faults(config: SweepConfig) -> list[tuple[str, str]]:
    faults = []
    for name, value in config.callback.items():
        try:
            default_of(name)
        except OptionError as error:
            faults.append((f"callback.{name}", str(error)))
            continue
        for each in value.extremes() if isinstance(value, Dimension) else (value,):
            if (text := _refusal(config, name, each)) is not None:
                faults.append((f"callback.{name}", text))
                break
    return faults


def _refusal(config: SweepConfig, name: str, value: Any) -> str | None:
    """Why the callback does not take a value of an option, ``None`` where it does."""
    if name == "policy" and isinstance(value, str) and value.startswith(MAP_PREFIX):
        chosen = value.removeprefix(MAP_PREFIX)
        return (
            None if chosen in config.maps else f"there is no map {chosen!r} in `maps`, which has {list(config.maps)}."
        )
    try:
        AutoPrecisionCallback(**callback_arguments({name: value}))
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        return str(error)
    return None


def _map_faults(config: SweepConfig) -> list[tuple[str, str]]:
    values = {
        name: value.extremes() if isinstance(value, Dimension) else (value,) for name, value in config.map.items()
    }
    return [
        (f"map.{name}", f"passed {bad}. Formats are {', '.join(FORMATS)}.")
        for name, each in values.items()
        if (bad := [value for value in each if value not in FORMATS])
    ]


def _reward_faults(config: SweepConfig) -> list[tuple[str, str]]:
    if not config.reward:
        return []
    if importlib.util.find_spec("stable_baselines3") is None:
        return [("reward", "policies are trained with the extra `rl`: run `pip install '.[rl]'` in a checkout.")]
    from autoprec.envs.reward import RewardWeights

    faults = []
    for name, value in config.reward.items():
        for each in value.extremes() if isinstance(value, Dimension) else (value,):
            weight: dict[str, Any] = {name: each}
            try:
                RewardWeights(**weight)
            except (ValueError, TypeError) as error:
                faults.append((f"reward.{name}", str(error)))
                break
    return faults


def _grid_faults(config: SweepConfig) -> list[tuple[str, str]]:
    faults = []
    for name, dimension in config.space().items() if config.sampler.name == "grid" else ():
        try:
            dimension.grid()
        except ValueError as error:
            faults.append((name, f"{error}, as `{{low: 0.1, high: 0.9, step: 0.2}}`."))
    return faults


def _said(error: ValidationError) -> str:
    lines = []
    for one in error.errors():
        place = ".".join(str(part) for part in one["loc"] if part not in _TAGS)
        text = str(one["msg"]).removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            inside = [part for part in one["loc"] if part not in _TAGS]
            near = difflib.get_close_matches(str(inside[-1]), SweepConfig.model_fields, n=1) if len(inside) == 1 else []
            text = f"there is no such key.{f' Did you mean `{near[0]}`?' if near else ''}"
        elif one["type"] == "missing":
            text = "it must be given."
        elif one["type"] != "value_error":
            text = f"passed {one['input']!r}. {text}."
        lines.append(f"  `{place}`: {text}" if place else f"  {text}")
    return "\n".join(lines)
