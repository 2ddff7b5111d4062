"""What autoprec takes over from the precision plugin that it finds, and which plugins it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from autoprec.config import LossScaleConfig
from autoprec.loss_scale import LossScale

_REFUSED = {
    "TransformerEnginePrecision": "TransformerEngine replaces the layers that autoprec steers",
    "BitsandbytesPrecision": "bitsandbytes replaces the layers that autoprec steers",
    "DeepSpeedPrecision": "DeepSpeed does its own precision and loss scaling",
    "XLAPrecision": "XLA compiles the whole step",
    "FSDPPrecision": "FSDP shards parameters under one dtype per group, which is not supported yet",
}
_REPLACED = ("pre_backward", "post_backward", "optimizer_step", "clip_gradients", "_after_closure", "_clip_gradients")
_FORMATS = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def check_base(plugin: Precision) -> Precision:
    """Returns ``plugin`` if autoprec can work on top of it.

    Raises:
        MisconfigurationException: If the plugin does its own precision. Names both settings.
        TypeError: If it is no precision plugin.
    """
    if not isinstance(plugin, Precision):
        raise TypeError(
            f"Passed `base={plugin!r}` of type `{type(plugin).__qualname__}`. It must be a"
            " `lightning.pytorch.plugins.precision.Precision`, for instance `MixedPrecision('bf16-mixed', 'cpu')`."
        )
    for cls in type(plugin).__mro__:
        if cls.__name__ in _REFUSED:
            raise MisconfigurationException(
                f"`{cls.__name__}` and autoprec cannot be used together: {_REFUSED[cls.__name__]}."
                " Choose one: another `Trainer(precision=...)`, or no autoprec."
            )
    _check_methods(plugin)
    return plugin


def _check_methods(plugin: Precision) -> None:
    """Refuses a user's own plugin whose methods autoprec would replace without a word."""
    cls = type(plugin)
    origin = next(base for base in cls.__mro__ if base.__module__.startswith("lightning."))
    for name in _REPLACED:
        if getattr(cls, name) is not getattr(origin, name):
            raise MisconfigurationException(
                f"`{cls.__qualname__}` overrides `{name}`, which autoprec replaces. Choose one: that plugin, or"
                f" autoprec on top of Lightning's own `{origin.__qualname__}`."
            )


def base_format(plugin: Precision) -> str | None:
    """Format of the layers under a plugin; ``None`` where they cannot be steered (``64-true``, ``bf16-true`` ...)."""
    return _FORMATS.get(str(plugin.precision))


def loss_scale_of(plugin: Precision, config: LossScaleConfig, is_steered: bool = True) -> LossScale:
    """Makes the loss scale, with the settings and the state of the plugin's GradScaler if it has one.

    Args:
        plugin: The base plugin.
        config: Settings.
        is_steered: Whether floor and cap apply; a scaler that is only observed runs as it would alone.
    """
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is None:
        return LossScale(config, enabled=isinstance(plugin, MixedPrecision) and base_format(plugin) == "fp16")
    if not scaler.is_enabled():
        return LossScale(config, enabled=False)
    if not is_steered:
        config = replace(config, floor=2.0**-126, cap=2.0**126)
    limits = replace(config, init_scale=min(max(scaler.get_scale(), config.floor), config.cap))
    scale = LossScale(limits)
    scale.load_state_dict(scaler.state_dict())
    return scale


def sync_scaler(plugin: Precision, scale: LossScale) -> None:
    """Hands the loss scale back to the plugin's own scaler, so that it goes on where autoprec stopped."""
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled() or not scale.enabled:
        return
    scaler.load_state_dict(scale.scaler_state())
