"""A map applied to a model for predictions, with what it changes in the outputs and in time where that was measured.

What lives here: :func:`apply_map` and its measurements. What does not: how the map acts (``applied``) and the measures
of outputs themselves (``fidelity``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applied import AppliedMap
from autoprec.fidelity import collect_outputs, compare_outputs, evaluating
from autoprec.map_file import load_map
from autoprec.outputs import call

_ROUNDS = 7
_LEAST_S = 0.02


def apply_map(
    model: nn.Module,
    map: Mapping[str, str] | str | Path,
    *,
    inputs: Any = None,
    timed: bool = False,
    device: torch.device | None = None,
) -> AppliedMap:
    """Has a model compute in a map of formats, for predictions, tests or plain PyTorch inference.

    The weights stay as they are; of those in 16 bits and in int8 copies are made once, at the first call, and again
    where a weight was written. ``remove()`` on what is returned, or the end of a ``with`` block, gives the model back.

    Args:
        model: Any module, a LightningModule too. Predictions and tests of a Trainer run in the map as well.
        map: Format by unit name or pattern; a file that ``save_map`` or hands have written; the folder of a run record.
        inputs: Held-out inputs: a tensor, a batch that the model takes, or a list or loader of batches. With them the
            outputs are compared with those of the model without the map: ``applied.fidelity``.
        timed: Also measure the time of a forward over ``inputs``, with the map and without in turns:
            ``applied.time_ratio``, below 1 where the map is faster.
        device: Where the model runs. By default where its first parameter is.

    Returns:
        The map in force: ``formats``, ``emulated``, ``refused``, ``fidelity`` and ``time_ratio``.

    Raises:
        ValueError: If a key names no unit (the message names close ones), a format is unknown or not possible there, or
            ``timed`` comes without ``inputs``.
        FileNotFoundError: If there is no such file.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> with apply_map(model, {"0": "bf16"}) as applied:
        ...     applied.formats
        {'0': 'bf16'}
    """
    batches = None if inputs is None else as_batches(inputs)
    if timed and not batches:
        raise ValueError("Passed `apply_map(..., timed=True)` without `inputs`. Time is measured on inputs.")
    precision = read_map(map)
    with TemporaryDirectory() as folder:
        reference = None if batches is None else _saved(model, batches, Path(folder) / "reference")
        applied = AppliedMap(model, precision, device=device)
        try:
            if batches is not None:
                applied.fidelity = _compared(model, batches, reference, Path(folder))
            if timed and batches is not None:
                applied.time_ratio = measure_ratio(applied, model, batches)
        except BaseException:
            applied.remove()
            raise
    return applied


def read_map(map: Mapping[str, str] | str | Path) -> Mapping[str, str]:
    """Returns the formats of a mapping, a file or a folder.

    Args:
        map: See :func:`apply_map`.

    Raises:
        ValueError: If it holds no map.
        FileNotFoundError: If there is nothing of that name.
    """
    if isinstance(map, Mapping):
        return map
    path = Path(map)
    if path.is_dir():
        return _map_of_folder(path)
    precision = load_map(path).precision
    if not precision:
        raise ValueError(f"Passed the map {str(path)!r}, whose `precision` names no unit.")
    return precision


def _map_of_folder(folder: Path) -> Mapping[str, str]:
    from autoprec.run_record import is_record, read_record  # pydantic takes time to import

    if is_record(folder):
        # layers that cannot be steered are in the record, in fp32
        return {name: each for name, each in read_record(folder).formats.items() if each != "fp32"} or {"*": "fp32"}
    if (folder / "map.yaml").is_file():
        return read_map(folder / "map.yaml")
    raise ValueError(
        f"Passed the folder {str(folder)!r}, which holds neither a map nor the record of a run. A map is a file that"
        " `callback.save_map(path)` writes, a record is what `AutoPrecisionCallback(record=True)` writes."
    )


def as_batches(inputs: Any) -> Sequence[Any]:
    """Returns inputs as a list of batches.

    Args:
        inputs: See :func:`apply_map`.
    """
    if isinstance(inputs, (Tensor, Mapping)):
        return [inputs]
    if isinstance(inputs, Iterable) and not isinstance(inputs, tuple):
        return list(inputs)
    return [inputs]


def _saved(model: nn.Module, batches: Sequence[Any], path: Path) -> Path:
    found = collect_outputs(model, batches, path)
    if found is None:
        raise ValueError(
            "Passed `inputs` for which the model returns no floating-point tensor, so that there is nothing to compare."
            " Leave `inputs` out."
        )
    return found


def _compared(model: nn.Module, batches: Sequence[Any], reference: Path | None, folder: Path) -> dict[str, float]:
    assert reference is not None, "it is made wherever there are batches"
    return compare_outputs(_saved(model, batches, folder / "applied"), reference)


def measure_ratio(applied: AppliedMap, model: nn.Module, batches: Sequence[Any]) -> float:
    """Returns the time of a forward with the map over that without, each the median of rounds in turns.

    Args:
        applied: The map in force.
        model: The model.
        batches: What it is called with; as many as make a round long enough to be timed.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def seconds(repeats: int) -> float:
        begun = time.perf_counter()
        for _ in range(repeats):
            for index, batch in enumerate(batches):
                call(model, batch, index)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / repeats

    with evaluating(model):
        with applied.suspended():
            seconds(1)
            repeats = max(1, round(_LEAST_S / max(seconds(1), 1e-9)))
        seconds(1)
        ratios = []
        for _ in range(_ROUNDS):
            with applied.suspended():
                without = seconds(repeats)
            ratios.append(seconds(repeats) / without)
    return statistics.median(ratios)
