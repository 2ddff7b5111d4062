"""The ways of training that the transfer study compares, as data, and which of them this version has.

Static settings stay what they are for a whole run. A policy decides for the device that its run is charged for: it is
offered that device's formats at that device's costs, so it trains once for each charge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, ScriptedController
from autoprec.config import RECIPES, CalibrationConfig
from autoprec.controller import resolve_policy
from benchmarks.transfer_charge import MEASURED, profile_of

CLIP_NORM = 1.0
"""Threshold of a Trainer that clips by itself."""
INTERVAL = 8
"""Steps between decisions: runs are short, and proxies decide as often."""
STARTING = "bf16-mixed"
"""Precision of the Trainer that a policy is added to."""
TWIN = "fp32-twin"
RULE, TABLE = "rule", "table"
SUBJECTS = ("pretrained", TABLE, RULE)
"""Policies that the study is about, the first one that there is."""


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Args:
        name: Name in the output.
        precision: That of the Trainer.
        clip: ``"none"``, ``"norm"`` for the Trainer's own at ``CLIP_NORM``, or ``"median"`` for autoprec's, which
            follows the running median of the norm, with every other knob left alone.
        policy: Who decides; ``None`` for a static arm.
    """

    name: str
    precision: str = "32-true"
    clip: str = "norm"
    policy: str | None = None

    @property
    def is_static(self) -> bool:
        """Whether nothing but a threshold for clipping changes."""
        return self.policy is None

    @property
    def format(self) -> str:
        """Format of every layer of a static arm, as autocast has it."""
        return {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}[self.precision]

    def identity(self) -> list[Any]:
        """What its results depend on besides source and versions, for JSON."""
        return [self.name, self.precision, self.clip, self.policy, CLIP_NORM, INTERVAL, _digest(self.policy)]

    def callback(self, charge: str) -> AutoPrecisionCallback | None:
        """Returns the callback of a run, ``None`` for plain Lightning.

        Args:
            charge: The charge that a policy decides for.
        """
        if self.policy is not None:
            return AutoPrecisionCallback(self.policy, interval=INTERVAL, config=settings(charge), verbose=False)
        if self.clip == "median":
            return AutoPrecisionCallback(ScriptedController(), knobs=("clip",), verbose=False)
        return None

    def trainer_options(self) -> dict[str, Any]:
        """Returns the arguments of its Trainer that decide how it trains."""
        clip = {"gradient_clip_val": CLIP_NORM} if self.clip == "norm" and self.is_static else {}
        if self.precision == "16-mixed":  # on a CPU Lightning turns it into bf16-mixed unless it gets the plugin
            scaler = torch.amp.GradScaler("cpu", growth_interval=RECIPES["short"].loss_scale.growth_interval)
            return {**clip, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
        return {**clip, "precision": self.precision}


ARMS = (
    Arm(TWIN, clip="none"),
    Arm("32-true+clip"),
    Arm("bf16-mixed+clip", "bf16-mixed"),
    Arm("16-mixed+clip", "16-mixed"),
    Arm("32-true+median-clip", clip="median"),
    Arm("bf16-mixed+median-clip", "bf16-mixed", clip="median"),
    *(Arm(name, STARTING, policy=name) for name in (RULE, "shape", TABLE, "pretrained")),
)
"""All arms; the first one is the unit of measure."""


def settings(charge: str) -> AutoPrecisionConfig:
    """Returns the settings of a policy that decides for a charge.

    Args:
        charge: One of ``transfer_charge.CHARGES``.
    """
    if charge == MEASURED:
        return replace(RECIPES["short"], calibration=CalibrationConfig(enabled=True))
    # the costs of the simulated device are given to the run, nothing is timed
    formats = tuple(profile_of(charge).cost)
    return replace(RECIPES["short"], formats=formats, calibration=CalibrationConfig(enabled=False))


def available(arms: Sequence[Arm]) -> tuple[list[Arm], list[str]]:
    """Returns the arms that this version has, and a line for each that it does not have.

    Args:
        arms: Any arms.
    """
    found, missing = [], []
    for arm in arms:
        try:
            if arm.policy is not None:
                resolve_policy(arm.policy, settings(MEASURED))
        except ModuleNotFoundError as error:
            missing.append(f"{arm.name} is left out: {error}")
        except (ValueError, FileNotFoundError):
            missing.append(f"{arm.name} is left out: this version does not have it.")
        else:
            found.append(arm)
    return found, missing


def folder_arm(folder: str) -> Arm:
    """Returns the arm of a policy in a folder, named after the folder.

    Args:
        folder: The folder.
    """
    path = Path(folder).resolve()
    return Arm(path.name, STARTING, policy=str(path))


def _digest(policy: str | None) -> str | None:
    """A digest of the files that hold a policy, for those that are more than code."""
    import autoprec.policies

    shipped = Path(autoprec.policies.__file__).parent / str(policy)
    path = shipped if shipped.is_dir() else Path(str(policy))
    if policy is None or not path.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
