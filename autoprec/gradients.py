"""One optimizer's gradients during one step: unscaled and measured once, clipped, checked again if touched.

Where somebody may look at them, that happens in place. Where nobody does, they stay as the backward left them, and a
factor for the kernel of the step collects what would have been done; both ways end in the same weights, bit for bit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autoprec.ops import global_norm, grad_norms, grad_stats, has_kernel, scale_

_ONE_PASS = {torch.float32, torch.bfloat16, torch.float16}
# other libraries' tensors may have no memory of their own
_PLAIN = {Tensor, nn.Parameter}
ADDED_BY_TORCH = 1e-6
"""What torch adds to a norm before it divides the threshold by it."""
_MARGIN = 1e-5  # below the threshold by more than that, clipping changes nothing
_LARGEST_NORM = 2.0**63  # above it squares may leave float32, and second moments with them
_DOUBLE = {torch.float64, torch.complex128}


class Gradients:
    """Gradients of one optimizer.

    Args:
        parameters: The optimizer's parameters; those without a gradient are left out.
        inv_scale: 1 / loss scale.
        bare: Parameters whose gradients were never scaled.
        private: The gradients of ``parameters``, all of which have one, wherever they are: dense, of dtypes that the
            kernels read, on one device. Given, the step is private: nothing is written in place. ``None`` takes
            ``.grad`` and unscales it in place.

    Attributes:
        parameters: Parameters with a gradient.
        norms: ``[n]``, float32, norm of each unscaled gradient before clipping.
        total: Global norm before clipping; inf or NaN if an entry is not finite.
        factor: What the step has to multiply :meth:`grads` by.
        is_finite: Whether every entry is finite, and their norm.
        is_clipped: Whether a threshold acted.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        inv_scale: float,
        bare: Sequence[nn.Parameter] = (),
        private: Sequence[Tensor] | None = None,
    ) -> None:
        self._private = private
        self.is_private = private is not None
        self.factor = inv_scale if self.is_private else 1.0
        self.is_clipped = False
        self.parameters = parameters
        self._unscaled: Sequence[nn.Parameter] = ()
        if private is None:
            skipped = {id(parameter) for parameter in bare}
            self.parameters = [parameter for parameter in parameters if parameter.grad is not None]
            self._unscaled = [parameter for parameter in self.parameters if id(parameter) not in skipped]
            self._multiply(inv_scale)
        self.measure()

    def grads(self) -> Sequence[Tensor]:
        """The gradients of ``parameters``, before ``factor``."""
        if self._private is not None:
            return self._private
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def rescale_(self, scale: float) -> Sequence[nn.Parameter]:
        """Undoes the unscaling, for a further backward of a scaled loss that adds to the gradients.

        Args:
            scale: Current loss scale.

        Returns:
            Parameters whose gradients hold a scaled loss again.
        """
        self._multiply(scale)
        return self._unscaled

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            with torch.no_grad():
                scale_([parameter.grad for parameter in self._unscaled if parameter.grad is not None], factor)

    def measure(self) -> None:
        """Measures the gradients as they are now; for when somebody may have written them without a trace."""
        if not self.is_private:
            self.parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
            self._measured = self._marks()
        self.norms, total = _norms(self.grads(), self.is_private)
        if self.factor != 1.0:
            self.norms = self.norms * self.factor
        self.total = total * self.factor
        self._current: float | None = self.total
        self.is_finite = math.isfinite(self.total)

    def after_foreign_code(self, leaves_traces: bool, keeps_norms: bool) -> None:
        """Looks at the gradients again after code that may have written or replaced them.

        Args:
            leaves_traces: Trust that a write shows in a gradient's identity or version. A write through ``.data`` or
                numpy does not.
            keeps_norms: Only check that all is finite; ``norms`` and ``total`` stay those from before clipping.
        """
        if self.is_private or (leaves_traces and self._marks() == self._measured):
            return
        norms, total = self.norms, self.total
        count = len(self.parameters)
        self.measure()
        if keeps_norms and self.is_finite and count == len(self.parameters):
            self.norms, self.total = norms, total

    @property
    def has_finite_squares(self) -> bool:
        """Whether entries are finite and the squares of what clipping has left of them are, too."""
        if not self.is_finite or self.total < _LARGEST_NORM:
            return self.is_finite
        narrow = [grad for grad in self.grads() if grad.dtype not in _DOUBLE]
        return not narrow or float(global_norm(narrow)) * self.factor < _LARGEST_NORM

    def clip_norm_(self, threshold: float, has_torchs_bits: bool = False, added: float = ADDED_BY_TORCH) -> None:
        """Scales all gradients so that their global norm does not exceed ``threshold``, by torch's formula.

        Args:
            threshold: Largest norm.
            has_torchs_bits: Take the norm once more, as torch takes it: the last bits of the measurement may differ.
            added: What is added to the norm. Torch's own value makes steps vanish where norms are far below it.
        """
        if self._current is not None and self._current * (1 + _MARGIN) + _MARGIN < threshold:
            return
        is_measured = self._current is not None and not has_torchs_bits
        current = torch.tensor(self._current) if is_measured else global_norm(self.grads())
        self.is_clipped = self.is_clipped or float(current) > threshold
        coefficient = float(threshold / (current + added))
        if coefficient >= 1.0:
            return
        if self.is_private:
            self.factor *= coefficient
            self._current = None
            return
        with torch.no_grad():
            scale_(self.grads(), coefficient)
        self._note_clipping()

    @property
    def are_dense(self) -> bool:
        """Whether no gradient is sparse."""
        return not any(grad.is_sparse for grad in self.grads())

    @contextmanager
    def foreign_clipping(self, threshold: float) -> Iterator[None]:
        """Surrounds a clipping by somebody else to ``threshold``, so that it counts as one."""
        current = float(global_norm(self.grads())) if self._current is None else self._current
        self.is_clipped = self.is_clipped or current > threshold
        yield
        self._note_clipping()

    def clip_value_(self, threshold: float) -> None:
        """Clamps all gradients to ``[-threshold, threshold]``; sparse ones through their values."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # the limit is for the sum of the entries of a row
        grads = [grad._values() if grad.is_sparse else grad for grad in self.grads()]
        with torch.no_grad():
            for grad in grads:
                grad.clamp_(-threshold, threshold)
        self._note_clipping()

    def _note_clipping(self) -> None:
        self._current = None  # another clipping goes by the norm that is left, reports by the one before
        self._measured = self._marks()

    def hide(self) -> None:
        """Empties ``.grad`` after a step; where it was private, what stands there is neither unscaled nor clipped."""
        self._private = self.grads()
        for parameter in self.parameters:
            parameter.grad = None

    def show(self) -> None:
        """Puts into ``.grad`` what would stand there without :meth:`hide`, and lets go of it here."""
        grads, self._private = list(self.grads()), ()
        for parameter in reversed(self.parameters):
            grad = grads.pop()  # so that memory never holds all of both
            if parameter.grad is None and self.is_private:
                parameter.grad = torch.empty_like(parameter).copy_(grad).mul_(self.factor)
            elif parameter.grad is None:
                parameter.grad = grad

    def first_nonfinite(self, root: nn.Module) -> str | None:
        """Name of the layer whose gradient went non-finite first in the backward (the last one in the model)."""
        pairs = zip(self.parameters, self.grads(), strict=True)
        bad = {id(parameter) for parameter, grad in pairs if not bool(torch.isfinite(_dense(grad)).all())}
        names = [name for name, parameter in root.named_parameters() if id(parameter) in bad]
        return f"{names[-1].rpartition('.')[0] or names[-1]} (its gradient)" if names else None

    def _marks(self) -> list[tuple[int, int]]:
        return [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self.parameters]


BARE_BACKWARD = (
    "A step under a loss scale used gradients of a `loss.backward()` that scaled no loss, or gradients that were"
    " changed or replaced after `self.manual_backward(loss)`. Gradients that were never scaled are used as they are,"
    " changed and replaced ones are unscaled as GradScaler would; a mix of both cannot be told apart. Call"
    " `self.manual_backward(loss)` for every loss, or leave 'loss_scale' out of `knobs`."
)


class _Mark(NamedTuple):
    """What is known of a gradient that holds a scaled loss."""

    grad: weakref.ref[Tensor]
    version: int
    scale: float


class ScaleMarks:
    """Knows which gradients hold a scaled loss, and which scale, where the user may also call ``loss.backward()``.

    With several optimizers some gradients may wait for their step while the scale moves on; they are brought along.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, int]] = {}
        self._marks: dict[int, _Mark] = {}

    def begin(self, root: nn.Module, scale: float) -> None:
        """Looks at every gradient of a model before a backward of a loss that was scaled by ``scale``."""
        parameters = list(root.parameters())
        self.follow(parameters, scale)
        self._before = {id(p): (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def end(self, root: nn.Module, scale: float) -> None:
        """Marks the gradients that the backward has written."""
        written = []
        for parameter in root.parameters():
            old, version = self._before.get(id(parameter), (None, 0))
            grad = parameter.grad
            if grad is not None and (old is not grad or version != grad._version):
                written.append(parameter)
        self.mark(written, scale)
        self._before = {}

    def mark(self, parameters: Sequence[nn.Parameter], scale: float) -> None:
        """Marks gradients that hold a loss scaled by ``scale``."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._marks[id(parameter)] = _Mark(weakref.ref(parameter.grad), parameter.grad._version, scale)

    def follow(self, parameters: Sequence[nn.Parameter], scale: float) -> None:
        """Brings gradients that hold another scale, because it moved since their backward, to the current one."""
        for parameter in parameters:
            mark, grad = self._marks.get(id(parameter)), parameter.grad
            if mark is None or grad is None or mark.scale == scale:
                continue
            is_untouched = mark.grad() is grad and mark.version == grad._version
            with torch.no_grad():
                scale_([grad], scale / mark.scale)
            version = grad._version if is_untouched else -1  # a doubt stays a doubt
            self._marks[id(parameter)] = _Mark(mark.grad if not is_untouched else weakref.ref(grad), version, scale)

    def take(self, parameters: Sequence[nn.Parameter], scale: float) -> tuple[list[nn.Parameter], bool]:
        """Forgets the marks of some parameters, whose gradients hold the current scale from here on.

        Returns:
            Those whose gradient was never scaled, and whether that, or a later change of another one, needs a warning.
        """
        self.follow(parameters, scale)
        bare: list[nn.Parameter] = []
        is_doubtful = False
        for parameter in parameters:
            mark, grad = self._marks.pop(id(parameter), None), parameter.grad
            if grad is None:
                continue
            if mark is None:
                bare.append(parameter)
            elif mark.grad() is not grad or mark.version != grad._version:
                is_doubtful = True  # combined from scaled gradients, most likely; GradScaler would unscale them, too
        return bare, bool(bare) or is_doubtful


def _norms(grads: Sequence[Tensor], are_alike: bool) -> tuple[Tensor, float]:
    """Norm of each gradient and of all; in one pass where there is a kernel and they lie together."""
    device = grads[0].device if grads else torch.device("cpu")
    if (are_alike or _are_alike(grads, device)) and has_kernel("grad_stats", device.type):
        stats = grad_stats(grads)
        return stats.norm, float(stats.total_norm)
    norms = grad_norms(grads)
    return norms, float(global_norm(grads, norms))


def _are_alike(grads: Sequence[Tensor], device: torch.device) -> bool:
    kinds = {(type(grad), grad.dtype, grad.device, grad.is_sparse) for grad in grads}
    return all(
        cls in _PLAIN and dtype in _ONE_PASS and where == device and not is_sparse
        for cls, dtype, where, is_sparse in kinds
    )


def _dense(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
