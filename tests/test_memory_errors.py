"""Out-of-memory errors told from others by type, words and cause, and what gives their memory back.

Time budget: 10 s.
"""

from __future__ import annotations

import errno
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from autoprec.batches import rows_of
from autoprec.memory_errors import is_out_of_memory, let_go
from autoprec.undo import StepUndo

WORDINGS = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorMath.cu:35",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "HIP error: out of memory",
    "MPS backend out of memory (MPS allocated: 17.99 GB, other allocations: 1.00 MB)",
    "XPU out of memory. Tried to allocate 4.00 GiB",
    "NPU out of memory. Tried to allocate 1.00 GiB",
    "NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    "[enforce fail at C10/core/CPUAllocator.cpp:72] DefaultCPUAllocator: not enough memory: you tried to allocate",
    "$ Torch: not enough memory: you tried to allocate 12GB. Buy new RAM!",
    "unable to mmap 1024 bytes from file </w>: Cannot allocate memory (12)",
    "std::bad_alloc",
    "out of memory",
    "Out of memory allocating 8,000 bytes (allocated so far: 0 bytes).",
    "clEnqueueNDRangeKernel failed: CL_OUT_OF_RESOURCES",
    "clCreateBuffer failed: CL_MEM_OBJECT_ALLOCATION_FAILURE",
    "create_buffer failed: mem object allocation failure",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
    "Failed to allocate memory for requested buffer of size 4096",
]
OTHERS = [
    "the replay memory is full",
    "memory and query must have the same batch size, got 32 and 16",
    "memory_bank must be allocated before the first step",
    "ran out of memory slots: 128 are allocated",
    "out of memory slots",
    "CUDA graphs are off to avoid running out of memory",
    "mat1 and mat2 shapes cannot be multiplied (32x4 and 8x1)",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
    "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned: memory",
    "Unable to find an engineer",
    "Expected all tensors to share memory, but found two",
    "",
]


@pytest.mark.parametrize("text", WORDINGS)
def test_wordings_of_backends_are_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_words_about_memory_are_not_enough(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AttributeError, AssertionError, FileNotFoundError])
def test_errors_about_values_do_not_count_whatever_they_say(kind: type[Exception]) -> None:
    assert not is_out_of_memory(kind("CUDA out of memory"))


def test_errors_without_text_or_with_numbers_are_no_obstacle() -> None:
    assert not is_out_of_memory(RuntimeError())
    assert not is_out_of_memory(RuntimeError(5))
    assert not is_out_of_memory(KeyboardInterrupt("CUDA out of memory"))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("?"), OSError(errno.ENOMEM, "no room")])
def test_types_are_enough(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60), lambda: bytearray(2**62), lambda: torch.ones(2**44)])
def test_real_errors_of_this_machine(allocate: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)


def raised(make: Callable[[], Any]) -> Exception:
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def a_bug_while_cleaning_up() -> None:
    raise ValueError("layer 3 failed")


def wrapped_by(cause: bool, hides: bool = False) -> Exception:
    def make() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            if cause:
                raise ValueError("layer 3 failed") from error
            if hides:
                raise ValueError("layer 3 failed") from None
            a_bug_while_cleaning_up()

    return raised(make)


def test_what_an_error_came_from_counts() -> None:
    assert is_out_of_memory(wrapped_by(cause=True))
    assert is_out_of_memory(wrapped_by(cause=False))
    assert not is_out_of_memory(wrapped_by(cause=False, hides=True))


def test_what_was_handled_outside_does_not_count() -> None:
    def step() -> None:
        raise ValueError("a bug")

    def step_without_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except RuntimeError:
        outer = sys.exc_info()[1]
        assert is_out_of_memory(raised(step))  # it looks like the cause
        assert not is_out_of_memory(raised(step), outer)
        assert is_out_of_memory(raised(step_without_memory), outer)


def test_a_chain_may_be_a_circle() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_errors_of_the_compiler_are_known_by_their_cause() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    error = raised(lambda: compiled(torch.ones(2)))
    assert type(error) is not torch.OutOfMemoryError
    assert is_out_of_memory(error)
    torch._dynamo.reset()


# ---- what holds memory ----


class Thing:
    """Something that can be watched."""


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_frames_are_emptied(is_wrapped: bool) -> None:
    things: list[weakref.ref[Thing]] = []

    def inner() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def step() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        try:
            inner()
        except RuntimeError as error:
            if is_wrapped:
                raise ValueError("layer 3 failed") from error
            raise

    error = raised(step)
    assert all(thing() is not None for thing in things)
    let_go(error)
    assert all(thing() is None for thing in things)
    assert str(error)  # it can still be shown


@dataclass
class Batch:
    name: str
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.ones(3, 4), 3),
        ([torch.ones(5, 4), torch.ones(5)], 5),
        ({"name": "a", "x": (torch.ones(6, 4),)}, 6),
        (UserDict(x=torch.ones(2, 4)), 2),
        (Batch("a", torch.ones(7, 4)), 7),
        (pack_sequence([torch.ones(3, 2), torch.ones(1, 2)], enforce_sorted=False), 2),
        (torch.tensor(1.0), 0),
        ([torch.tensor(1.0), torch.ones(5)], 5),
        (Batch, 0),
        (["a", "b"], 0),
        (None, 0),
    ],
)
def test_rows_are_those_of_the_first_tensor(batch: Any, rows: int) -> None:
    assert rows_of(batch) == rows


# ---- whether a step can be taken back ----


class Early(torch.optim.SGD):
    """Writes weights before its closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return super().step(closure)


Early.__module__ = "elsewhere"


def broken(undo: StepUndo, optimizer: torch.optim.Optimizer, is_in_closure: bool) -> bool:
    """Leaves a step by an error, inside its closure or after an update; returns whether it was taken back."""

    def closure() -> float:
        undo.note_call()
        if is_in_closure:
            raise MemoryError
        undo.is_in_closure = False
        return 0.0

    def closure_then_update() -> Any:
        optimizer.step(closure)
        raise MemoryError

    with pytest.raises(MemoryError):
        closure_then_update()
    return undo.take_back()


@pytest.mark.parametrize("is_in_closure", [False, True])
def test_torchs_own_step_can_be_taken_back_until_its_update_begins(is_in_closure: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert broken(StepUndo(optimizer), optimizer, is_in_closure) is is_in_closure


@pytest.mark.parametrize("is_in_closure", [False, True])
def test_a_step_with_copies_can_be_taken_back_at_any_time(is_in_closure: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Early([weight], lr=1.0)
    assert broken(StepUndo(optimizer), optimizer, is_in_closure)
    assert torch.equal(weight.detach(), torch.ones(2))
