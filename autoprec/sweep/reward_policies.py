"""Policies that are trained for reward weights, one for each set of weights, kept for later trials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from autoprec.sweep.config import PolicyTraining

_SEED = 0


def policy_folder(reward: Mapping[str, float], training: PolicyTraining, folder: Path) -> Path:
    """Returns the folder of the policy for some weights.

    Args:
        reward: Weights by name.
        training: How it is trained.
        folder: Where all of them are.
    """
    said = json.dumps([dict(sorted(reward.items())), training.model_dump()])
    return folder.resolve() / hashlib.sha256(said.encode()).hexdigest()[:12]


def policy_for(reward: Mapping[str, float], training: PolicyTraining, folder: Path) -> Path:
    """Trains a policy for reward weights, unless that has been done.

    Args:
        reward: Weights by name; those that are missing are 1, that of memory 0.
        training: How it is trained.
        folder: Where policies are kept.

    Raises:
        ModuleNotFoundError: If the extra ``rl`` is not installed.
        ValueError: If a weight is negative or not finite.
    """
    from autoprec.policies.ppo import train_policy
    from autoprec.policies.train_settings import load_settings

    own = policy_folder(reward, training, folder)
    own.parent.mkdir(parents=True, exist_ok=True)
    settings = load_settings(
        decisions=training.decisions,
        train={"name": "train", "size": training.tasks},
        validation={"name": "val", "size": training.validation},
        reward=dict(reward),
    )
    with FileLock(own.with_suffix(".lock")):  # another worker may want the same one
        return train_policy(settings, _SEED, own)
