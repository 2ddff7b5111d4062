"""Arguments of the callback by dotted names, as ``config.clip.multiplier``: which there are, and a callback of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, recipe
from autoprec.formats import nearest
from autoprec.json_files import primitive

RECIPE = "recipe"
"""Name of the recipe that ``config`` begins with."""
OURS = ("history_file", "record", "verbose")
"""What a sweep sets itself."""


class OptionError(ValueError):
    """An option that the callback does not have, or a value that it does not take."""


def default_of(name: str) -> Any:
    """Returns what the callback has where nothing is said.

    Args:
        name: Dotted name.

    Raises:
        OptionError: If the callback has no such option.
    """
    if name == RECIPE:
        return "default"
    arguments = inspect.signature(AutoPrecisionCallback).parameters
    head, *rest = name.split(".")
    if head not in arguments or head in OURS or (rest and head != "config"):
        known = [RECIPE, "config.<field>", *(each for each in arguments if each not in (*OURS, "config"))]
        raise OptionError(f"the callback has no such option to set. It has {', '.join(known)}.{nearest(head, known)}")
    if head != "config":
        return arguments[head].default
    value: Any = AutoPrecisionConfig()
    for index, part in enumerate(rest):
        fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        if part not in fields:
            where = ".".join(["config", *rest[:index]])
            said = f"`{where}` has {', '.join(sorted(fields))}.{nearest(part, fields)}" if fields else ""
            raise OptionError(f"there is no field `{part}`. {said or f'`{where}` is a value.'}")
        value = getattr(value, part)
    if dataclasses.is_dataclass(value):
        raise OptionError(f"`{name}` is a group. Name a field of it, as `{name}.{dataclasses.fields(value)[0].name}`.")
    return value


def callback_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of ``AutoPrecisionCallback``.

    Args:
        options: Values by dotted names, ``recipe`` among them.

    Raises:
        OptionError: If there is no such option.
        ValueError: If the callback does not take a value.
        TypeError: The same, by its type.
    """
    arguments = {name: _native(value) for name, value in options.items() if not name.startswith("config.")}
    config = recipe(str(arguments.pop(RECIPE, "default")))
    for name in options:
        default_of(name)
    inner = {name.removeprefix("config."): value for name, value in options.items() if name.startswith("config.")}
    if inner or RECIPE in options:
        arguments["config"] = _replaced(config, inner)
    return arguments


def _replaced(value: Any, changes: Mapping[str, Any]) -> Any:
    own = {name: _native(change) for name, change in changes.items() if "." not in name}
    groups: dict[str, dict[str, Any]] = {}
    for name, change in changes.items():
        head, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(head, {})[rest] = change
    inner = {name: _replaced(getattr(value, name), group) for name, group in groups.items()}
    return dataclasses.replace(value, **own, **inner)


def _native(value: Any) -> Any:
    # YAML has lists where settings have tuples
    return tuple(map(_native, value)) if isinstance(value, list) else value


def as_init_args(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as ``init_args`` of a callback in a LightningCLI config: what differs from the defaults.

    Args:
        options: Values by dotted names, ``recipe`` among them.
    """
    arguments = callback_arguments(options)
    config = arguments.pop("config", None)
    plain = {name: primitive(value) for name, value in arguments.items()}
    if config is not None and (changed := _differences(config, AutoPrecisionConfig())):
        plain["config"] = changed
    return plain


def _differences(value: Any, default: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        mine, other = getattr(value, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(other):
            if inner := _differences(mine, other):
                found[field.name] = inner
        elif mine != other:
            found[field.name] = primitive(mine)
    return found
