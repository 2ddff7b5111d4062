"""Policy networks that nobody has trained, in folders, for the tests of what uses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from autoprec.encoding import FEATURES, LIMIT
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.policy_file import PolicyCard, save_policy


def restless_network(seed: int = 0, hidden: tuple[int, ...] = (16, 16)) -> PolicyNetwork:
    """Moves about half of the rows, each in its own way."""
    network = PolicyNetwork(len(FEATURES), hidden, seed=seed)
    with torch.no_grad():
        network.head.weight.mul_(100.0)
        network.head.bias.zero_()
    return network


def constant_network(move: int, margin: float = 1.0) -> PolicyNetwork:
    """Answers every row with one move."""
    network = PolicyNetwork(len(FEATURES), (4,))
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0]))
        network.head.bias[move + 1] = margin
    return network


def rows(count: int, seed: int = 0) -> NDArray[np.float32]:
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.uniform(-1.0, 1.0, (count, len(FEATURES))).astype(np.float32).clip(-LIMIT, LIMIT)


def saved(folder: Path, network: PolicyNetwork | None = None, **fields: object) -> Path:
    """Writes a policy and returns its folder."""
    network = restless_network() if network is None else network
    save_policy(folder, network, PolicyCard.model_validate({"hidden": network.hidden, "name": "untrained", **fields}))
    return folder
