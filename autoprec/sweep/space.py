"""What a sweep searches: dimensions, how they are written in YAML, and what a trial suggests for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, model_validator

if TYPE_CHECKING:
    from optuna import Trial

Plain = str | int | float | bool | None
Params = dict[str, Any]

_MERGE = "tag:yaml.org,2002:merge"
_MARKS = {"choices", "low", "high"}


class Dimension(BaseModel):
    """Values to search: some choices, or a range.

    Args:
        choices: The values, in place of a range.
        low: Least value of a range. A range between whole numbers gives whole numbers; write ``1.0`` for others.
        high: Largest value, included.
        log: Whether values are drawn by their logarithm.
        step: Distance between values.
        default: Value of static baselines and of the first trial. Without one: the callback's own default, else the
            first choice or the middle of the range.

    Raises:
        ValueError: If there are both choices and a range, or neither, or a range is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    choices: tuple[Plain, ...] | None = None
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None
    default: Plain = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Dimension:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or self.step is not None:
                raise ValueError("`choices` stand alone. Leave out low, high, log and step, or leave out choices.")
            if not self.choices or len(set(map(repr, self.choices))) != len(self.choices):
                raise ValueError(f"passed choices {list(self.choices)}. There must be one at least, and none twice.")
        else:
            self._check_range()
        if self.default is not None and not self.holds(self.default):
            raise ValueError(f"passed default {self.default!r}, which is not among its values.")
        return self

    def _check_range(self) -> None:
        if self.low is None or self.high is None:
            raise ValueError("a range needs `low` and `high`, as `{low: 0.001, high: 0.1, log: true}`.")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"passed low {self.low} and high {self.high}. They are finite numbers, low < high.")
        if self.log and self.low <= 0:
            raise ValueError(f"passed low {self.low} with log. A logarithm needs low > 0.")
        if self.step is not None and (self.log or not self.step > 0):
            raise ValueError(f"passed step {self.step}. It is a number > 0, and does not go with log.")
        if self.is_whole and self.step is not None and not isinstance(self.step, int):
            raise ValueError(
                f"passed step {self.step} between whole numbers. Write `low: {self.low}.0`, or a whole step."
            )

    @property
    def is_whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def holds(self, value: Any) -> bool:
        """Returns whether a value is one of those searched.

        Args:
            value: Anything.
        """
        if self.choices is not None:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        assert self.low is not None
        assert self.high is not None
        if self.is_whole and not isinstance(value, int):
            return False
        on_step = self.step is None or math.isclose((value - self.low) / self.step % 1.0, 0.0, abs_tol=1e-9)
        return self.low <= value <= self.high and on_step

    def extremes(self) -> tuple[Plain, ...]:
        """Returns values that stand for all when they are checked."""
        return self.choices if self.choices is not None else (self.low, self.high)

    def start(self, wanted: Any = None) -> Plain:
        """Returns the value of static baselines.

        Args:
            wanted: Value to take where the dimension has no default of its own and holds it.
        """
        if self.default is not None:
            return self.default
        if wanted is not None and self.holds(wanted):
            return wanted  # type: ignore[no-any-return]
        if self.choices is not None:
            return self.choices[0]
        assert self.low is not None
        assert self.high is not None
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        if self.step is not None:
            middle = self.low + self.step * math.floor((middle - self.low) / self.step)
        return int(middle) if self.is_whole else float(middle)

    def grid(self) -> tuple[Plain, ...]:
        """Returns all values.

        Raises:
            ValueError: If there is no end of them.
        """
        if self.choices is not None:
            return self.choices
        if self.step is None:
            raise ValueError("a grid needs `choices` or a `step`")
        assert self.low is not None
        assert self.high is not None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        # the last one may be beyond the end by its rounding, where Optuna would draw another value in its place
        return tuple(min(self.low + index * self.step, self.high) for index in range(count))

    def suggest(self, trial: Trial, name: str) -> Any:
        """Asks a trial for a value.

        Args:
            trial: The trial.
            name: Name of the parameter.
        """
        if self.choices is not None:
            return trial.suggest_categorical(name, self.choices)
        if self.is_whole:
            assert isinstance(self.low, int)
            assert isinstance(self.high, int)
            return trial.suggest_int(name, self.low, self.high, step=int(self.step or 1), log=self.log)
        assert self.low is not None
        assert self.high is not None
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


def _kind(value: Any) -> str:
    is_searched = isinstance(value, Dimension) or (isinstance(value, Mapping) and bool(_MARKS & set(value)))
    return "searched" if is_searched else "fixed"


Value = Annotated[Annotated[Dimension, Tag("searched")] | Annotated[Any, Tag("fixed")], Discriminator(_kind)]
"""A value, or a dimension: a mapping with ``choices``, or with ``low`` and ``high``."""

Values = dict[str, Value]


def dimensions(values: Mapping[str, Any]) -> dict[str, Dimension]:
    """Returns what is searched among values.

    Args:
        values: Values and dimensions by name.
    """
    return {name: value for name, value in values.items() if isinstance(value, Dimension)}


def filled(section: str, values: Mapping[str, Any], params: Mapping[str, Any]) -> Params:
    """Returns values with those of a trial in the place of dimensions.

    Args:
        section: Name of the section, the first part of the names of parameters.
        values: Values and dimensions by name.
        params: Parameters of a trial.
    """
    return {
        name: params[f"{section}.{name}"] if isinstance(value, Dimension) else value for name, value in values.items()
    }


def load_yaml(text: str) -> Any:
    """Returns what a YAML text holds; ``1e-3`` is a number, as in YAML 1.2, where PyYAML alone sees a word.

    Args:
        text: The text.
    """
    import re

    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Knows numbers without a point, and refuses a key that comes twice, of which YAML would drop one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (named := (key.tag, key.value)) != (_MERGE, "<<"):
                    if named in seen and id(node) not in self.flattened:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key `{key.value}` comes twice. Keep one of them", key.start_mark
                        )
                    seen.add(named)
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: Any) -> None:
            self.flattened.add(id(node))
            super().flatten_mapping(node)

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.flattened: set[int] = set()

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    return yaml.load(text, Loader)
