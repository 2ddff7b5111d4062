"""Keeps second moments of Adam in 16 bits where kernels take its steps, and hands out float32 to everybody else.

A moment is narrow in the optimizer's own ``state``, from one step of the kernels to the next. Torch's own loop,
``state_dict``, copies of the optimizer and whoever has it after the fit find float32. Widening is exact and so is
narrowing again what was widened, so a run that was saved and resumed goes on bit for bit.

Random words follow from the state alone: a call of the kernel has a seed of its own for each optimizer, group and first
weight in its list, and the counter of steps of that weight as its offset, which never comes twice. Narrowing for the
first time has seeds of its own as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from autoprec.config import AutoPrecisionConfig
from autoprec.ops import cast, describe, has_kernel

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEY = "exp_avg_sq"
# which words a seed is for; the rest of its 64 bits are optimizer (15), group (16) and weight (32)
_STEPPING, _NARROWING = 0, 1
# settings of a group under which torch's own step does something that the kernels do not
LEFT_TO_TORCH = ("amsgrad", "capturable", "differentiable")

Group = Mapping[str, Any]


class NarrowMoments:
    """The second moments of one optimizer, in 16 bits from a certain step on.

    Args:
        optimizer: Torch's Adam or AdamW.
        format_name: ``"bf16"`` or ``"fp16"``.
        after: Applied steps that a weight has behind it when its moment is narrowed.
        index: Place among the optimizers of the run, so that each has random words of its own.

    Attributes:
        dtype: What a narrow moment is kept in.
        has_stepped: Whether a kernel worked on narrow moments in the latest call of ``optimizer.step``.
    """

    def __init__(self, optimizer: Optimizer, format_name: str, after: int = 0, index: int = 0) -> None:
        self.dtype = _DTYPES[format_name]
        self.has_stepped = False
        self._optimizer = optimizer
        self._format_name = format_name
        self._after = after
        self._index = index
        # first of all hooks: those of the user see float32
        self._handle: RemovableHandle = optimizer.register_state_dict_post_hook(self._hand_out, prepend=True)
        optimizer.__getstate__ = self._copied  # type: ignore[method-assign]
        self.guard()

    def guard(self) -> None:
        """Widens moments from now on before torch's own loop takes a step, whoever calls it."""
        own: Callable[..., bool] = type(self._optimizer)._init_group  # type: ignore[attr-defined]

        def widened(group: Group, *lists: list[Tensor]) -> bool:
            self._widen(group)
            return own(self._optimizer, group, *lists)

        self._optimizer._init_group = widened  # type: ignore[attr-defined]

    def release(self) -> None:
        """Leaves the optimizer as it would be without."""
        self._handle.remove()
        del self._optimizer.__getstate__, self._optimizer._init_group  # type: ignore[attr-defined]
        for group in self._optimizer.param_groups:
            self._widen(group)

    # ---- for a step of the kernels ----

    def narrow(self, group: Group, members: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
        """Narrows what is due, before a step.

        Args:
            group: A group of the optimizer.
            members: Its parameters that take part in the step.
            states: Their first moments, second moments and counters.

        Returns:
            Whether tensors of the state were replaced.
        """
        count = len(members)
        moments, counters = states[count : 2 * count], states[2 * count :]
        wide = [i for i, moment in enumerate(moments) if moment.dtype is not self.dtype]
        due = [i for i in wide if counters[i].item() >= self._after]
        places = {id(parameter): place for place, parameter in enumerate(group["params"])} if due else {}
        for i in due:
            seed = self._seed(_NARROWING, group, places[id(members[i])])
            narrow = self._round(moments[i], seed, int(counters[i].item()))
            self._optimizer.state[members[i]][_KEY] = narrow
        self.has_stepped |= len(due) > 0 or len(wide) < count
        return bool(due)

    def words(self, group: Group, members: Sequence[Tensor], states: Sequence[Tensor]) -> dict[str, int]:
        """Seed and offset for a step of these parameters; arguments as for :meth:`narrow`."""
        place = next(place for place, parameter in enumerate(group["params"]) if parameter is members[0])
        return {"seed": self._seed(_STEPPING, group, place), "offset": int(states[2 * len(members)].item())}

    def _seed(self, purpose: int, group: Group, place: int) -> int:
        index = next(index for index, each in enumerate(self._optimizer.param_groups) if each is group)
        return purpose << 63 | self._index << 48 | index << 32 | place

    def _round(self, moment: Tensor, seed: int, offset: int) -> Tensor:
        values = cast(moment, self._format_name, seed=seed, offset=offset).values
        if values.stride() == moment.stride():
            return values
        return torch.empty_strided(moment.shape, moment.stride(), dtype=self.dtype, device=moment.device).copy_(values)

    # ---- for everybody else ----

    def _is_narrow(self, parameter: Any, row: Any) -> bool:
        moment = row.get(_KEY) if isinstance(row, dict) else None
        # torch itself makes narrow moments for narrow weights
        return isinstance(moment, Tensor) and moment.dtype is self.dtype and parameter.dtype is torch.float32

    def _widen(self, group: Group) -> None:
        for parameter in group["params"]:
            row = self._optimizer.state.get(parameter)
            if row is not None and self._is_narrow(parameter, row):
                row[_KEY] = row[_KEY].float()

    def _wide_rows(self) -> dict[Any, dict[str, Any]]:
        """State of the parameters whose moments are narrow, in float32; the optimizer keeps its own."""
        items = self._optimizer.state.items()
        return {key: {**row, _KEY: row[_KEY].float()} for key, row in items if self._is_narrow(key, row)}

    def _hand_out(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        wide = {id(optimizer.state[key]): row for key, row in self._wide_rows().items()}
        return {**state_dict, "state": {key: wide.get(id(row), row) for key, row in state_dict["state"].items()}}

    def _copied(self) -> dict[str, Any]:
        """What ``copy`` and ``pickle`` take of the optimizer."""
        found = type(self._optimizer).__getstate__(self._optimizer)
        wide = self._wide_rows()
        if wide:
            found["state"] = found["state"].copy()
            found["state"].update(wide)
        return found


def narrow_moments(
    optimizers: Sequence[Any], fused: Collection[int], config: AutoPrecisionConfig, masked: str | None
) -> tuple[dict[int, NarrowMoments], str | None]:
    """Has second moments kept as the settings ask for; warns where it cannot be done.

    Args:
        optimizers: All optimizers of a fit.
        fused: ``id`` of those whose steps kernels take.
        config: Settings.
        masked: Why precision is not steered, ``None`` if it is.

    Returns:
        What keeps them, by ``id`` of the optimizer, and the reasons why some or all moments stay in float32.
    """
    reasons: list[str | None]
    if not config.fused_step:
        reasons = ["`fused_step=False` leaves every step to the optimizer"]
    elif masked is not None:
        reasons = [f"kernels take steps only where precision is steered, which it is not: {masked}"]
    else:
        reasons = [_obstacle(each, id(each) in fused) for each in optimizers]
    kept = {
        id(each): NarrowMoments(each, config.second_moment, config.second_moment_after, index)
        for index, (each, reason) in enumerate(zip(optimizers, reasons, strict=False))
        if reason is None
    }
    found = dict.fromkeys(reason for reason in reasons if reason is not None)
    if not found:
        return kept, None
    text = "; ".join(found)
    rank_zero_warn(
        f"Passed `AutoPrecisionConfig(second_moment={config.second_moment!r})`."
        f" {'Some' if kept else 'All'} second moments stay in float32: {text}."
    )
    return kept, text


def _obstacle(optimizer: Any, is_fused: bool) -> str | None:
    """Why the second moments of an optimizer cannot be narrow, ``None`` if they can."""
    name = type(optimizer).__qualname__
    if type(optimizer) not in (Adam, AdamW):
        return f"`{name}` is not torch's own Adam or AdamW"
    groups = optimizer.param_groups
    setting = next((setting for setting in LEFT_TO_TORCH if any(group.get(setting) for group in groups)), None)
    if setting is not None:
        return f"`{name}` has `{setting}=True`, with which it takes its steps itself"
    if is_fused:
        return None
    device = next((parameter.device.type for group in groups for parameter in group["params"]), "cpu")
    if not has_kernel("prepare_adam", device):
        return f"steps on `{device}` are taken by {describe('prepare_adam', device)}"
    return f"the step of `{name}` was changed by other code, or its weights are on several devices"
