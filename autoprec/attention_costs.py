"""Which calls of attention a calibration compares, and how they run from then on.

What lives here: from the calls that a step makes to cases that can be measured, and from what was found to what the
runtime does, within memory. What does not: measuring (``calibration``), the calls themselves (``attention``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from autoprec.attention import AttentionSignature, Choices, dtype_of, fits, runner, saved_bytes
from autoprec.calibration.attention import AttentionCase
from autoprec.implementations import candidates

_FORMATS = {"float32": "fp32", "bfloat16": "bf16"}


def key_of(signature: AttentionSignature) -> str:
    """Returns the name of a kind of call, the same in every process.

    Args:
        signature: What the call looks like.
    """
    return json.dumps(signature.to_list())


def find_cases(runtime: Choices, device_type: str) -> list[AttentionCase]:
    """Returns what can be compared among the calls that were seen.

    Args:
        runtime: The fit's.
        device_type: Where it runs.
    """
    seen = [each for each in runtime.attention_seen if not each.has_dropout and fits(each)]
    return [_case(signature, device_type) for signature in seen]


def _case(signature: AttentionSignature, device_type: str) -> AttentionCase:
    names = candidates("sdpa", _FORMATS[signature.dtype], device_type)
    return AttentionCase(
        key_of(signature),
        (signature.query, signature.key, signature.value),
        dtype_of(signature),
        {name: runner(signature, name) for name in names},
        {name: saved_bytes(signature, name) for name in names},
    )


def choose(runtime: Choices, found: Mapping[str, str], most_bytes: float) -> None:
    """Has calls run as was found best, as long as what they keep for the backward stays within a limit.

    Args:
        runtime: The fit's; its ``attention`` is written.
        found: Implementation by the key of a call; other calls stay as they are.
        most_bytes: Most that all calls of a step together may keep beyond what torch's own keep.
    """
    for signature, calls in runtime.attention_seen.items():
        name = found.get(key_of(signature), runtime.attention.get(signature, "default"))
        more = calls * (saved_bytes(signature, name) - saved_bytes(signature, "default"))
        runtime.attention.pop(signature, None)
        if name != "default" and more <= most_bytes:
            runtime.attention[signature] = name
            most_bytes -= max(more, 0)
