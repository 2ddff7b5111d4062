"""The models that proxies train, as graphs for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoprec.envs.engine import ACTIVATIONS, NODES

INPUT_WIDTH = 16
OUTPUT_WIDTH = 16


@dataclass
class Graph:
    """A model under construction. Nodes are ``(kind, a, b, unit, positions, width, extra)``.

    Args:
        positions: Positions of a sample: pixels, tokens or time steps.
        width: Numbers at each position.
    """

    positions: int = 1
    width: int = INPUT_WIDTH
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each unit: rows of a sample, width in, width out."""

    def __post_init__(self) -> None:
        self.nodes.append((0, 0, 0, 0, self.positions, self.width, 0))

    @property
    def last(self) -> int:
        """The newest node."""
        return len(self.nodes) - 1

    def linear(self, width: int, activation: str = "none", kind: str = "linear") -> int:
        """Adds a linear layer on the newest node."""
        return self._unit("linear", kind, width, ACTIVATIONS.index(activation))

    def recurrent(self) -> int:
        """Adds a recurrent cell of the width of the newest node, which gives its last state."""
        node = self._unit("recurrent", "rnn", self.nodes[-1][5], 0)
        self.nodes[-1] = (*self.nodes[-1][:4], 1, *self.nodes[-1][5:])
        return node

    def conv(self, width: int, stride: int = 1) -> int:
        """Adds a 3 x 3 convolution with ReLU."""
        side = round(self.nodes[-1][4] ** 0.5)
        across = (side - 1) // stride + 1
        self._node("patches", positions=across * across, width=9 * self.nodes[-1][5], extra=stride)
        return self.linear(width, "relu", kind="conv")

    def norm(self) -> int:
        """Adds a layer norm."""
        return self._node("norm")

    def mean(self) -> int:
        """Adds a mean over positions."""
        return self._node("mean", positions=1)

    def attention(self, heads: int) -> int:
        """Adds attention on queries, keys and values side by side."""
        return self._node("attention", width=self.nodes[-1][5] // 3, extra=heads)

    def add(self, other: int) -> int:
        """Adds an earlier node to the newest one."""
        return self._node("add", b=other)

    def _unit(self, node: str, kind: str, width: int, extra: int) -> int:
        source = self.nodes[-1]
        self.shapes.append((source[4], source[5], width))
        self.kinds.append(kind)
        return self._node(node, unit=len(self.kinds) - 1, width=width, extra=extra)

    def _node(self, kind: str, *, b: int = 0, unit: int = 0, positions: int = 0, width: int = 0, extra: int = 0) -> int:
        source = self.nodes[-1]
        row = (NODES.index(kind), self.last, b, unit, positions or source[4], width or source[5], extra)
        self.nodes.append(row)
        return self.last


def mlp(units: int, width: int) -> Graph:
    """Linear layers with ReLU."""
    graph = Graph()
    for _ in range(units - 1):
        graph.linear(width, "relu")
    graph.linear(OUTPUT_WIDTH)
    return graph


def cnn(units: int, width: int) -> Graph:
    """Convolutions on 4 x 4 pixels, the first with stride 2, then a mean and a linear layer."""
    graph = Graph(positions=16)
    for layer in range(units - 1):
        graph.conv(16 if layer == 0 else width // 64 * 16 + 16 * (width < 64), stride=2 if layer == 0 else 1)
    graph.mean()
    graph.linear(OUTPUT_WIDTH)
    return graph


def transformer(units: int, width: int) -> Graph:
    """Pre-norm blocks of attention and feed-forward on 16 tokens; with an embedding where units allow."""
    graph = Graph(positions=16)
    if (units - 1) % 4 == 1:
        graph.linear(INPUT_WIDTH)
    for _ in range((units - 1) // 4):
        _block(graph, width // 32 * 16)
    graph.mean()
    graph.linear(OUTPUT_WIDTH)
    return graph


def _block(graph: Graph, width: int) -> None:
    start, inside = graph.last, graph.nodes[-1][5]
    graph.norm()
    graph.linear(3 * inside)
    graph.attention(heads=inside // 16)
    graph.linear(inside)
    middle = graph.add(start)
    graph.norm()
    graph.linear(width, "relu")
    graph.linear(inside)
    graph.add(middle)


def recurrent(units: int, width: int) -> Graph:
    """A recurrent cell over 4 time steps, then linear layers."""
    graph = Graph(positions=4)
    graph.linear(width // 32 * 16)
    graph.recurrent()
    for _ in range(units - 3):
        graph.linear(width, "relu")
    graph.linear(OUTPUT_WIDTH)
    return graph


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Attributes:
        build: Makes one from a number of units and a width.
        units: Numbers of units that it can have.
        lr: Learning rates that suit it, by optimizer.
    """

    build: Callable[[int, int], Graph]
    units: tuple[int, ...]
    lr: dict[str, float]


ARCHITECTURES = {
    "mlp": Architecture(mlp, tuple(range(3, 13)), {"sgd": 0.1, "adam": 4e-3, "adamw": 4e-3}),
    "cnn": Architecture(cnn, (3, 4), {"sgd": 0.3, "adam": 1e-2, "adamw": 1e-2}),
    "transformer": Architecture(transformer, (5, 6, 9, 10), {"sgd": 0.1, "adam": 3e-3, "adamw": 3e-3}),
    "recurrent": Architecture(recurrent, (3, 4), {"sgd": 0.2, "adam": 8e-3, "adamw": 8e-3}),
}
"""The families by name."""


def multiplications(graph: Graph) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns the multiplications of each unit per sample."""
    return np.array([rows * wide * out for rows, wide, out in graph.shapes], dtype=np.float64)
