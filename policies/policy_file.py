"""The files of a policy: its weights (safetensors) and its card (JSON), written, read and checked. No pickle.

What lives here: everything that is asked of a folder before a policy of it may decide. What does not: the network
(``network``) and who uses it (``pretrained_policy``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import numpy as np
import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from autoprec.encoding import FEATURES, VERSION
from autoprec.policies.network import MOVES, PolicyNetwork
from autoprec.table import TableSettings

CARD_FILE = "policy.json"
WEIGHTS_FILE = "policy.safetensors"
FILE_VERSION: Final = 1
MAX_CARD_BYTES = 2**20
MAX_WEIGHTS_BYTES = 2**24

_Name = Annotated[str, Field(min_length=1, max_length=100)]
_Width = Annotated[int, Field(ge=1, le=4096)]


class PolicyCard(BaseModel):
    """What a policy is: how its rows are laid out, what its moves mean, and where it comes from.

    Args:
        file_version: Version of this layout.
        encoding_version: ``autoprec.encoding.VERSION`` that it was trained with.
        features: Names of the columns of a row, in order.
        hidden: Widths of the hidden layers.
        mode: ``"offset"``: moves are relative to what the table proposes; ``"ladder"``: to where a knob is.
        table: Fields of the ``TableSettings`` that it was trained with; those that are missing have their defaults.
            ``"inf"`` stands for infinity.
        training: How it was trained; anything that JSON can hold.
        name: Short name for records and reports.
        weights_sha256: Of the file of the weights that belongs to it; ``save_policy`` writes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    file_version: Literal[1] = FILE_VERSION
    encoding_version: int = VERSION
    features: Annotated[tuple[_Name, ...], Field(min_length=1, max_length=1024)] = FEATURES
    hidden: Annotated[tuple[_Width, ...], Field(max_length=8)] = (64, 64)
    mode: Literal["offset", "ladder"] = "offset"
    table: dict[str, JsonValue] = {}
    training: dict[str, JsonValue] = {}
    name: _Name = "policy"
    weights_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None

    @field_validator("table", mode="before")
    @classmethod
    def _as_json(cls, table: Any) -> Any:
        """Takes ``TableSettings`` as well; JSON knows neither tuples nor infinity."""
        given = asdict(table) if isinstance(table, TableSettings) else table
        if not isinstance(given, Mapping):
            return given
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        return {name: "inf" if value == math.inf else value for name, value in listed.items()}

    @field_validator("table")
    @classmethod
    def _check_table(cls, table: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            _table_settings(table)
        except TypeError as error:  # pydantic reports only a ValueError as a fault of the field
            raise ValueError(str(error)) from error
        return table

    def table_settings(self) -> TableSettings:
        """Returns ``table`` as settings."""
        return _table_settings(self.table)


def _table_settings(table: Mapping[str, Any]) -> TableSettings:
    fields: dict[str, Any] = {name: math.inf if value == "inf" else value for name, value in table.items()}
    return TableSettings(**fields)


def card_for(network: PolicyNetwork, card: PolicyCard | Mapping[str, Any] | None = None) -> PolicyCard:
    """Returns a card that says what a network is.

    Args:
        network: The network.
        card: What else it says, a card or its fields; by default what the network's own card says.
    """
    said = network.card if card is None else card
    fields = said.model_dump() if isinstance(said, PolicyCard) else dict(said or {})
    return PolicyCard(**{**fields, "hidden": network.hidden})


def save_policy(folder: str | Path, network: PolicyNetwork, card: PolicyCard) -> None:
    """Writes a policy; each of its two files is whole or not there.

    The same network and card give the same bytes.

    Args:
        folder: Made if it does not exist. Files of an earlier policy in it are replaced.
        network: Its weights and statistics.
        card: What it is.

    Raises:
        ValueError: If the card does not describe the network, or a weight is not finite.
    """
    folder = Path(folder)
    source = f"Passed `save_policy({str(folder)!r}, ...)`."
    if (len(card.features), card.hidden) != (network.features, network.hidden):
        raise ValueError(
            f"{source} The network has {network.features} features and hidden layers {list(network.hidden)}, the card"
            f" says {len(card.features)} and {list(card.hidden)}. They must agree."
        )
    state = {name: value.detach().to("cpu").contiguous() for name, value in network.state_dict().items()}
    _check_tensors(source, {name: value.numpy() for name, value in state.items()}, card)
    weights = safetensors.torch.save(state)
    card = card.model_copy(update={"weights_sha256": hashlib.sha256(weights).hexdigest()})
    text = json.dumps(card.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
    if len(weights) > MAX_WEIGHTS_BYTES or len(text.encode()) > MAX_CARD_BYTES:
        raise ValueError(
            f"{source} Weights may take {MAX_WEIGHTS_BYTES} bytes and the card {MAX_CARD_BYTES}; these take"
            f" {len(weights)} and {len(text.encode())}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS_FILE, weights)
    _replace(folder / CARD_FILE, text.encode())


def load_policy(folder: str | Path) -> tuple[PolicyNetwork, PolicyCard]:
    """Reads a policy that may decide here: of this version's encoding, complete, and finite.

    Args:
        folder: Folder that ``save_policy`` has written.

    Returns:
        The network on the CPU, and its card.

    Raises:
        FileNotFoundError: If there is no such folder, or one of its files is missing.
        ValueError: If the files are not those of a policy for this version of autoprec. The message says why.
    """
    folder = Path(folder)
    source = f"Passed the policy {str(folder)!r}."
    if not folder.is_dir():
        raise FileNotFoundError(f"{source} There is no such folder.")
    card = _read_card(source, _content(source, folder / CARD_FILE, MAX_CARD_BYTES))
    weights = _content(source, folder / WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
    if card.weights_sha256 != hashlib.sha256(weights).hexdigest():
        _refuse(source, f"`{WEIGHTS_FILE}` is not the file that `{CARD_FILE}` was written for. Copy or save both anew.")
    tensors = _read_tensors(source, weights)
    _check_tensors(source, tensors, card)
    with torch.inference_mode(False):
        network = PolicyNetwork(len(card.features), card.hidden)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    network.card = card
    return network.eval(), card


# ---- the card ----


def _read_card(source: str, content: bytes) -> PolicyCard:
    try:
        document = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(source, f"`{CARD_FILE}` is not JSON: {str(error)[:200]}", error)
    if not isinstance(document, dict):
        _refuse(source, f"`{CARD_FILE}` must hold an object, not a `{type(document).__name__}`.")
    _check_versions(source, document)
    if missing := [name for name in PolicyCard.model_fields if name not in document]:
        _refuse(source, f"`{CARD_FILE}` lacks the fields {missing}.")
    try:
        card = PolicyCard.model_validate_json(content, strict=True)
    except ValidationError as error:
        faults = "".join(
            f" Field {'.'.join(map(str, fault['loc']))[:100] or 'document'!r}: {fault['msg'][:200]}."
            for fault in error.errors()[:5]
        )
        _refuse(source, f"`{CARD_FILE}` is not the card of a policy.{faults}", error)
    _check_features(source, card.features)
    return card


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_versions(source: str, document: Mapping[str, Any]) -> None:
    for field, what, known in (
        ("file_version", "Its files have", FILE_VERSION),
        ("encoding_version", "It was trained for observations of", VERSION),
    ):
        found = document.get(field)
        if type(found) is int and found != known:
            newer = "Install a newer autoprec." if found > known else "Use the autoprec it was made with."
            _refuse(
                source,
                f"{what} version {found}, this autoprec understands version {known}. {newer} Or train a policy anew, or"
                " choose another one, as `policy='table'`.",
            )


def _check_features(source: str, found: Sequence[str]) -> None:
    if tuple(found) == FEATURES:
        return
    missing = [name for name in FEATURES if name not in found]
    unknown = [name for name in found if name not in FEATURES]
    parts = [
        f"{what} {names[:5]}{' and more' if len(names) > 5 else ''}"
        for what, names in (("without", missing), ("with unknown", unknown))
        if names
    ]
    how = ", ".join(parts) or "in another order"
    _refuse(source, f"Its features are not those of observations of version {VERSION}: {how}. Train a policy anew.")


# ---- the weights ----


def _shapes(card: PolicyCard) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the file must hold, found without making the network."""
    features = len(card.features)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("mean", "std", "low", "high"), (features,))
    widths = (features, *card.hidden)
    for index, (inner, outer) in enumerate(zip(widths, card.hidden, strict=False)):
        shapes[f"body.{2 * index}.weight"], shapes[f"body.{2 * index}.bias"] = (outer, inner), (outer,)
    shapes["head.weight"], shapes["head.bias"] = (len(MOVES), widths[-1]), (len(MOVES),)
    return shapes


def _read_tensors(source: str, content: bytes) -> dict[str, np.ndarray[Any, Any]]:
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        _refuse(source, f"`{WEIGHTS_FILE}` is not a file of safetensors: {str(error)[:200]}", error)
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] != "F32":
            _refuse(source, f"The tensor {name[:100]!r} is of dtype {entry['dtype']}. Tensors of a policy are F32.")
        tensors[name] = np.frombuffer(bytearray(entry["data"]), dtype="<f4").reshape(entry["shape"])
    return tensors


def _check_tensors(source: str, tensors: Mapping[str, np.ndarray[Any, Any]], card: PolicyCard) -> None:
    expected = _shapes(card)
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unknown:
        lost = " Its statistics belong to it: without them it would decide at random." if "mean" in missing else ""
        _refuse(source, f"Tensors that are missing: {missing}; that no policy has: {unknown[:5]}.{lost}")
    for name, shape in expected.items():
        value = tensors[name]
        if tuple(value.shape) != shape:
            _refuse(source, f"The tensor {name!r} has shape {list(value.shape)}. The card says {list(shape)}.")
        if value.dtype != np.float32:
            _refuse(source, f"The tensor {name!r} is of dtype {value.dtype}. Tensors of a policy are float32.")
        if not np.isfinite(value).all():
            _refuse(source, f"The tensor {name!r} holds a number that is not finite.")
    if (tensors["low"] > tensors["high"]).any() or (tensors["std"] < 0).any():
        _refuse(source, "Its training range is empty, or a spread is negative.")


# ---- files ----


def _content(source: str, path: Path, most_bytes: int) -> bytes:
    """Reads a plain file of bounded size; nothing else is opened."""
    try:
        found = os.lstat(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{source} It has no file `{path.name}`.") from error
    if not stat.S_ISREG(found.st_mode):
        _refuse(source, f"`{path.name}` must be a plain file, no link, folder or device.")
    # somebody may have exchanged it since
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(content)) > most_bytes:
        _refuse(source, f"`{path.name}` has {size} bytes. It may have {most_bytes}.")
    return content


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _refuse(source: str, why: str, cause: BaseException | None = None) -> NoReturn:
    raise ValueError(f"{source} {why}") from cause
