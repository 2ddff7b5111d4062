"""What a Trainer ran before autoprec took over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """What the Trainer ran before autoprec took over.

    Attributes:
        precision: Lightning's name, ``"32-true"``, ``"bf16-mixed"`` ...
        format: Format of the layers under it; ``None`` if layers cannot be steered there.
        clip: The Trainer's clip threshold on the norm, ``None`` if it has none.
    """

    precision: str = "32-true"
    format: str | None = "fp32"
    clip: float | None = None
