"""A map of formats that a model computes in outside of training: predictions, tests, plain PyTorch inference.

What lives here: calls in these formats, and the model as it was afterwards. What does not: which unit gets which format
(``map_units``), how a layer runs in one (``runners``), and how far outputs move by it (``inference``).

Every layer, and every module that holds one, gets a lookalike class. The first of them that is called opens a region in
the calling thread: autocast is on in it, and each layer switches its target, as in a training step. So it does not
matter whether ``model(x)``, ``model.generate(...)`` or a part of the model is called.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.action import Action
from autoprec.autocast import ENCODER_FAST_PATH, ambient
from autoprec.formats import rank
from autoprec.kept_weights import KeptWeights, is_tracing
from autoprec.layers import ModuleState, Runtime, first_tensor
from autoprec.lookalike import part_from_lookalikes, plain_class, registers_subclasses, undo_lookalike
from autoprec.map_units import judge
from autoprec.runners import Runner, is_functorch_active, make_base_runner
from autoprec.trial import Trial
from autoprec.units import Unit, find_units

_STATE = "_autoprec"


class _Thread(threading.local):
    """What a thread is inside of.

    Attributes:
        base: Target of the autocast around the outermost region, float32 for none; ``None`` outside of regions.
    """

    base: torch.dtype | None = None


_thread = _Thread()
_orders = itertools.count()


class AppliedMap:
    """A map that is in force until :meth:`remove`, or until the end of a ``with`` block.

    Args:
        model: Any module.
        precision: Format by unit name or fnmatch pattern, as in ``Action.precision``. Layers that are not named compute
            as without it: in fp32, or in the precision of an autocast that the caller opens.
        device: Where the model runs; decides what is native. By default where its first parameter is.

    Raises:
        ValueError: If a key names no unit, or a unit that was named exactly cannot run in its format. Names what is
            close.
        TypeError: If ``model`` is no module.

    Attributes:
        formats: Format by unit name, of those that the map names.
        refused: Units that a pattern meets and that stay as they are, with the reason.
        fidelity: How far outputs are from those without the map, as ``fidelity`` measures it; ``None`` where
            that was not measured.
        time_ratio: Time of a forward with the map over that without, ``None`` where that was not measured.
    """

    def __init__(self, model: nn.Module, precision: Mapping[str, str], *, device: torch.device | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Passed a model of type `{type(model).__qualname__}`. It must be a `torch.nn.Module`.")
        precision = Action(precision=precision).precision or {}
        self._device = device or _device_of(model)
        units = find_units(model, self._device)
        self.formats, self.refused = judge(units, precision)
        self.fidelity: dict[str, float] | None = None
        self.time_ratio: float | None = None
        self._units = {unit.name: unit for unit in units}
        self._runtime = Runtime(self._device.type)
        self._runtime.entry = self._entry
        self._runtime.is_active = True
        self._open = threading.local()
        self._is_tried = False
        self._repaired: dict[str, str] = {}
        self._root = model
        self.order = next(_orders)
        self._states = self._install(model, units)
        self.choose_copies()

    # ---- what is ----

    @property
    def emulated(self) -> dict[str, str]:
        """Units whose format the device does not have: rounded to it, computed in a wider one, slower than without."""
        return {name: each for name, each in self.formats.items() if self._units[name].is_emulated(each)}

    @property
    def repaired(self) -> dict[str, str]:
        """Operations that have no low-precision form and ran in float32 instead, by the unit before them."""
        return dict(self._repaired)

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Named units whose forward nobody has called yet; compiled calls do not count."""
        return tuple(name for name in self.formats if not self._units[name].has_run)

    @property
    def copied_bytes(self) -> int:
        """Memory of the copies of weights that are there now."""
        return self._weights.bytes

    @property
    def is_removed(self) -> bool:
        """Whether the model is as it was."""
        return not self._states

    def __repr__(self) -> str:
        """Formats with the number of units in each."""
        counts = Counter(self.formats.values())
        return f"AppliedMap({', '.join(f'{counts[name]} x {name}' for name in sorted(counts, key=rank))})"

    # ---- in force ----

    def __enter__(self) -> AppliedMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Gives the model its own classes back; may be called at any time, also twice, and in any order of maps."""
        _move(self._states, _take_out)
        self._states = []
        self._weights.forget()

    def refresh(self) -> None:
        """Makes the copies of weights anew; needed after writes through ``.data`` only, others are noticed."""
        self._weights.forget()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Has the model compute as without the map for the time of a block, in all threads."""
        _move(self._states, _take_out)
        try:
            yield
        finally:
            _move(self._states, _put_in)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Opens the region that calls of the model would open; around code that also computes by itself."""
        if self._is_open:
            yield
            return
        device_type, found = self._device.type, _thread.base
        base = found or _autocast_dtype(device_type) or torch.float32
        is_tried = self._is_tried and not self._repaired
        trial = None if is_tried or is_tracing() else Trial()  # a trace is compared with the next one, name by name
        self._weights.check()
        _thread.base, self._open.trial = base, trial
        self._open.is_open = True
        try:
            with ENCODER_FAST_PATH.region(), ambient(device_type, base), trial or nullcontext():
                yield
            self._is_tried |= trial is not None
        finally:
            self._open.is_open = False
            _thread.base = found
            if trial is not None:
                self._repaired.update(trial.failures)

    def choose_copies(self) -> None:
        """Begins anew with copies of weights; called when formats of layers have changed."""
        self._weights = KeptWeights([state for state in self._states if state.asked is not None])

    @property
    def _is_open(self) -> bool:
        return getattr(self._open, "is_open", False)

    def _entry(self, state: ModuleState) -> AbstractContextManager[Any] | None:
        if torch.compiler.is_compiling():  # threads and trials are nothing for a graph
            is_root = state.module is self._root
            return ambient(self._device.type, torch.float32) if is_root else None
        return None if self._is_open else self.region()

    def run(self, state: AppliedState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module; what its class calls.

        Args:
            state: The module's.
            args: Arguments of its forward.
            kwargs: The same.
        """
        if not self._is_open:  # under autocast of the caller
            with self.region():
                return self.run(state, args, kwargs)
        copied = None if state.asked is None or is_functorch_active() else self._weights.run(state, args, kwargs)
        output = state.run_as_asked(_thread.base or torch.float32, args, kwargs) if copied is None else copied
        trial = self._open.trial
        if trial is not None and state.is_unit:
            tensor = first_tensor(output)
            if tensor is not None:
                trial.note_output(state.name, tensor)
        return output

    # ---- set-up ----

    def _install(self, model: nn.Module, units: Sequence[Unit]) -> list[AppliedState]:
        states: list[AppliedState] = []
        of_units = {id(module): unit for unit in units if unit.reason is None for module in unit.modules}
        holders = _holders(model, of_units)
        for module in model.modules():
            unit = of_units.get(id(module))
            if (unit is None and id(module) not in holders) or registers_subclasses(type(module)):
                continue
            try:
                state = self._make_state(module, unit)
                _put_in(state)
                state.settle()
            except (TypeError, ValueError, AttributeError, RuntimeError) as error:
                if unit is not None:
                    self.refused[unit.name] = f"its class cannot be extended ({error})"
                    self.formats.pop(unit.name, None)
                continue
            states.append(state)
        return states

    def _make_state(self, module: nn.Module, unit: Unit | None) -> AppliedState:
        part_from_lookalikes(module)  # a parametrization was added under another map, here or in what this is a copy of
        return AppliedState(module, unit, self, None if unit is None else self.formats.get(unit.name))


class AppliedState(ModuleState):
    """What a module carries while a map is applied to it.

    Args:
        module: A layer, or a module that holds layers.
        unit: Its unit, ``None`` for a module that only holds layers.
        applied: The map.
        named: Its format in the map, ``None`` where the map does not name it.

    Attributes:
        asked: Its format, that of a map below where this one does not name it; ``None`` to compute as without maps.
        below: The state of the map that was applied before.
    """

    __slots__ = ("_by_dtype", "applied", "asked", "below", "is_unit", "named")

    def __init__(self, module: nn.Module, unit: Unit | None, applied: AppliedMap, named: str | None) -> None:
        self.applied, self.named, self.asked, self.is_unit = applied, named, named, unit is not None
        self.below: Any = None
        self._by_dtype: dict[torch.dtype, Runner | None] = {}
        super().__init__(module, unit or Unit("", "other", (module,), ("",)), applied._runtime)
        self.refit()
        self.override = self._run

    def refit(self) -> None:
        """Chooses how the layer runs, for the format that is asked and the class that the layer has now."""
        self._by_dtype.clear()
        is_protected = self.is_unit and (self.unit.has_matrix or self.unit.kind == "norm")
        self.set_format(self.asked or ("fp32" if is_protected else None))

    def settle(self) -> bool:
        """Takes what the maps below ask for where its own names nothing; returns whether that has changed."""
        beneath = self.below.asked if isinstance(self.below, AppliedState) and self.is_unit else None
        before, self.asked = self.asked, self.named or beneath
        if self.asked != before:
            self.refit()
        return self.asked != before

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.applied.run(self, args, kwargs)

    def run_as_asked(self, base: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module in its format, or in the precision around the map where it has none.

        Args:
            base: Target of the autocast around the map.
            args: Arguments of its forward.
            kwargs: The same.
        """
        if self.asked is not None or base is torch.float32 or not self.unit.has_matrix or not self.is_unit:
            return self.run_plain(*args, **kwargs)
        if base not in self._by_dtype:
            self._by_dtype[base] = make_base_runner(self.module, base, self.runtime.device_type)
        run: Callable[..., Any] = self._by_dtype[base]  # type: ignore[assignment]
        return run(self.module, *args, **kwargs)


def is_applied(model: nn.Module) -> bool:
    """Whether a map is in force for a part of a model.

    Args:
        model: Any module.
    """
    return any(isinstance(module.__dict__.get(_STATE), AppliedState) for module in model.modules())


def _move(states: Sequence[AppliedState], how: Callable[[AppliedState], None]) -> None:
    """Puts the states of a map in or takes them out; maps above it see the formats that are below them now."""
    changed: dict[int, AppliedMap] = {}
    for state in states:
        how(state)
        changed |= {id(other.applied): other.applied for other in reversed(_chain(state.module)) if other.settle()}
    for applied in changed.values():
        applied.choose_copies()


def _chain(module: nn.Module) -> list[AppliedState]:
    """The states of a module, that of the map which was applied last first."""
    found: list[AppliedState] = []
    state = module.__dict__.get(_STATE)
    while isinstance(state, AppliedState):
        found.append(state)
        state = state.below
    return found


def _put_in(state: AppliedState) -> None:
    """Puts a state in, below those of maps that were applied later."""
    module = state.module
    later = [other for other in _chain(module) if other.applied.order > state.applied.order]
    if later:
        state.below, later[-1].below = later[-1].below, state
        return
    state.below = module.__dict__.get(_STATE)
    if state.below is None and plain_class(module) is not state.plain:
        state.refit()  # a parametrization was added or removed since
    object.__setattr__(module, "__class__", state.steered)
    module.__dict__[_STATE] = state


def _take_out(state: AppliedState) -> None:
    """Removes a state, on top or below others."""
    module = state.module
    top = module.__dict__.get(_STATE)
    if top is state:
        if state.below is not None:
            module.__dict__[_STATE] = state.below
            return
        module.__dict__.pop(_STATE, None)
        undo_lookalike(module)
        return
    for other in _chain(module):
        if other.below is state:
            other.below = state.below


def _holders(model: nn.Module, of_units: Mapping[int, Unit]) -> set[int]:
    """Modules with a unit somewhere below them."""
    found: set[int] = set()

    def visit(module: nn.Module) -> bool:
        below = [visit(child) for child in module.children()]
        if any(below):
            found.add(id(module))
        return any(below) or id(module) in of_units

    visit(model)
    return found


def _device_of(model: nn.Module) -> torch.device:
    tensors: Iterator[Tensor] = iter((*model.parameters(), *model.buffers()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
