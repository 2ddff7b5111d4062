"""Measures, in a window that is taken for a plan, what rounding a unit to a format would do to loss and gradients.

Nothing is rounded in the run itself. A hook on all modules, for the time of a forward only, keeps samples of inputs and
outputs, sees the gradients of the outputs when they come, and rounds the samples. None is put on a module: it would
be in copies and pickles of the module that user code makes meanwhile. What does not live here: the sums over them
(``unit_rounding``), the rounding (``what_if``) and the plan (``autoprec.policies``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy

from autoprec.formats import get_format
from autoprec.layers import ModuleState, first_tensor, is_measurable
from autoprec.planning import FormatErrors, UnitErrors
from autoprec.runners import is_functorch_active
from autoprec.unit_rounding import RelativeError, UnitRounding
from autoprec.units import Unit
from autoprec.what_if import Sample, take_rows, take_sample

_FLOAT32_EPS = torch.finfo(torch.float32).eps


class RoundingProbe:
    """Looks at the units of one fit.

    Args:
        units: All decision units.
        is_other_thread: Whether the caller is not the thread that trains.

    Attributes:
        is_wanted: Whether the next window that is measured is to be looked at.
        is_open: Whether the current window is.
        errors: What the latest such window has told, by unit name.
    """

    def __init__(self, units: Sequence[Unit], is_other_thread: Callable[[], bool]) -> None:
        self.is_wanted = self.is_open = False
        self.errors: dict[str, UnitErrors] = {}
        self._units = {unit.name: unit for unit in units}
        self._is_other_thread = is_other_thread
        self._relative: dict[str, dict[str, RelativeError]] = {}
        self._open: dict[str, UnitRounding] = {}
        self._positions = 0.0  # of the outputs that the losses are made of
        self._last_positions = 0.0

    # ---- windows ----

    def begin_window(
        self, formats: Mapping[str, Sequence[str]], inv_scale: float, scale: float, headroom_bits: float
    ) -> None:
        """Called when a window opens that is to be looked at.

        Args:
            formats: What to try, by unit name.
            inv_scale: Takes the loss scale off a gradient.
            scale: Loss scale that a format would have that needs one.
            headroom_bits: Bits below the largest value of a format from where on a tensor counts as overflowing.
        """
        self.close()
        self.is_open = True
        for name, names in formats.items():
            known = self._relative.setdefault(name, {})
            tried = [get_format(each) for each in names]
            self._open[name] = UnitRounding(tried, known, headroom_bits, inv_scale, scale)

    @contextmanager
    def region(self, is_compiled: bool) -> Iterator[None]:
        """Looks at the outputs of a forward; the window is open.

        Args:
            is_compiled: Whether a hook would make the compiler start anew. Then only weights are looked at.
        """
        if is_compiled:
            yield
            return
        states = [state for name in self._open for state in self._units[name].states]
        looks = {id(state.module): self._look_of(state) for state in states}

        def look(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in looks:
                looks[id(module)](args, output)

        handle = register_module_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()
            self._positions += self._last_positions

    def commit(self) -> None:
        """Called when the window has ended with an applied step."""
        if self.is_open:
            samples = max(self._positions, 1.0)
            self.errors = {name: unit.summary(samples) for name, unit in self._open.items()}
            self.is_wanted = False
        self.close()

    def close(self) -> None:
        """Drops what a window has kept."""
        self.is_open = False
        self._open = {}
        self._positions = self._last_positions = 0.0

    # ---- measuring ----

    def _look_of(self, state: ModuleState) -> Callable[[Any, Any], None]:
        unit = self._open[state.name]

        def note_call(args: Any, output: Any) -> None:
            y = first_tensor(output)
            if y is None or not is_measurable(y) or self._is_elsewhere():
                return
            with torch.no_grad():
                self._last_positions = y.numel() / _width(y, state.unit.kind)
                sample = take_sample(y)
                unit.note_call(y.numel() * state.fan_in, sample)
                x = first_tensor(args)
                if x is not None and is_measurable(x):
                    unit.note_input(take_sample(x))
            if y.grad_fn is not None:  # a hook on a parameter would stay
                y.register_hook(self._gradient_hook(unit, sample))

        return note_call

    def _is_elsewhere(self) -> bool:
        """Whether a forward is not simply one of the training step."""
        return torch.compiler.is_compiling() or is_functorch_active() or self._is_other_thread()

    def _gradient_hook(self, unit: UnitRounding, sample: Sample) -> Callable[[Tensor], None]:
        def note_gradient(gradient: Tensor) -> None:
            if self.is_open and is_measurable(gradient):
                with torch.no_grad():
                    unit.note_output(sample, take_sample(gradient))

        return note_gradient

    @torch.no_grad()
    def note_step(
        self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], factor: float, optimizer: Any
    ) -> None:
        """Called before a step.

        Args:
            parameters: Parameters with gradients.
            grads: Their gradients.
            factor: What the gradients have to be multiplied by to be unscaled.
            optimizer: Takes the step.
        """
        found = dict(zip(map(id, parameters), grads, strict=True))
        for name, unit in self._open.items():
            for parameter in self._units[name].parameters:
                if is_lazy(parameter) or not is_measurable(parameter):
                    continue
                if id(parameter) in found:
                    _note_weight(unit, parameter, found[id(parameter)], factor, optimizer)
                elif not parameter.requires_grad and parameter.ndim > 1:
                    unit.note_frozen_weight(take_sample(parameter))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "is_wanted": self.is_wanted,
            "errors": {name: asdict(errors) for name, errors in self.errors.items()},
            "relative": {
                name: {key: list(error) for key, error in formats.items()} for name, formats in self._relative.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned; units that are not in this model are left out."""
        self.close()
        self.is_wanted = bool(state["is_wanted"])
        self.errors = {name: _loaded(errors) for name, errors in state["errors"].items() if name in self._units}
        self._relative = {
            name: {key: RelativeError(*error) for key, error in formats.items()}
            for name, formats in state["relative"].items()
            if name in self._units
        }


def _loaded(state: Mapping[str, Any]) -> UnitErrors:
    formats = {name: FormatErrors(**errors) for name, errors in state["formats"].items()}
    return UnitErrors(**{**state, "formats": formats})


def _note_weight(unit: UnitRounding, parameter: Tensor, grad: Tensor, factor: float, optimizer: Any) -> None:
    weight, gradient = parameter, grad
    if grad.is_sparse:  # only the rows that have a gradient
        grad = grad.coalesce()
        weight, gradient = parameter[grad.indices()[0]], grad.values()
    if not is_measurable(weight) or not is_measurable(gradient) or weight.shape != gradient.shape:
        return
    taken = take_sample(gradient)
    # as it would stand in `.grad`
    sample = taken._replace(values=taken.values * factor, amax=taken.amax * factor, eps=_FLOAT32_EPS)
    step = _step_of(parameter, sample.values, optimizer, is_whole=weight is parameter)
    unit.note_weight(take_sample(weight), sample, step, weight.ndim > 1)


def _width(y: Tensor, kind: str) -> int:
    """Elements of an output that belong together; a layer with a loss of its own puts out a single one."""
    axis = 1 if kind == "conv" and y.ndim > 1 else -1
    return y.shape[axis] if y.ndim else 1


def _step_of(parameter: Tensor, gradient: Tensor, optimizer: Any, is_whole: bool) -> Tensor:
    """What the newest gradient contributes to an optimizer step, up to its sign; on a sample.

    Settings have the names of Adam's where an optimizer works as Adam does; under the same names others may keep
    anything.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = optimizer.param_groups
    group: dict[str, Any] = next((group for group in groups if any(each is parameter for each in group["params"])), {})
    rate, betas = _number(group.get("lr"), 1.0), group.get("betas")
    first, second = map(_number, betas[:2]) if isinstance(betas, (tuple, list)) and len(betas) > 1 else (math.nan,) * 2
    if math.isnan(first + second):
        return gradient * rate
    rate *= 1.0 - first
    eps = _number(group.get("eps"), 0.0) or 1e-30
    state = optimizer.state.get(parameter, {})
    moment, steps = state.get("exp_avg_sq"), _number(state.get("step"), 0.0)
    is_known = isinstance(moment, Tensor) and is_measurable(moment) and moment.shape == parameter.shape
    if not is_whole or not is_known:
        return rate * gradient / (gradient.abs() + eps)
    # the running mean is biased towards its start, which matters in the first steps only
    bias = 1.0 - second**steps if steps else 1.0
    unbiased = take_rows(moment) / (bias or 1.0)
    return rate * gradient / (unbiased.sqrt() + eps)


def _number(value: Any, other: float = math.nan) -> float:
    """Returns a setting as a float, ``other`` if it is not one number."""
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else other
