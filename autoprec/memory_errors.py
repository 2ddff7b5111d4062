"""Out-of-memory errors: how they are told from other errors, and how the memory they hold is given back.

What does not live here: what becomes of the window in which one is raised (``steering``), and where they are caught
(``retry``, ``stepping``).
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator

import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda

# what torch, its backends and the libraries below them say; words of users about memory must not match
_WORDS = re.compile(
    r"""
      \b(?:CUDA|HIP|ROCm|MPS|XPU|NPU|MLU|MUSA|HPU|SYCL)(?:\ (?:backend|driver|runtime))?(?:\ (?:error|failure))?
        (?:\ \(?\d+\)?)?\ ?:?\ ?'?out\ of\ memory\b
    | ^\s*out\ of\ memory(?:\s*$|[.:;,(!]|\ (?:allocating|trying|while))
    | \b(?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|miopenStatusAllocFailed)\b
    | \b(?:CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS)\w*_ALLOC_FAILED\b
    | \b(?:rocblas_status_memory_error|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES)\b
    # torch's issue 4107 and its successors: what cuDNN says where no algorithm fits into what memory is left
    | \bCUDNN_STATUS_NOT_SUPPORTED\.
    | unable\ to\ find\ (?:a\ valid\ cuDNN\ algorithm|an\ engine\ to\ execute)
    | \bDefaultCPUAllocator:\ (?:can't\ allocate\ memory|not\ enough\ memory)
    | \bnot\ enough\ memory:\ you\ tried\ to\ allocate\b
    | \bcannot\ allocate\ memory\ \(12\)
    | \bstd::bad_alloc\b
    | \b(?:CL|PI|UR|UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR|VK_ERROR)_OUT_OF_(?:\w+_)?(?:MEMORY|RESOURCES)\b
    | \b(?:CL_)?MEM[_\ ]OBJECT[_\ ]ALLOCATION[_\ ]FAILURE\b
    | \bRESOURCE_EXHAUSTED:\ Out\ of\ memory\b
    | \bfailed\ to\ allocate\ memory\ for\ requested\ buffer\b
    | \bPT_DEVMEM\b.*\ballocation\ failed\b
    """,
    re.VERBOSE | re.IGNORECASE,
)


def is_out_of_memory(error: BaseException, outer: BaseException | None = None) -> bool:
    """Whether memory ran out, of whatever device, by the type or the words of an error or of what it came from.

    Args:
        error: What was raised.
        outer: What was being handled where the failing code was called (``sys.exc_info()[1]`` there). It is in the
            chain of every error below it without being its cause: users call ``fit`` again in an ``except`` block.
    """
    return any(_speaks_of_memory(each) for each in _chain(error, outer))


def _speaks_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # these speak of values, names and files, whatever their words
    if isinstance(error, (ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)):
        return False
    return isinstance(error, Exception) and _WORDS.search(str(error)) is not None


def _chain(error: BaseException, outer: BaseException | None = None) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and each is not outer and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def let_go(error: BaseException, outer: BaseException | None = None) -> None:
    """Empties the frames that an error came through: their variables keep activations and graphs alive.

    Args:
        error: What was raised; nobody will look at its traceback.
        outer: As in :func:`is_out_of_memory`; its frames are left alone.
    """
    for each in _chain(error, outer):
        traceback.clear_frames(each.__traceback__)


def free_memory(device_type: str) -> None:
    """Collects garbage and gives memory that is cached for a device back to it.

    Args:
        device_type: Where the model runs.
    """
    garbage_collection_cuda()
    if device_type not in ("cpu", "cuda"):
        empty_cache = getattr(getattr(torch, device_type, None), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()
