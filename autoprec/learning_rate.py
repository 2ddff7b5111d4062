"""What the learning rate is multiplied by, and how: inside an optimizer's own update, and nowhere else.

Schedules, checkpoints, monitors and the user's code see their own value, in the closure as well. What lives here: the
rules, the factors, and putting values into groups and back. What does not: which effective batch there is, and the
steps themselves (``stepping``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Adam
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

_ADAM_BY_NAME = re.compile(r"AdamW?(8bit|4bit|Fp8)?")


def adascale_gain(k: float, noise_scale: float, first_batch: float) -> float:
    """Returns what one step on ``k`` times the batch is worth in steps on the first one (Johnson et al. 2020).

    Args:
        k: Effective batch in units of the first.
        noise_scale: Gradient-noise scale, in samples.
        first_batch: First effective batch, in samples.

    Returns:
        A number between 1 and ``k``.
    """
    noise = noise_scale / first_batch
    return k if math.isinf(noise) else (noise + 1.0) / (noise / k + 1.0)


def sde_beta(beta: Any, k: float) -> Any:
    """Returns Adam's beta for ``k`` times the batch (Malladi et al. 2022), not below 0."""
    scaled = 1.0 - k * (1.0 - beta)
    return scaled.clamp(min=0.0) if isinstance(scaled, Tensor) else max(scaled, 0.0)


def sde_eps(eps: Any, k: float) -> Any:
    """Returns Adam's epsilon for ``k`` times the batch (Malladi et al. 2022)."""
    return eps / math.sqrt(k)


def why_not_rule(rule: str, optimizers: Sequence[Any]) -> str | None:
    """Says why a rule cannot be used with some optimizers, ``None`` if it can.

    Args:
        rule: A name that ``BatchConfig(learning_rate=...)`` takes.
        optimizers: All optimizers of a run.
    """
    if rule == "none":
        return None
    for optimizer in optimizers:
        groups, name = optimizer.param_groups, type(optimizer).__qualname__
        if not all("lr" in group for group in groups):
            return f"`{name}` has groups without a learning rate (`lr`)"
        if rule == "sde" and not _is_adam(optimizer):
            return f"`{name}` is not Adam or AdamW, for which alone its equations hold"
    return None


def _is_adam(optimizer: Any) -> bool:
    is_named_so = _ADAM_BY_NAME.fullmatch(type(optimizer).__name__) is not None
    has_all = all("eps" in group and len(group.get("betas", ())) == 2 for group in optimizer.param_groups)
    return has_all and (is_named_so or isinstance(optimizer, Adam))


class LearningRate:
    """Factors on the learning rate of all optimizers of a run.

    Args:
        rule: What follows the effective batch, see :class:`~autoprec.config.BatchConfig`.

    Attributes:
        factor: Product of all factors.
        is_neutral: Whether steps are left as they are.
        batch_factor: Effective batch in units of the first.
    """

    def __init__(self, rule: str = "none") -> None:
        self.rule = rule
        self.batch_factor = 1.0
        self.factor = 1.0
        self.is_neutral = True
        self._named: dict[str, float] = {}
        self._noise_scale: float | None = None
        self._first_batch: float | None = None
        self._optimizers: list[Any] = []

    def attach(self, optimizers: Sequence[Any]) -> None:
        """Takes note of the optimizers, which some factors cannot be applied to."""
        self._optimizers = list(optimizers)

    def detach(self) -> None:
        """Lets go of the optimizers."""
        self._optimizers = []

    def set_batch_factor(self, k: float) -> None:
        """Sets the effective batch, in units of the first; called after it has changed.

        Raises:
            ValueError: If :meth:`why_not` has a reason.
        """
        reason = self.why_not(k)
        if reason is not None:
            raise ValueError(f"Passed `set_batch_factor({k!r})`. {reason[0].upper()}{reason[1:]}.")
        self.batch_factor = float(k)
        self._update()

    def why_not(self, k: float) -> str | None:
        """Says why the effective batch cannot be ``k`` times the first, ``None`` if it can."""
        if not 0.0 < k < math.inf:
            return f"the effective batch must be a finite multiple > 0 of the first, not {k!r}"
        if self.rule != "sde":
            return None
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            beta1, beta2 = map(float, group["betas"])
            beta = min(beta1, beta2, float(group.get("base_momentum", 1.0)))  # where a cycle of the momentum gets to
            if k * (1.0 - beta) >= 1.0 - 1e-9:  # 10 * (1 - 0.9) is a little less than 1
                return (
                    f"rule 'sde' would make Adam's beta 1 - k * (1 - beta) = {1.0 - k * (1.0 - beta):.3g} with"
                    f" k = {k:g} and beta = {beta:g}; it must be > 0"
                )
        return None

    def set_factor(self, name: str, factor: float) -> None:
        """Sets a further factor, 1 for none.

        Args:
            name: Whose it is; another call with the same name replaces it.
            factor: A finite number > 0.

        Raises:
            ValueError: If ``factor`` is something else.
        """
        if not 0.0 < factor < math.inf:
            raise ValueError(f"Passed `set_factor({name!r}, {factor!r})`. A factor must be a finite number > 0.")
        self._named[name] = float(factor)
        self._update()

    def set_noise_scale(self, samples: float) -> None:
        """Sets the gradient-noise scale for rule ``"adascale"``, whose gain is 1 until this was called.

        Args:
            samples: The scale. An estimate that is negative or NaN changes nothing.
        """
        if samples >= 0.0:
            self._noise_scale = float(samples)
            self._update()

    def set_first_batch(self, samples: float) -> None:
        """Sets the size of the first effective batch for rule ``"adascale"``, whose gain is 1 until this was called.

        Args:
            samples: Samples of an optimizer step, > 0.

        Raises:
            ValueError: If it is something else.
        """
        if not 0.0 < samples < math.inf:
            raise ValueError(f"Passed `set_first_batch({samples!r})`. It must be a finite number > 0.")
        self._first_batch = float(samples)
        self._update()

    @property
    def batch_gain(self) -> float:
        """The factor that follows from the effective batch."""
        k = self.batch_factor
        if self.rule == "linear":
            return k
        if self.rule in ("sqrt", "sde"):
            return math.sqrt(k)
        is_known = self._noise_scale is not None and self._first_batch is not None
        if self.rule == "adascale" and is_known:
            assert self._noise_scale is not None
            assert self._first_batch is not None
            return adascale_gain(k, self._noise_scale, self._first_batch)
        return 1.0

    @property
    def named(self) -> dict[str, float]:
        """The further factors that are not 1, by name."""
        return {name: factor for name, factor in self._named.items() if factor != 1.0}

    def _update(self) -> None:
        self.factor = math.prod(self._named.values(), start=self.batch_gain)
        self.is_neutral = self.factor == 1.0 and not self.moves_betas

    @property
    def moves_betas(self) -> bool:
        """Whether Adam's betas and epsilon are changed as well."""
        return self.rule == "sde" and self.batch_factor != 1.0

    def take(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Takes a step of an optimizer under the factors; not called while :attr:`is_neutral`.

        Args:
            optimizer: The optimizer.
            closure: Its closure.
            kwargs: What else ``optimizer.step`` takes.
        """
        with self.applied(optimizer) as applied:
            return optimizer.step(closure=applied.after(closure), **kwargs)

    def applied(self, optimizer: Any) -> Applied:
        """Returns what surrounds a step of an optimizer, and the closure in it."""
        return Applied(self, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "batch_factor": self.batch_factor,
            "named": dict(self._named),
            "noise_scale": self._noise_scale,
            "first_batch": self._first_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned; the rule is that of the settings."""
        self.batch_factor = float(state["batch_factor"])
        self._named = dict(state["named"])
        self._noise_scale, self._first_batch = state["noise_scale"], state["first_batch"]
        self._update()


class _Put(NamedTuple):
    """A value in a group that stands in for the user's."""

    group: dict[str, Any]
    key: str
    own: Any
    value: Any
    version: int  # of a tensor, which is written in place


class Applied:
    """Surrounds a step of an optimizer, in which its groups hold the values that follow from the factors.

    They are there from the end of the closure to the end of the update. LBFGS, which reads its learning rate before the
    closure, finds them there as well. Step hooks see the user's values, so that what they multiply is not multiplied
    again in every step.

    Args:
        rates: The factors.
        optimizer: The optimizer.
    """

    def __init__(self, rates: LearningRate, optimizer: Any) -> None:
        self._rates = rates
        self._optimizer = optimizer
        self._factor = 1.0
        self._put: list[_Put] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Applied:
        optimizer = self._optimizer
        if isinstance(optimizer, LBFGS):
            self._handles.append(optimizer.register_step_pre_hook(self._on_hook_before))
        hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
        if hooks is not None and (hooks or torch_optimizer._global_optimizer_post_hooks):
            handle = optimizer.register_step_post_hook(self._on_hook_after)
            hooks.move_to_end(handle.id, last=False)
            self._handles.append(handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._give_back()
        for handle in self._handles:
            handle.remove()

    def after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that runs with the user's values and leaves those of the update behind."""

        def run() -> Any:
            self._give_back()
            result = closure()
            self._apply()
            return result

        return run

    def _on_hook_before(self, *args: Any) -> None:
        self._apply()

    def _on_hook_after(self, *args: Any) -> None:
        self._give_back()

    def _apply(self) -> None:
        self._give_back()
        rates, k = self._rates, self._rates.batch_factor
        self._factor = rates.factor
        seen: set[int] = set()
        for group in self._optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor):
                if id(lr) not in seen:  # groups may share it
                    self._scale_tensor(group, lr)
                seen.add(id(lr))
            elif lr is not None:
                self._replace(group, "lr", lr * self._factor)
            if rates.moves_betas:
                self._replace(group, "betas", tuple(sde_beta(beta, k) for beta in group["betas"]))
                self._replace(group, "eps", sde_eps(group["eps"], k))

    def _replace(self, group: dict[str, Any], key: str, value: Any) -> None:
        self._put.append(_Put(group, key, group[key], value, 0))
        group[key] = value

    def _scale_tensor(self, group: dict[str, Any], lr: Tensor) -> None:
        with torch.no_grad():
            own = lr.detach().clone()
            lr.mul_(self._factor)
        self._put.append(_Put(group, "lr", own, lr, lr._version))

    def _give_back(self) -> None:
        while self._put:
            put = self._put.pop()
            found = put.group.get(put.key)
            if isinstance(put.own, Tensor):
                self._give_tensor_back(put)
            elif found is put.value:
                put.group[put.key] = put.own
            if put.key == "lr" and found is not None and found is not put.value:
                put.group["lr"] = found / self._factor  # the optimizer itself has changed it in its update

    def _give_tensor_back(self, put: _Put) -> None:
        with torch.no_grad():
            if put.value._version == put.version:
                put.value.copy_(put.own)
            else:
                put.value.div_(self._factor)
