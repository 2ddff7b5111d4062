"""Implementation choices: other ways to compute the same thing at the same precision.

What lives here: which choices there are. What does not: how they compute (``onednn``, ``layouts``,
``attention_product``), when they run (``runners``, ``attention``), and which is faster on the device at hand and exact
enough, which a calibration measures.
"""

from __future__ import annotations

from autoprec import onednn

DEFAULT = "default"
"""As torch does it."""


def candidates(kind: str, format_name: str, device_type: str) -> tuple[str, ...]:
    """Returns the implementations to choose from; the first is what torch does by itself.

    Args:
        kind: Kind of a unit, or ``"sdpa"`` for calls of ``scaled_dot_product_attention``.
        format_name: Format of the unit; for calls of the operations between units.
        device_type: Where it runs.
    """
    if device_type != "cpu":
        return (DEFAULT,)
    if kind == "linear" and format_name == "fp32" and onednn.is_available():
        return (DEFAULT, "onednn")
    if kind == "conv" and format_name in ("fp32", "bf16"):
        return (DEFAULT, "channels_last")
    if kind == "sdpa" and format_name in ("fp32", "bf16"):
        return (DEFAULT, "matmul")
    return (DEFAULT,)


def candidates_alone(kind: str, format_name: str, device_type: str) -> tuple[str, ...]:
    """Returns those of :func:`candidates` that a layer can choose without regard to its neighbours.

    Args:
        kind: As there.
        format_name: As there.
        device_type: As there.
    """
    # convolutions convert in chains only, which a layer that is timed alone does not show
    return (DEFAULT,) if kind == "conv" else candidates(kind, format_name, device_type)


def check(kind: str, format_name: str, device_type: str, implementation: str) -> None:
    """Raises unless an implementation is one of :func:`candidates`.

    Args:
        kind: As there.
        format_name: As there.
        device_type: As there.
        implementation: What was chosen.

    Raises:
        ValueError: If it is not.
    """
    allowed = candidates(kind, format_name, device_type)
    if implementation not in allowed:
        raise ValueError(
            f"Passed the implementation {implementation!r} for {kind} in {format_name} on {device_type}."
            f" It must be one of {list(allowed)}."
        )
