"""The file of a map: formats and knob values as YAML, written, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoprec.action import Action
from autoprec.formats import get_format

if TYPE_CHECKING:
    from pydantic import BaseModel


def save_map(
    path: str | Path,
    precision: Mapping[str, str],
    loss_scale: float | None = None,
    clip: float | None = None,
    batch_size: int | None = None,
) -> None:
    """Writes formats and knob values as YAML, to train with later.

    Args:
        path: File to write. Replaced if it exists, its folder is made if it does not.
        precision: Format name by unit name or pattern.
        loss_scale: Loss scale to start with, finite and > 0. ``None`` leaves it to the run.
        clip: Clip threshold to start with, > 0, ``inf`` for off. ``None`` leaves it to the run.
        batch_size: Batch size to start with, >= 1. ``None`` leaves it to the loader.

    Raises:
        ValueError: If a value is out of range or a format name is unknown.
    """
    import yaml

    path = Path(path)
    document: dict[str, Any] = {
        "version": 1,
        "precision": dict(precision),
        "loss_scale": loss_scale,
        "clip": clip,
    }
    if batch_size is not None:
        document["batch_size"] = batch_size
    _checked_map(f"Passed `save_map({str(path)!r}, ...)`.", document)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def load_map(path: str | Path) -> Action:
    """Reads what ``save_map`` wrote.

    Args:
        path: File to read.

    Returns:
        A request for the formats and knob values of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a map. The message names the file and the fields.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Passed the map {str(path)!r}. There is no such file.")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"Passed the map {str(path)!r}. The file is not YAML: {error}") from error
    return _checked_map(f"Passed the map {str(path)!r}.", document)


def _checked_map(source: str, document: object) -> Action:
    from pydantic import ValidationError

    try:
        fields = _map_model().model_validate(document).model_dump(exclude={"version"})
    except ValidationError as error:
        faults = "".join(
            f" Field {'.'.join(map(str, fault['loc'])) or 'document'!r}: {fault['msg']}." for fault in error.errors()
        )
        raise ValueError(
            f"{source} A map has the fields version (1), precision (format name by unit name, quoted if it looks like a"
            f" number), loss_scale (null or a finite number > 0), clip (null, .inf or a number > 0) and,"
            f" where the run sets it, batch_size (an int >= 1).{faults}"
        ) from error
    return Action(**fields)


@cache
def _map_model() -> type[BaseModel]:
    # most runs have no map, so its tools are imported on use
    from pydantic import BaseModel, ConfigDict, Field, field_validator

    class MapFile(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)

        version: Literal[1]
        precision: dict[str, str]
        loss_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
        clip: float | None = Field(default=None, gt=0)
        batch_size: int | None = Field(default=None, ge=1)

        @field_validator("precision")
        @classmethod
        def check_formats(cls, precision: dict[str, str]) -> dict[str, str]:
            for name in precision.values():
                get_format(name)
            return precision

    return MapFile
