"""What is measured while a model trains, and how it becomes the readings that a decision rests on.

Per step nothing is read from the device but the global norm, which the finite check needs anyway. Norms of single
tensors stay on the device until a decision is due; amax and underflow of gradients and the range of outputs are
sampled in the window before it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.formats import get_format
from autoprec.layers import Record
from autoprec.noise_probe import NoiseProbe
from autoprec.ops import grad_stats
from autoprec.units import Unit

WINDOW = 64
LEVEL = 32  # losses in what counts as the level of the loss
FEWEST = 8
_SMALLEST_FLOAT32 = torch.finfo(torch.float32).tiny
_WINDOWS = ("losses", "loss_scales", "norms", "outcomes", "clipped")


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


def _refill(window: deque[Any], values: Iterable[Any]) -> None:
    window.clear()
    window.extend(values)


@dataclass
class UnitTelemetry:
    """Rolling measurements of one unit.

    Attributes:
        norms: Gradient norm of each applied step, newest last.
        amax: Largest finite gradient magnitude in the last sample, NaN before the first.
        nonfinite_count: Non-finite gradient entries in the last sample.
        underflow_fraction: Share of the unit's gradient that its format would lose, in the last sample.
        underflow_fraction_lower: The same for the next lower format.
        weight_subnormal: Share of the non-zero weights below the format's smallest normal number, in the last sample.
        weight_subnormal_lower: The same for the next lower format.
        act_amax: Largest output magnitude per sample, newest last.
        overflow_count: Outputs that were not finite since the last decision.
        compute: Multiplications per forward in the last sample.
        calls: How many calls of layers that was, those of all micro-batches and of all layers of a block.
    """

    norms: deque[float] = field(default_factory=_window)
    amax: float = math.nan
    nonfinite_count: int = 0
    underflow_fraction: float = math.nan
    underflow_fraction_lower: float = math.nan
    weight_subnormal: float = math.nan
    weight_subnormal_lower: float = math.nan
    act_amax: deque[float] = field(default_factory=_window)
    overflow_count: int = 0
    compute: float = 0.0
    calls: int = 0


class Telemetry:
    """Rolling measurements of a run.

    Args:
        units: All decision units.
        norm_window: How many finite global norms are kept.

    Attributes:
        noise: Measures the gradient-noise scale.
        loss_count: Losses noted so far.
    """

    def __init__(self, units: Sequence[Unit], norm_window: int = WINDOW) -> None:
        self.units = {unit.name: UnitTelemetry() for unit in units}
        self.losses: deque[float] = _window()
        self.loss_count = 0
        self.loss_scales: deque[float] = _window()
        self.norms: deque[float] = deque(maxlen=norm_window)
        self.outcomes: deque[int] = deque(maxlen=WINDOW)  # 1 applied, 0 skipped
        self.clipped: deque[int] = deque(maxlen=WINDOW)
        self._loss_at_change = math.nan
        self._losses_since_change = 0
        self._unit_of = {id(p): unit.name for unit in units for p in unit.parameters}
        self.noise = NoiseProbe()
        self._pending_losses: list[Tensor] = []
        self._pending_norms: deque[tuple[list[str | None], Tensor]] = deque(maxlen=WINDOW)

    def note_loss(self, loss: Tensor) -> Tensor:
        """Keeps the loss of one batch, not divided by accumulation, not scaled, on any device.

        Returns:
            What was kept, ``[]``, float32.
        """
        loss = loss.detach()
        if type(loss) is not Tensor:  # of another library, which may keep its numbers elsewhere
            loss = torch.tensor(float(loss.float().mean()))
        is_scalar = loss.ndim == 0 and loss.dtype is torch.float32
        kept = loss if is_scalar else loss.float().mean()
        self._pending_losses.append(kept)
        self.loss_count += 1
        del self._pending_losses[:-WINDOW]
        return kept

    def drop_losses(self, count: int) -> None:
        """Forgets the newest losses: their window was lost.

        Args:
            count: How many.
        """
        for _ in range(count):
            if self._pending_losses:
                self._pending_losses.pop()
            elif self.losses:
                self.losses.pop()

    def note_applied(
        self, parameters: Sequence[nn.Parameter], norms: Tensor, total: float, is_clipped: bool, loss_scale: float
    ) -> None:
        """Keeps one applied step.

        Args:
            parameters: The parameters that had a gradient.
            norms: ``[n]``, their gradients' norms, unscaled, before clipping.
            total: Global norm before clipping.
            is_clipped: Whether the clip threshold acted.
            loss_scale: Loss scale of the step.
        """
        self.noise.note_applied()
        self.norms.append(total)
        self.outcomes.append(1)
        self.clipped.append(int(is_clipped))
        self.loss_scales.append(loss_scale)
        self._pending_norms.append(([self._unit_of.get(id(p)) for p in parameters], norms))

    def note_skipped(self) -> None:
        """Keeps one skipped step."""
        self.outcomes.append(0)

    def sample_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        grads: Sequence[Tensor],
        factor: float,
        formats: Mapping[str, tuple[str, str | None]],
        loss_scale: float,
    ) -> None:
        """Measures amax, non-finite entries and underflow of each unit's unscaled gradients.

        Args:
            parameters: Parameters with gradients.
            grads: Their gradients.
            factor: What the gradients have to be multiplied by to be unscaled, a power of two.
            formats: Unit name to its format and the next lower one.
            loss_scale: Current loss scale: what underflows is the scaled gradient.
        """
        owned = [(self._unit_of.get(id(p)), grad) for p, grad in zip(parameters, grads, strict=True)]
        known = [(name, grad) for name, grad in owned if name is not None]
        if not known:
            return
        grads = [grad for _, grad in known]
        limits = [[_lost_below(name, loss_scale) / factor for name in formats[unit]] for unit, _ in known]
        stats = grad_stats(grads, [low for low, _ in limits], [low for _, low in limits])
        amax = stats.amax * factor
        columns = amax, stats.nonfinite_count, stats.underflow_fraction, stats.underflow_fraction_lower
        rows = torch.stack(columns, dim=1).tolist()
        sizes = [float(grad._values().numel() if grad.is_sparse else grad.numel()) for grad in grads]
        self._store_sample([name for name, _ in known], rows, sizes)
        for name in {name for name, _ in known}:
            # a gradient that vanished as a whole leaves nothing to count
            if self.units[name].amax == 0.0 and get_format(formats[name][0]).needs_loss_scale:
                self.units[name].underflow_fraction = 1.0

    def sample_weights(self, units: Sequence[Unit], formats: Mapping[str, tuple[str, str | None]]) -> None:
        """Measures which share of each unit's weights a format could only hold as subnormal numbers.

        Args:
            units: Units to measure.
            formats: Unit name to its format and the next lower one.
        """
        for unit in units:
            limits = [0.0 if name is None else _smallest_weight(name) for name in formats[unit.name]]
            measured = self.units[unit.name]
            if max(limits) <= _SMALLEST_FLOAT32:  # such weights are nothing that a format could lose
                measured.weight_subnormal = measured.weight_subnormal_lower = 0.0
                continue
            weights = [p.detach() for p in unit.parameters if p.is_floating_point() and not nn.parameter.is_lazy(p)]
            if not weights:
                continue
            sizes = torch.stack([torch.count_nonzero(weight) for weight in weights]).float()
            sizes = sizes / sizes.sum().clamp(min=1)
            stats = grad_stats(weights, *([limit] * len(weights) for limit in limits))
            shares = stats.underflow_fraction @ sizes, stats.underflow_fraction_lower @ sizes
            measured.weight_subnormal, measured.weight_subnormal_lower = map(float, shares)

    def _store_sample(self, names: Sequence[str], rows: Sequence[Sequence[float]], sizes: Sequence[float]) -> None:
        rows_of: dict[str, list[tuple[Sequence[float], float]]] = {}
        for name, row, size in zip(names, rows, sizes, strict=True):
            rows_of.setdefault(name, []).append((row, size))
        for name, mine in rows_of.items():
            total = max(sum(size for _, size in mine), 1.0)
            unit = self.units[name]
            unit.amax = max(row[0] for row, _ in mine)
            unit.nonfinite_count = int(sum(row[1] for row, _ in mine))
            unit.underflow_fraction = sum(row[2] * size for row, size in mine) / total
            unit.underflow_fraction_lower = sum(row[3] * size for row, size in mine) / total

    def note_outputs(self, records: Sequence[Record]) -> None:
        """Keeps the ranges of outputs recorded in one window."""
        outputs = [record for record in records if not record.is_input]
        if not outputs:
            return
        bounds = torch.stack([record.bounds.float() for record in outputs]).abs().amax(dim=1).tolist()
        amax: dict[str, float] = {}
        compute: dict[str, float] = {}
        calls = Counter(record.name for record in outputs)
        for record, value in zip(outputs, bounds, strict=True):
            if math.isfinite(value):
                amax[record.name] = max(amax.get(record.name, 0.0), value)
            else:
                self.units[record.name].overflow_count += 1
            compute[record.name] = compute.get(record.name, 0.0) + record.compute
        for name, value in amax.items():
            self.units[name].act_amax.append(value)
        for name, value in compute.items():
            self.units[name].compute, self.units[name].calls = value, calls[name]

    def note_overflow(self, name: str) -> None:
        """Counts an output outside its format's range."""
        self.units[name].overflow_count += 1

    def flush(self) -> None:
        """Reads what is still on the device; called when a decision or a checkpoint is due."""
        self.flush_losses()
        for names, norms in self._pending_norms:
            squares: dict[str, float] = {}
            for name, norm in zip(names, norms.tolist(), strict=True):
                if name is not None:
                    squares[name] = squares.get(name, 0.0) + norm * norm
            for name, square in squares.items():
                self.units[name].norms.append(math.sqrt(square))
        self._pending_norms.clear()

    def flush_losses(self) -> None:
        """Reads the losses that are still on the device."""
        if self._pending_losses:
            self.losses.extend(torch.stack(self._pending_losses).tolist())
            self._losses_since_change += len(self._pending_losses)
            self._pending_losses.clear()

    def note_new_formats(self) -> None:
        """Keeps the level of the loss, to be compared with what follows; called when formats have changed."""
        self.flush_losses()
        self._loss_at_change, self._losses_since_change = _level(list(self.losses)[-LEVEL:]), 0

    @property
    def loss_change_bits(self) -> float:
        """log2 of the loss now over that before formats last changed; NaN if one is not known or not > 0."""
        level = _level(list(self.losses)[-min(LEVEL, self._losses_since_change) :])
        is_known = self._losses_since_change >= FEWEST and level > 0.0 and self._loss_at_change > 0.0
        return math.log2(level / self._loss_at_change) if is_known else math.nan

    def start_window(self) -> None:
        """Forgets the counts of events that the last decision has seen."""
        for unit in self.units.values():
            unit.overflow_count = 0

    def copies(self) -> dict[str, Any]:
        """Returns copies of all windows, without reading what is still on the device."""
        return {
            "windows": {name: list(getattr(self, name)) for name in _WINDOWS},
            "pending": (list(self._pending_losses), list(self._pending_norms)),
            "units": {name: (list(unit.norms), list(unit.act_amax)) for name, unit in self.units.items()},
        }

    def go_back(self, copies: Mapping[str, Any]) -> None:
        """Forgets the windows since ``copies`` was called, skipped ones included."""
        for name in _WINDOWS:
            _refill(getattr(self, name), copies["windows"][name])
        losses, norms = copies["pending"]
        self._pending_losses[:] = losses
        _refill(self._pending_norms, norms)
        for name, (unit_norms, act_amax) in copies["units"].items():
            _refill(self.units[name].norms, unit_norms)
            _refill(self.units[name].act_amax, act_amax)

    @property
    def median_norm(self) -> float:
        """Running median of finite global norms, NaN before the first."""
        if not self.norms:
            return math.nan
        ordered = sorted(self.norms)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives, and a tensor while the noise scale is being measured."""
        self.flush()
        return {
            "losses": list(self.losses),
            "loss_at_change": self._loss_at_change,
            "losses_since_change": self._losses_since_change,
            "loss_count": self.loss_count,
            "loss_scales": list(self.loss_scales),
            "norms": list(self.norms),
            "outcomes": list(self.outcomes),
            "clipped": list(self.clipped),
            "noise": self.noise.state_dict(),
            "units": {
                name: {**vars(unit), "norms": list(unit.norms), "act_amax": list(unit.act_amax)}
                for name, unit in self.units.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned; units that are not in this model are left out."""
        for name in _WINDOWS:
            _refill(getattr(self, name), state[name])
        self.loss_count = int(state.get("loss_count", 0))
        if "noise" in state:  # not in a checkpoint of an earlier version
            self.noise.load_state_dict(state["noise"])
        self._loss_at_change = float(state.get("loss_at_change", math.nan))
        self._losses_since_change = int(state.get("losses_since_change", 0))
        self._pending_losses.clear()
        self._pending_norms.clear()
        for name, values in state["units"].items():
            if name in self.units:
                windows = {key: deque(values[key], maxlen=WINDOW) for key in ("norms", "act_amax")}
                self.units[name] = UnitTelemetry(**{**values, **windows})


def _level(losses: Sequence[float]) -> float:
    known = [loss for loss in losses if math.isfinite(loss)]
    return sum(known) / len(known) if len(known) >= FEWEST else math.nan


def _smallest_weight(format_name: str) -> float:
    """Smallest normal magnitude of a weight; fp8 and int8 weights are scaled by their own amax and start from bf16."""
    number_format = get_format(format_name)
    return (get_format("bf16") if number_format.is_scaled else number_format).tiny


def _lost_below(format_name: str | None, loss_scale: float) -> float:
    """Magnitude of an unscaled gradient below which a format keeps only a part of its bits, or nothing.

    What was computed in the format holds no smaller values than its subnormals, so these must count.
    """
    if format_name is None:
        return 0.0
    number_format = get_format(format_name)
    # fp8 and int8 tensors are scaled by their own amax, and what they return is bf16
    wide = get_format("bf16") if number_format.is_scaled or number_format.is_integer else number_format
    return wide.tiny / loss_scale
