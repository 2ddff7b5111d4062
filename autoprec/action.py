"""What somebody asks for: a policy, a script or the user.

What lives here: the request as data, with the right types. What does not: whether it is legal, which the guard judges
at the boundary where it would act, and what observations and policy outputs mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real

from autoprec.formats import get_format


@dataclass(frozen=True, kw_only=True)
class Action:
    """A request to change knobs. ``None`` in a field asks for nothing.

    Types are checked here. A value outside its range is not an error here: at the next boundary it is refused or
    limited, with the reason on record.

    Args:
        precision: Format name for each unit name or fnmatch pattern. ``"*"`` means every unit that computes with a
            weight matrix; other patterns leave out norms and vectors, too, unless they meet nothing else. Copied.
        loss_scale: Factor on the loss.
        clip: Threshold on the global gradient norm. ``math.inf`` turns clipping off.
        batch_size: The loader's batch size per rank.
        accumulate: Micro-batches per optimizer step.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a format name is unknown.

    Example:
        >>> Action(precision={"net.0": "bf16"}, clip=0.5).is_empty
        False
    """

    precision: Mapping[str, str] | None = None
    loss_scale: float | None = None
    clip: float | None = None
    batch_size: int | None = None
    accumulate: int | None = None

    def __post_init__(self) -> None:
        """Validates types and format names."""
        if self.precision is not None:
            _check_precision(self.precision)
            # a later change of the caller's dict must not change a frozen request; numpy's strings become plain ones
            plain = {str(unit): str(name) for unit, name in self.precision.items()}
            object.__setattr__(self, "precision", plain)
        for name, kind, allowed in (
            ("loss_scale", Real, "a float or None"),
            ("clip", Real, "a float or None"),
            ("batch_size", Integral, "an int or None"),
            ("accumulate", Integral, "an int or None"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                _raise_type_error(name, value, allowed)
            # what numpy computes becomes a plain number, which a checkpoint may hold
            object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not self.precision and all(getattr(self, f.name) is None for f in fields(self) if f.name != "precision")


def _check_precision(precision: object) -> None:
    if not isinstance(precision, Mapping):
        _raise_type_error("precision", precision, "a mapping from unit names to format names, or None")
        return
    for unit, name in precision.items():
        if not isinstance(unit, str):
            _raise_type_error("precision", unit, "a mapping whose keys are unit names or patterns")
        if not isinstance(name, str):
            _raise_type_error("precision", name, "a mapping whose values are format names")
        get_format(name)


def _raise_type_error(field: str, value: object, allowed: str) -> None:
    raise TypeError(
        f"Passed `Action({field}=...)` with {value!r} of type `{type(value).__qualname__}`."
        f" `{field}` must be {allowed}."
    )
