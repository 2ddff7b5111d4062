"""The layout of the database's files, and what a broken one is told.

What lives here: the fields of a family, of a device's row and of a source, their checks, and what is said where a check
fails. What does not: where files are looked for and how rows are put together (``database``).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from autoprec.formats import get_format, nearest

SCHEMA = 1
DEVICE_TYPES = ("cpu", "cuda", "rocm", "xpu", "mps")
_CAPABILITY = {"cuda": r"\d+\.\d", "rocm": r"gfx\d+[0-9a-f]"}

Accumulate = Literal["fp32", "fp16", "int32"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def _known_format(name: str) -> str:
    return get_format(name).name


FormatName = Annotated[str, AfterValidator(_known_format)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SourceRow(_Row):
    """A document.

    Attributes:
        title: Its title.
        url: Its address; may be left out for measurements of your own.
    """

    title: Text
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None


class FormatRow(_Row):
    """One format of a family or of a device; what is left out of a device's comes from its family.

    Attributes:
        tflops: Dense rate in TFLOP/s.
        flops_per_cycle: For CPUs, operations per cycle and core.
        accumulate: Type that products are summed in at that rate.
        other_tflops: Dense rates with other accumulate types.
        native: Whether autoprec may take it as computed by the device itself.
        note: A remark for readers.
    """

    tflops: Positive | None = None
    flops_per_cycle: Positive | None = None
    accumulate: Accumulate | None = None
    other_tflops: dict[Accumulate, Positive] | None = None
    native: bool | None = None
    note: Text | None = None


class DeviceRow(_Row):
    """One device, or one instruction set of a CPU.

    Attributes:
        name: Name of the row.
        family: Its family; may be left out in a file that has one.
        match: fnmatch patterns over the device's lower-case name. The longest that fits decides.
        requires: CPU or device flags that must all be there.
        memory_gb: Memory as the vendor states it.
        memory_gb_per_s: Memory bandwidth.
        multiprocessors: Multiprocessors of a whole device; one with fewer is taken as a slice of it.
        formats: What is known by format.
        alignment: Multiple that matrix sizes should be of, by format.
        source: Key of a source in the same file.
        note: A remark for readers.
    """

    name: Text
    family: Text | None = None
    match: list[Text] = Field(default_factory=list)
    requires: list[Text] = Field(default_factory=list)
    memory_gb: Positive | None = None
    memory_gb_per_s: Positive | None = None
    multiprocessors: Annotated[int, Field(gt=0)] | None = None
    formats: dict[FormatName, FormatRow] = Field(default_factory=dict)
    alignment: dict[FormatName, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    source: Text | None = None
    note: Text | None = None


class FamilyRow(_Row):
    """Devices that share an instruction set.

    Attributes:
        name: Short lower-case name.
        title: Name for readers.
        device_type: How torch reaches it; ``"rocm"`` is torch's ``"cuda"`` on AMD.
        capabilities: Compute capabilities (``"8.9"``), gfx names, or machine names of CPUs.
        formats: What every device of the family multiplies itself.
        alignment: Multiple that matrix sizes should be of, by format.
        source: Key of a source in the same file.
        alignment_sources: Keys of the sources of ``alignment``.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")]
    title: Text
    device_type: Literal["cpu", "cuda", "rocm", "xpu", "mps"]
    capabilities: list[Text] = Field(default_factory=list)
    formats: dict[FormatName, FormatRow]
    alignment: dict[FormatName, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    source: Text
    alignment_sources: list[Text] = Field(default_factory=list)


class ScenarioRow(_Row):
    """What somebody does with a model.

    Attributes:
        name: Its name.
        title: What is meant.
        bound: What limits it where nothing else is said: arithmetic or memory.
    """

    name: Annotated[str, Field(pattern=r"^[a-z-]+$")]
    title: Text
    bound: Literal["compute", "memory"]


class RecommendationRow(_Row):
    """Formats for a scenario.

    Attributes:
        scenario: Name of the scenario.
        bound: The limit that the row is for; both if it is left out.
        families: Families that the row is for; all if it is left out.
        formats: Formats to try by kind of layer, in this order.
        reason: Why.
        source: Key of a source in the same file.
    """

    scenario: Text
    bound: Literal["compute", "memory"] | None = None
    families: list[Text] | None = None
    formats: dict[Literal["linear", "conv", "embedding", "rnn", "attention", "norm", "other"], list[FormatName]]
    reason: Text
    source: Text


def parse_row(kind: type[_Row], data: Any) -> tuple[Any, list[tuple[str, str]]]:
    """Checks one table of a file.

    Args:
        kind: What it should be.
        data: What the file has.

    Returns:
        The row and no complaints, or ``None`` and pairs of a field and what is wrong with it.
    """
    try:
        row = kind.model_validate(data)
    except ValidationError as error:
        return None, [_complaint(kind, each) for each in error.errors(include_url=False)]
    return row, _beyond_types(row)


def _beyond_types(row: Any) -> list[tuple[str, str]]:
    if isinstance(row, FamilyRow) and row.device_type in _CAPABILITY:
        pattern = _CAPABILITY[row.device_type]
        example = "'8.9'" if row.device_type == "cuda" else "'gfx942'"
        return [
            ("capabilities", f"Got {each!r}, allowed are names like {example}.")
            for each in row.capabilities
            if not re.fullmatch(pattern, each)
        ]
    if isinstance(row, DeviceRow):
        if not row.match and not row.requires:
            return [("match", "Is missing. Give patterns of the device's name, such as ['*rtx 4090'], or `requires`.")]
        return [
            ("match", f"Got {each!r}. Patterns are compared with lower-case names: write {each.lower()!r}.")
            for each in row.match
            if each != each.lower()
        ]
    return []


def _complaint(kind: type[_Row], error: ErrorDetails) -> tuple[str, str]:
    path = [str(each) for each in error["loc"] if each != "[key]"]
    field = ".".join(path) or "the table"
    if error["type"] == "extra_forbidden":
        known = sorted(_fields_at(kind, path[:-1]))
        return field, f"Is no field of this table. Known fields: {known}.{nearest(path[-1], known)}"
    if error["type"] == "missing":
        return field, "Is missing."
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    got = "" if error["type"] == "value_error" else f"Got {error['input']!r}. "
    return field, f"{got}{message}."


def _fields_at(kind: type[_Row], path: list[str]) -> list[str]:
    return list((FormatRow if path[:1] == ["formats"] else kind).model_fields)
