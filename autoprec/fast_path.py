"""Runs layers on kept low-precision copies of their weights, whose gradients go straight to the kernel of the step.

What autocast does in every forward and backward (cast each weight down, cast each gradient up) is left to the kernel
that updates the weights and passes over them anyway. The results are the same bit for bit. What lives here: which
layers take part, and when. What does not: a layer's run on its copies, and whether a copy can be trusted
(``weight_copies``), whether anybody may look (``onlookers``), the step itself (``stepping``, ``fused``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoprec.fused import FusedStep
from autoprec.gradient_table import GradientTable, is_node_kept, uses_of
from autoprec.knobs import Knobs, steered_units
from autoprec.weight_copies import CopiedLayer, WeightCopies, can_run_on_copies

# entries of each weight that are compared with its copy in every step
_SAMPLES = 4
_STALE = (
    "autoprec: `{name}` was written without a trace (through `.data` or from outside of PyTorch) while a low-precision"
    " copy of it was kept. The copies were written anew in time, and from here on none is kept, as with"
    " `AutoPrecisionConfig(fused_step=False)`."
)


class FastPath:
    """Low-precision copies of weights for one fit.

    Args:
        root: The model.
        knobs: Knobs of the fit.
        fused: The step of the optimizer that owns the weights.
        refreshes_always: Write all copies before each step, because user code runs between steps.

    Attributes:
        table: Gradients that wait for the step.
        layers: Layers that run on copies.
    """

    def __init__(self, root: nn.Module, knobs: Knobs, fused: FusedStep, refreshes_always: bool) -> None:
        self.table = GradientTable()
        self.layers: list[CopiedLayer] = []
        self._root = root
        self._knobs = knobs
        self._fused = fused
        self._refreshes_always = refreshes_always
        self._samples = -1 if os.environ.get("AUTOPREC_CHECK", "0") not in ("", "0") else _SAMPLES
        self._has_found_stale = False
        self._candidates: list[CopiedLayer] = []
        self._counted: list[CopiedLayer] | None = None
        self._copies: WeightCopies | None = None
        self._made_for = -1
        self._is_handed_out = False
        # in mid-run a kept graph would look like it
        self._hooked = {id(p) for p in fused.parameters() if p.requires_grad and not is_lazy(p) and is_node_kept(p)}

    def hand_out(self) -> bool:
        """Called before the forward of a training step: gives layers the copies they run on.

        Returns:
            Whether the classes of layers must be swapped for this step.
        """
        if self._is_handed_out:
            self.take_back()
        self.table.clear()
        if self._has_found_stale:
            return False
        if self._made_for != self._knobs.changes or self._candidates:  # these were not counted: there was no loss
            self._begin_to_count()
            return bool(self._candidates)
        if not self._fused.taken:
            return False
        if self._counted is not None:
            self._choose(self._counted)
        elif self._copies is not None and not self._copies.fit:
            self._choose(self.layers)
        if self._copies is None or not self._are_current(self._copies):
            return False
        handed = iter(self.table.hand_out(*self._copies.pairs))
        for layer in self.layers:
            layer.take(handed)
        self._is_handed_out = True
        return True

    def look_at_graph(self, loss: Tensor) -> None:
        """Called before the backward: finds out which gradients do not come from one call of one layer alone."""
        if self._candidates:
            uses, counted = uses_of(loss), self._candidates
            self._drop()
            self._counted = [layer for layer in counted if _is_lone(layer, uses)]
        for layer in self.layers:
            if layer.calls > 1:
                self.table.shared.update(map(id, layer.parameters))

    def take_back(self) -> None:
        """Called after the backward: lets go of the graph, and of copies that a graph which is kept still needs."""
        self._is_handed_out = False
        for layer in self.layers:
            layer.weight_copy = layer.bias_copy = None
        if self._copies is not None and self._copies.are_in_use:
            self._choose(self.layers)

    def distrust(self) -> None:
        """Called where other code may have written weights: the copies are written anew before the next step."""
        self.take_back()
        if self._copies is not None:
            self._copies.is_trusted = False

    def note_step(self) -> None:
        """Called after a step that the kernels took: they have written the copies of what they updated."""
        if self._copies is not None:
            self._copies.note_written(self._fused.updated)

    def release(self) -> None:
        """Lets go of everything."""
        self._drop()
        self.table.clear()

    def _drop(self) -> None:
        for layer in [*self.layers, *self._candidates]:
            layer.state.override = None
        self.layers, self._candidates, self._counted, self._copies = [], [], None, None
        self._fused.copies = {}

    # ---- which layers ----

    def _begin_to_count(self) -> None:
        """Lets one window pass in which it is counted how often each layer runs."""
        self._drop()
        self._made_for = self._knobs.changes
        owners = Counter(id(p) for module in self._root.modules() for p in module._parameters.values() if p is not None)
        owned = {id(p) for p in self._fused.parameters()} - self._hooked
        for unit in steered_units(self._knobs):
            name = self._knobs.formats[unit.name]
            if unit.is_emulated(name):
                continue
            self._candidates += [
                layer
                for state in unit.states
                if can_run_on_copies(state.module, name) and (layer := CopiedLayer(state, name)).is_intact
                if all(id(p) in owned and owners[id(p)] == 1 for p in layer.parameters)
            ]
        for layer in self._candidates:
            layer.state.override = layer.count

    def _choose(self, layers: Sequence[CopiedLayer]) -> None:
        self._drop()
        self.layers = [layer for layer in layers if layer.is_intact and layer.lies_well]
        for layer in self.layers:
            layer.state.override = layer.run
        if self.layers:
            self._copies = WeightCopies(self.layers)
            self._fused.copies = dict(zip(self._copies.keys, self._copies.copies, strict=True))

    # ---- whether copies are what their weights are ----

    def _are_current(self, copies: WeightCopies) -> bool:
        if self._refreshes_always or not copies.are_unwritten:
            copies.refresh()
            return True
        stale = copies.first_stale(self._samples)
        if stale is None:
            return True
        self._has_found_stale = True
        self._drop()
        name = next((name for name, parameter in self._root.named_parameters() if parameter is stale), "a parameter")
        rank_zero_warn(_STALE.format(name=name))
        return False


def _is_lone(layer: CopiedLayer, uses: Counter[int]) -> bool:
    """Whether a layer runs once in a step, and at most one gradient joins that of each of its parameters.

    Gradients of several calls would be added up in low precision, where autocast adds them in float32, and three in
    another order than autograd's.
    """
    return layer.calls == 1 and all(uses[id(parameter)] < 3 for parameter in layer.parameters)
