"""Convolutions in a row that pass their results on in ``channels_last``.

Converting for one convolution and back costs more than it saves. What pays is a chain: several convolutions in one
``nn.Sequential``, with nothing but layers between them that take any layout. There nobody but the next layer sees what
a layer returns. The first convolution's input is converted, what leaves the chain is contiguous again, and the values
are those of the same layers without a chain. Weights and their gradients keep their layout.

Elsewhere a result in another layout could break code of the user (``view``), so that nothing is converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoprec.lookalike import lookalike, plain_class

_CONVS = (nn.Conv2d, nn.ConvTranspose2d)
# dropout is not among them: which entries its random numbers fall on depends on the layout
_ANY_LAYOUT = (
    *_CONVS,
    *(nn.BatchNorm2d, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish, nn.Sigmoid, nn.Tanh),
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Chain(NamedTuple):
    """A stretch of a Sequential: two convolutions at least, and layers that take any layout.

    Attributes:
        start: Position of the first layer, a convolution.
        stop: Position after the last.
        modules: All modules in it, those inside of nested Sequentials included.
        convs: The convolutions.
    """

    start: int
    stop: int
    modules: tuple[nn.Module, ...]
    convs: tuple[nn.Module, ...]


class Container:
    """A Sequential with chains.

    Args:
        module: The Sequential.
        chains: Its chains, in order.
        is_chosen: Tells of a convolution whether ``channels_last`` is chosen for it in the step under way.
        note: Called with each convolution that runs so.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chains: Sequence[Chain],
        is_chosen: Callable[[nn.Module], bool],
        note: Callable[[nn.Module], None],
    ) -> None:
        self.module = module
        self.chains = tuple(chains)
        self._children = tuple(module._modules.values())
        self._is_chosen = is_chosen
        self._note = note

    def run(self, base_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the Sequential; chains convert where all of their convolutions shall."""
        layers = tuple(self.module._modules.values())
        if len(args) != 1 or kwargs or layers != self._children or nn.modules.module._has_any_global_hook():
            return base_forward(self.module, *args, **kwargs)
        x, position = args[0], 0
        for chain in self.chains:
            x = _through(layers[position : chain.start], x)
            is_converted = self._converts(chain, x)
            if is_converted:
                x = _channels_last(x)
                for conv in chain.convs:
                    self._note(conv)
            for layer in layers[chain.start : chain.stop]:
                # again, since an input of one channel has no layout of its own
                x = layer(_channels_last(x) if is_converted and layer in chain.convs else x)
            x = x.contiguous() if is_converted else x
            position = chain.stop
        return _through(layers[position:], x)

    def _converts(self, chain: Chain, x: Any) -> bool:
        if type(x) is not Tensor or x.ndim != 4 or not x.is_contiguous() or x.numel() == 0:
            return False
        if not all(map(self._is_chosen, chain.convs)):
            return False
        # a weight in channels_last makes the result so anyway: that is the user's own choice
        weights: list[Any] = [conv.weight for conv in chain.convs]
        return all(each.is_contiguous() for each in weights) and not any(map(_is_hooked, chain.modules))


def _through(layers: Sequence[nn.Module | None], x: Any) -> Any:
    for layer in layers:
        x = layer(x)  # type: ignore[misc]
    return x


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _is_hooked(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or any(module.__dict__.get(name) for name in _HOOKS)


def find_containers(
    root: nn.Module, is_chosen: Callable[[nn.Module], bool], note: Callable[[nn.Module], None]
) -> list[Container]:
    """Finds the Sequentials of a model that have chains.

    Args:
        root: The model.
        is_chosen: Tells of a convolution whether ``channels_last`` is chosen for it in the step under way.
        note: Called with each convolution that runs so.
    """
    found = []
    for module in root.modules():
        if plain_class(module) is nn.Sequential and module is not root:
            chains = _chains(module)
            if chains:
                found.append(Container(module, chains, is_chosen, note))  # type: ignore[arg-type]
    return found


def _chains(module: nn.Module) -> list[Chain]:
    layers = list(module._modules.values())
    chains: list[Chain] = []
    start = 0
    while start < len(layers):
        stop = start
        while stop < len(layers) and _takes_any_layout(layers[stop]):
            stop += 1
        chain = _chain(layers, start, stop)
        if chain is not None:
            chains.append(chain)
        start = stop + 1
    return chains


def _chain(layers: Sequence[nn.Module | None], start: int, stop: int) -> Chain | None:
    while start < stop and not _convs(layers[start]):
        start += 1
    modules = tuple(part for layer in layers[start:stop] if layer is not None for part in layer.modules())
    convs = tuple(part for part in modules if plain_class(part) in _CONVS)
    return Chain(start, stop, modules, convs) if len(convs) > 1 else None


def _convs(layer: nn.Module | None) -> bool:
    return layer is not None and any(plain_class(part) in _CONVS for part in layer.modules())


def _takes_any_layout(layer: nn.Module | None) -> bool:
    if layer is None or getattr(layer, "return_indices", False):
        return False
    if plain_class(layer) is nn.Sequential:
        return len(layer._modules) > 0 and all(map(_takes_any_layout, layer._modules.values()))
    return plain_class(layer) in _ANY_LAYOUT


@contextmanager
def swapped(containers: Sequence[Container]) -> Iterator[None]:
    """Lets Sequentials convert for the time of a step.

    Args:
        containers: From :func:`find_containers`.
    """
    mine = [each for each in containers if type(each.module) is nn.Sequential]  # not those of an outer region
    for each in mine:
        each.module.__dict__["_autoprec"] = each
        object.__setattr__(each.module, "__class__", _converting_class())
    try:
        yield
    finally:
        for each in mine:
            each.module.__dict__.pop("_autoprec", None)
            object.__setattr__(each.module, "__class__", nn.Sequential)


@functools.cache
def _converting_class() -> type:
    return lookalike(nn.Sequential, "forward", _converting_forward)


def _converting_forward(base_forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base_forward)
    def forward(self: nn.Sequential, *args: Any, **kwargs: Any) -> Any:
        container = self.__dict__.get("_autoprec")
        if container is None or torch.compiler.is_compiling():
            return base_forward(self, *args, **kwargs)
        return container.run(base_forward, *args, **kwargs)

    return forward
