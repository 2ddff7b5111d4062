"""What is known of one device: its formats with their rates, its memory, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FormatRate:
    """How fast a device multiplies matrices in one format.

    Attributes:
        tflops: Dense rate of the whole device in TFLOP/s (int8: TOP/s), ``None`` if nobody states it.
        accumulate: Type that products are summed in at that rate; for fp16 that is torch's default.
        is_native: Whether the device computes it itself under autoprec; else it is emulated.
        other_tflops: Dense rates with other accumulate types.
        flops_per_cycle: Operations per cycle and core at most, for CPUs.
        note: Why the format is not native though the device has it, or ``None``.
    """

    tflops: float | None = None
    accumulate: str | None = None
    is_native: bool = True
    other_tflops: Mapping[str, float] = field(default_factory=dict)
    flops_per_cycle: float | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document that numbers come from.

    Attributes:
        title: Its title.
        url: Its address, ``None`` for numbers of your own.
    """

    title: str
    url: str | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of this machine, as the database and the device itself describe it.

    Attributes:
        device: torch's name, such as ``"cuda:0"``.
        name: What the device calls itself.
        family: Name of its family in the database; ``"unknown"`` if there is none.
        row: Rows of the database that fit, the one that fits best last. Empty if only the family is known.
        formats: Rates by format, widest format first.
        memory_bytes: Memory that the device says it has, ``None`` if it does not.
        memory_gb_per_s: Stated memory bandwidth.
        alignment: Multiple that matrix sizes should be of, by format.
        sources: Documents that the numbers come from.
        notes: What a reader should know: limits that are set, what was guessed and from what.
    """

    device: str
    name: str
    family: str
    row: tuple[str, ...] = ()
    formats: Mapping[str, FormatRate] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_gb_per_s: float | None = None
    alignment: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Titles of the documents, in one line."""
        return "; ".join(source.title for source in self.sources)

    @property
    def native(self) -> tuple[str, ...]:
        """Formats that the device computes itself, widest first."""
        return tuple(name for name, rate in self.formats.items() if rate.is_native)

    def ratio(self, format_name: str, over: str = "fp32") -> float | None:
        """Returns how many times faster one format is than another by the stated rates.

        Args:
            format_name: The format in question.
            over: The format to compare with.

        Returns:
            The ratio, or ``None`` where one of the rates is not known.
        """
        ours, theirs = self.formats.get(format_name), self.formats.get(over)
        if ours is None or theirs is None:
            return None
        for rate in ("tflops", "flops_per_cycle"):
            above, below = getattr(ours, rate), getattr(theirs, rate)
            if above is not None and below is not None:
                return float(above / below)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data, ready for JSON."""
        return asdict(self)
