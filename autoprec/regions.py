"""The regions in which layers run in their formats: training steps, evaluation on request, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from autoprec import attention
from autoprec.autocast import ENCODER_FAST_PATH, ambient, float32_recomputation
from autoprec.knobs import steered_units
from autoprec.layers import run_in_base, swapped
from autoprec.layouts import swapped as chains_swapped
from autoprec.steering import Steering
from autoprec.trial import Trial


@contextmanager
def recomputation_region(steering: Steering) -> Iterator[None]:
    """Runs recomputations of activation checkpointing in the formats of the forward.

    Args:
        steering: State of the fit.
    """
    runtime = steering.runtime
    if not steering.knobs.is_steering and not runtime.runs_on_copies:
        with _attention_region(steering, is_recomputation=True):
            yield
        return
    was = runtime.is_active, runtime.is_recording
    runtime.is_active, runtime.is_recording = True, False
    try:
        with (
            swapped(steered_units(steering.knobs)),
            _chains_region(steering),
            float32_recomputation(runtime.device_type),
            _attention_region(steering, is_recomputation=True),
        ):
            yield
    finally:
        runtime.is_active, runtime.is_recording = was


@contextmanager
def formats_region(steering: Steering, is_training: bool, runs_on_copies: bool = False) -> Iterator[None]:
    """Runs a step in the units' formats.

    Args:
        steering: State of the fit.
        is_training: Whether outputs are recorded and the current trial goes on. Evaluation is rare, so all of it is a
            trial.
        runs_on_copies: Whether layers run on kept copies of their weights.
    """
    knobs, runtime = steering.knobs, steering.runtime
    runtime.runs_on_copies = runs_on_copies
    if not knobs.is_steering:
        choices = _attention_region(steering) if is_training else nullcontext()
        is_swapped = runs_on_copies or runtime.calls is not None
        with _plain_region(steering) if is_swapped else nullcontext(), choices:
            yield
        return
    trial = steering.trial if is_training else Trial()
    runtime.is_active, runtime.is_recording = True, is_training
    runtime.on_output = trial.note_output if is_training and trial is not None else None
    try:
        with (
            ENCODER_FAST_PATH.region(),
            swapped(steered_units(knobs)),
            ambient(runtime.device_type, knobs.ambient_dtype),
            float32_recomputation(runtime.device_type),
            # evaluation keeps torch's own implementations
            _chains_region(steering) if is_training else nullcontext(),
            _attention_region(steering) if is_training else nullcontext(),
            trial or nullcontext(),
        ):
            yield
    finally:
        runtime.is_active = runtime.is_recording = False
        runtime.on_output = None


def _chains_region(steering: Steering) -> AbstractContextManager[None]:
    """Lets chains of convolutions run in ``channels_last`` where that was chosen."""
    if not steering.runtime.containers or "channels_last" not in steering.knobs.unit_formats.implementations.values():
        return nullcontext()
    return chains_swapped(steering.runtime.containers)


def _attention_region(steering: Steering, is_recomputation: bool = False) -> AbstractContextManager[None]:
    """Lets calls of ``scaled_dot_product_attention`` run as chosen, or be noted; compiled code has its own."""
    runtime = steering.runtime
    if runtime.device_type != "cpu" or not attention.is_wanted(runtime) or steering.is_compiled:
        return nullcontext()
    return attention.region(runtime, is_recomputation)


@contextmanager
def _plain_region(steering: Steering) -> Iterator[None]:
    """Runs a training step in the Trainer's own precision, on copies or to see which calls it makes.

    What is measured does not depend on either.
    """
    runtime = steering.runtime
    records_all, runtime.records_all = runtime.records_all, False
    runtime.is_active = runtime.is_recording = True
    try:
        with swapped(steered_units(steering.knobs)):
            yield
    finally:
        runtime.is_active = runtime.is_recording = False
        runtime.records_all = records_all


def evaluation_region(steering: Steering | None) -> AbstractContextManager[Any]:
    """Returns the region of a validation step in the Trainer's own precision.

    Under ``32-true`` this widens the low-precision tensors that training may have left in the model (hidden states,
    queues); others are untouched. Units that the guard has raised because they cannot run in that precision run in
    fp32.

    Args:
        steering: State of the fit, ``None`` outside of one.
    """
    if steering is None or not steering.knobs.is_steering:
        return nullcontext()
    formats = steering.knobs.unit_formats
    raised = formats.too_wide_for_base()
    if raised or formats.has_ambient_failed:
        return _raised_region(steering, raised)
    is_wide = steering.knobs.base.format == "fp32"
    return ambient(steering.runtime.device_type, torch.float32) if is_wide else nullcontext()


@contextmanager
def _raised_region(steering: Steering, raised: frozenset[str]) -> Iterator[None]:
    """Runs a validation step in the Trainer's own precision but for units that have failed in it."""
    runtime, formats, units = steering.runtime, steering.knobs.unit_formats, steered_units(steering.knobs)
    first = torch.float32 if formats.has_ambient_failed else formats.base_dtype
    runtime.is_active = True
    try:
        # swapped in first: a layer that was parametrized since gets a new class, and its format anew
        with (
            ENCODER_FAST_PATH.region(),
            swapped(units),
            run_in_base(units, formats.base_dtype, raised),
            ambient(runtime.device_type, first),
        ):
            yield
    finally:
        runtime.is_active = False
