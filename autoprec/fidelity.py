"""How far the outputs of a trained model on held-out data are from those of the fp32 run with the same seed.

``collect_outputs`` saves them, ``compare_outputs`` compares two such files. Both go batch by batch; a file holds no
more than was allowed, and of two runs with equal outputs the same rows.

For logits: KL divergence (nats), the share of rows with the same first choice, and the SQNR of the logits (dB). For
everything else: SQNR and relative error. For both: the largest absolute difference. A model whose outputs have no
logits that can be told from their name or from integer targets gets the second kind; one that returns no floating-point
tensor (a model that only generates text, say) gets nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.outputs import Forward, call, flatten, rows_of

LIMIT_BYTES = 32 * 2**20
"""Bytes of outputs that a run saves if nothing else is asked for."""

_KINDS = "kinds"
_LOGITS, _VALUES = "logits", "values"


def collect_outputs(
    module: nn.Module,
    batches: Iterable[Any],
    path: Path,
    limit_bytes: int = LIMIT_BYTES,
    forward: Forward | None = None,
) -> Path | None:
    """Saves the outputs of a module, as float32 rows in the safetensors format.

    The module computes in evaluation mode, without gradients, in whatever precision context it is called in; modes and
    global random state are as before afterwards.

    Args:
        module: The trained module.
        batches: Held-out batches in a fixed order, on the module's device; none is asked for after the limit.
        path: The file.
        limit_bytes: Most bytes of outputs; the batch that goes over it is cut.
        forward: ``forward(module, batch)`` returns the outputs; by default what fits the module and the batch.

    Returns:
        ``path``, or ``None`` where the module returned no floating-point tensor.
    """
    from safetensors.torch import save_file

    saved: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    left = limit_bytes
    with evaluating(module):
        for index, batch in enumerate(batches):
            is_cut = False
            for output in flatten(forward(module, batch) if forward else call(module, batch, index), batch):
                rows = rows_of(output)
                kept = rows[: left // (rows.shape[1] * rows.element_size())]
                is_cut |= len(kept) < len(rows)
                if len(kept):
                    # a copy, so that the batch it is a part of can go
                    saved[f"{index:06d}/{output.name}"] = kept.clone(memory_format=torch.contiguous_format)
                    kinds.setdefault(output.name, _VALUES if output.class_dim is None else _LOGITS)
                    left -= kept.nbytes
            if is_cut or left == 0:
                break
    if not saved:
        return None
    save_file(saved, path, metadata={_KINDS: json.dumps(kinds)})
    return path


def compare_outputs(path: Path, reference: Path) -> dict[str, float]:
    """Compares the outputs of a run with those of another, of the same seed and data.

    Args:
        path: What ``collect_outputs`` saved of the run.
        reference: The same of the fp32 run.

    Returns:
        ``kl``, ``top1_agreement`` and ``logit_sqnr_db`` over all logits; ``sqnr_db`` and ``relative_error`` over all
        other outputs; ``max_abs_difference`` and ``rows`` over both. With several outputs the same for each of them,
        as in ``heads.0/sqnr_db``. Equal outputs have an infinite SQNR. Where the run is not finite and the reference
        is, differences and KL are infinite; rows of logits whose reference is no distribution are left out of ``kl``
        and ``top1_agreement`` and counted as ``left_out_rows``.

    Raises:
        ValueError: If the files hold outputs of different shapes, or none in common.
    """
    sums: dict[str, _Sums] = {}
    for name, kind, ours, theirs in _common(path, reference):
        sums.setdefault(name, _Sums(is_logits=kind == _LOGITS)).add(ours, theirs)
    found = _Sums.pooled(sums.values())
    if len(sums) > 1:
        found |= {f"{name}/{key}": value for name, of_name in sums.items() for key, value in of_name.measures().items()}
    return found


def _common(path: Path, reference: Path) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as ours, safe_open(reference, "pt") as theirs:
        kinds = json.loads((theirs.metadata() or {}).get(_KINDS, "{}"))
        names = sorted(set(ours.keys()) & set(theirs.keys()))
        if not names:
            raise ValueError(
                f"Passed `compare_outputs({str(path)!r}, {str(reference)!r})`, which have no outputs in common."
                " Both must be of the same model and the same held-out data."
            )
        for name in names:
            one, other = ours.get_tensor(name), theirs.get_tensor(name)
            if one.shape != other.shape:
                raise ValueError(
                    f"Passed `compare_outputs({str(path)!r}, {str(reference)!r})`, whose outputs {name!r} have the"
                    f" shapes {list(one.shape)} and {list(other.shape)}. Both must be of the same model and the same"
                    " held-out data, saved with the same limit."
                )
            output = name.partition("/")[2]
            yield output, kinds.get(output, _VALUES), one.double(), other.double()


@dataclass
class _Sums:
    """What is added up over batches."""

    is_logits: bool
    rows: int = 0
    compared_rows: int = 0
    kl: float = 0.0
    agreeing: int = 0
    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        self.rows += len(theirs)
        error = torch.where(ours == theirs, 0.0, ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        self.signal += float(theirs[theirs.isfinite()].square().sum())
        self.noise += float(error.square().sum())
        self.largest = max(self.largest, float(error.max()))
        if self.is_logits:
            self._add_logits(ours, theirs)

    def _add_logits(self, ours: Tensor, theirs: Tensor) -> None:
        log_p = theirs.log_softmax(-1)
        is_usable = ~log_p.isnan().any(-1)
        log_p, log_q = log_p[is_usable], ours[is_usable].log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        # rounding makes a KL of 0 slightly negative; a run that gives NaN says nothing there
        rows = terms.sum(-1).clamp(min=0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        self.compared_rows += len(rows)
        self.kl += float(rows.sum())
        agrees = (ours[is_usable].argmax(-1) == theirs[is_usable].argmax(-1)) & ~log_q.isnan().any(-1)
        self.agreeing += int(agrees.sum())

    def measures(self) -> dict[str, float]:
        ratio = self.noise / self.signal if self.signal else (math.inf if self.noise else 0.0)
        sqnr_db = math.inf if ratio == 0 else -math.inf if math.isinf(ratio) else -10.0 * math.log10(ratio)
        found = {"max_abs_difference": self.largest, "rows": float(self.rows)}
        if not self.is_logits:
            return {"sqnr_db": sqnr_db, "relative_error": math.sqrt(ratio), **found}
        rows = self.compared_rows
        if rows < self.rows:
            found["left_out_rows"] = float(self.rows - rows)
        known = {"kl": self.kl / rows, "top1_agreement": self.agreeing / rows} if rows else {}
        return {**known, "logit_sqnr_db": sqnr_db, **found}

    @classmethod
    def pooled(cls, parts: Iterable[_Sums]) -> dict[str, float]:
        found: dict[str, float] = {}
        every = list(parts)
        for is_logits in (True, False):
            of_kind = [part for part in every if part.is_logits is is_logits]
            if of_kind:
                total = cls(is_logits)
                for part in of_kind:
                    total._merge(part)
                found |= total.measures()
        return found | {
            "max_abs_difference": max(part.largest for part in every),
            "rows": float(sum(part.rows for part in every)),
        }

    def _merge(self, other: _Sums) -> None:
        for name in ("rows", "compared_rows", "kl", "agreeing", "signal", "noise"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Has a module compute in evaluation mode without gradients; modes and random state are put back afterwards.

    Args:
        module: The module.
    """
    modes = [(part, part.training) for part in module.modules()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    module.eval()
    try:
        with torch.random.fork_rng(list(devices)), torch.no_grad():
            yield
    finally:
        for part, was_training in modes:
            part.training = was_training
