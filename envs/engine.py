"""The proxy trainings of ``autoprec.ops`` as numpy sees them.

What lives here: the structs of ``ap_proxy.h`` as dtypes, and an engine that owns many trainings. What does not: what is
trained (``proxies``) and what a window costs (``proxy_env``).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.ops import native

MAX_UNITS, MAX_NODES, MAX_EVENTS, MAX_STEPS = 16, 48, 8, 16
FORMATS = ("fp32", "bf16", "fp16", "fp8-unscaled", "fp8", "int8", "fp4", "int4")
"""Formats of a unit, in the engine's order."""
NODES = ("input", "linear", "patches", "mean", "norm", "attention", "add", "recurrent")
OPTIMIZERS = ("sgd", "adam", "adamw")
EVENTS = ("none", "activation", "gradient", "spike")
TENSORS = ("activation", "weight", "gradient")
ACTIVATIONS = ("none", "relu", "tanh")

NODE = np.dtype([(name, "i4") for name in ("kind", "a", "b", "unit", "positions", "width", "extra")])
EVENT = np.dtype([*((name, "i4") for name in ("kind", "unit", "start", "length")), ("factor", "f4")])
_UNIT_RANGES = ("activation_bits", "weight_bits", "gradient_bits", "activation_mean")
_UNIT_DRIFTS = ("drift_bits", "drift_noise", "drift_steps")
SPEC = np.dtype(
    [
        ("seed", "u4", 2),
        *((name, "i4") for name in ("node_count", "unit_count", "event_count", "classes", "max_batch")),
        *((name, "i4") for name in ("evaluation_samples", "teacher_width", "optimizer")),
        *((name, "f4") for name in ("label_noise", "outlier_share", "outlier_factor", "feature_spread", "loss_factor")),
        *((name, "f4") for name in ("beta1", "beta2", "eps", "weight_decay")),
        ("nodes", NODE, MAX_NODES),
        *((name, "f4", MAX_UNITS) for name in (*_UNIT_RANGES, *_UNIT_DRIFTS)),
        ("events", EVENT, MAX_EVENTS),
    ]
)
KNOBS = np.dtype(
    [
        *((name, "i4") for name in ("steps", "batch", "is_evaluated", "probed_formats", "growth_interval")),
        *((name, "f4") for name in ("lr_begin", "lr_end", "clip_multiplier", "loss_scale")),
        ("formats", "i4", MAX_UNITS),
    ]
)
WINDOW = np.dtype(
    [
        *((name, "i4") for name in ("steps", "skipped", "clipped", "growth_tracker", "total_steps")),
        *((name, "i4") for name in ("first_unit", "first_tensor")),
        *((name, "f4") for name in ("loss_scale", "evaluation_loss", "noise_scale", "median_norm", "clip_threshold")),
        *((name, "f4", MAX_STEPS) for name in ("losses", "norms", "loss_scales")),
        *((name, "f4", (MAX_UNITS, MAX_STEPS)) for name in ("activation_amax", "gradient_norm")),
        *((name, "f4", MAX_UNITS) for name in ("gradient_amax", "weight_amax")),
        ("overflows", "i4", (MAX_UNITS, 3)),
        ("errors", "f4", (MAX_UNITS, 3, len(FORMATS))),
        ("underflow", "f4", (MAX_UNITS, 3, len(FORMATS))),
        ("subnormal", "f4", (MAX_UNITS, len(FORMATS))),
    ]
)

_READABLE = ("parameters", "gradients", "input", "labels", "logits")
_LARGEST_STEPS = MAX_STEPS


class Engine:
    """Owns ``size`` proxy trainings, which differ in everything.

    A training sees samples in one order whatever its batch size, so that two that differ in knobs only stay comparable.
    Its results depend on its description and its knobs alone. ``close`` frees the memory; so does leaving a ``with``.

    Args:
        size: How many trainings.
        threads: Threads to share them out to. Results do not depend on it.

    Raises:
        RuntimeError: If the compiled kernels are missing.
    """

    def __init__(self, size: int, *, threads: int = 1) -> None:
        self._library = native.library()
        self._handles = (ctypes.c_void_p * size)()
        self._threads = threads
        self.knobs: NDArray[Any] = np.zeros(size, KNOBS)
        """What the next window runs with, one record of ``KNOBS`` each."""
        self.windows: NDArray[Any] = np.zeros(size, WINDOW)
        """What was seen in the last window, one record of ``WINDOW`` each."""

    def __len__(self) -> int:
        return len(self._handles)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def start(self, index: int, spec: NDArray[Any]) -> None:
        """Begins a training anew.

        Args:
            index: Which one.
            spec: A record of ``SPEC``.

        Raises:
            ValueError: If the description makes no sense, or there is no memory for it.
        """
        record = np.ascontiguousarray(spec, SPEC).reshape(1)
        handle = self._library.ap_proxy_create(record.ctypes.data)
        if not handle:
            raise ValueError(
                f"The engine cannot run training {index}: {record['node_count'][0]} nodes and"
                f" {record['unit_count'][0]} units. Widths must be multiples of 16, every unit belongs to one node, and"
                " the last node is a linear one with up to 64 outputs; build descriptions with `autoprec.envs.proxies`."
            )
        self._library.ap_proxy_free(self._handles[index])
        self._handles[index] = handle

    def run(self) -> NDArray[Any]:
        """Runs one window of every training with ``knobs`` and returns ``windows``.

        Raises:
            RuntimeError: If a training was not started, or the engine is closed.
            ValueError: If a knob is out of range.
        """
        if not all(self._handles):
            raise RuntimeError("A training was not started, or the engine is closed. Call `start` for each first.")
        self._check_knobs()
        knobs, windows = self.knobs.ctypes.data, self.windows.ctypes.data
        self._library.ap_proxy_run(len(self), self._handles, knobs, windows, self._threads)
        return self.windows

    def read(self, index: int, what: str) -> NDArray[np.float32]:
        """Returns numbers of a training as they are after its last step; for tests and pictures.

        Args:
            index: Which one.
            what: ``parameters``, ``gradients`` (times loss scale and loss factor), ``input``, ``labels`` or ``logits``.
        """
        code, handle = _READABLE.index(what), self._handles[index]
        values = np.empty(self._library.ap_proxy_read(handle, code, None), np.float32)
        self._library.ap_proxy_read(handle, code, values.ctypes.data)
        return values

    def write_parameters(self, index: int, values: NDArray[np.float32]) -> None:
        """Replaces the weights of a training.

        Args:
            index: Which one.
            values: As ``read(index, "parameters")`` returns them.
        """
        expected = self._library.ap_proxy_read(self._handles[index], 0, None)
        if values.shape != (expected,) or values.dtype != np.float32:
            raise ValueError(
                f"Passed parameters as {values.dtype} {list(values.shape)}. They must be float32 [{expected}]."
            )
        self._library.ap_proxy_write_parameters(self._handles[index], np.ascontiguousarray(values).ctypes.data)

    def close(self) -> None:
        """Frees every training. May be called twice."""
        for index, handle in enumerate(self._handles):
            self._library.ap_proxy_free(handle)
            self._handles[index] = None

    def _check_knobs(self) -> None:
        ranges = {"steps": (0, _LARGEST_STEPS), "batch": (1, 128), "formats": (0, len(FORMATS) - 1)}
        for name, (low, high) in ranges.items():
            values = self.knobs[name]
            if values.min(initial=low) < low or values.max(initial=high) > high:
                raise ValueError(
                    f"Passed `knobs[{name!r}]` from {values.min()} to {values.max()}; {low} to {high} run."
                )
