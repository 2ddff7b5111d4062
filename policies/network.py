"""The policy as a small network in plain torch: one row of features in, one of three moves out, for any number of rows.

What lives here: the network, what it does with rows unlike those it was trained on, and its answer for a decision. What
does not: its file (``policy_file``), its training, and what moves are relative to (``pretrained_policy``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autoprec.encoding import FEATURES, LIMIT

if TYPE_CHECKING:
    from autoprec.policies.policy_file import PolicyCard

MOVES = (-1, 0, 1)
"""What the three outputs stand for: lower, keep, raise."""

MIN_STD = 0.1
"""Least standard deviation and least half width of a training range: features are scaled to about 1 by hand."""
MAX_NORMAL = 5.0
"""Largest magnitude of a normalised feature."""
MAX_DISTANCE = 4.0
"""Most that one feature adds to the novelty of a row."""

_KEEP = 0.5
_UNUSED_STD = 1e6
_KINDS = ("knob_", "layer_", "format_")


class PolicyNetwork(nn.Module):
    """Logits of lower, keep and raise for each row of an observation.

    A row is normalised by statistics of the training, which are part of the network and never change afterwards, and
    goes through linear layers with tanh between them. What is not a number becomes the mean.

    **Rows unlike those of the training.** ``novelty`` is 0 where all features of a row are in their training range. The
    logits of lower and raise, relative to keep, are ``margin * exp(-novelty) - novelty``: unchanged inside the range,
    smooth, and below 0 (keep) soon outside it, the sooner the less sure the network is. A margin of 2 is lost at a
    novelty of 0.9, one of 10 at 1.8, one of 100 at 3.4.

    A new network keeps everything that is not clearly better moved: keep has a head start of 0.5.

    Args:
        features: Columns of a row.
        hidden: Widths of the hidden layers.
        seed: Of the first weights, drawn by a generator of its own.

    Attributes:
        mean: ``[features]``, float32, of the rows it was trained on.
        std: The same; at least ``MIN_STD`` is used.
        low: The least value of each feature in training.
        high: The largest.
        card: What its file says of it, ``None`` for a network that comes from no file.
    """

    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, features: int = len(FEATURES), hidden: Sequence[int] = (64, 64), *, seed: int = 0) -> None:
        super().__init__()
        self.features, self.hidden = int(features), tuple(int(width) for width in hidden)
        self.card: PolicyCard | None = None
        generator = torch.Generator("cpu").manual_seed(seed)
        layers: list[nn.Module] = []
        for inner, outer in zip((self.features, *self.hidden), self.hidden, strict=False):
            layers += [_linear(inner, outer, math.sqrt(2.0), generator), nn.Tanh()]
        self.body = nn.Sequential(*layers)
        self.head = _linear(self.hidden[-1] if self.hidden else self.features, len(MOVES), 0.01, generator)
        with torch.no_grad():
            self.head.bias[MOVES.index(0)] = _KEEP
        for name, value in (("mean", 0.0), ("std", 1.0), ("low", -LIMIT), ("high", LIMIT)):
            self.register_buffer(name, torch.full((self.features,), value, dtype=torch.float32, device="cpu"))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns logits of lower, keep and raise.

        Args:
            rows: ``[N, features]``, any float dtype; N may be 0.

        Returns:
            ``[N, 3]``, float32, finite for finite weights.
        """
        with torch.autocast(rows.device.type, enabled=False):
            rows = self._checked(rows)
            logits: Tensor = self.head(self.body(self._normalised(rows)))
            novelty = self._novelty(rows)[:, None]
            keep = logits[:, 1:2]
            moved = keep + (logits - keep) * torch.exp(-novelty) - novelty
            return torch.cat((moved[:, :1], keep, moved[:, 2:]), dim=1)

    def novelty(self, rows: Tensor) -> Tensor:
        """Returns how far rows are outside of the training range.

        Each feature adds its distance to the range in half widths of that range (of ``MIN_STD`` at least), and
        ``MAX_DISTANCE`` at most, which is also what a value that is not finite adds.

        Args:
            rows: ``[N, features]``.

        Returns:
            ``[N]``, float32, >= 0.
        """
        return self._novelty(self._checked(rows))

    def moves(self, observation: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the likeliest move of each row; keep, unless another one is likelier.

        It computes what ``forward`` does, in numpy: torch's autocast, modes, defaults and reduced-precision products,
        which the user may have switched on, have no say in it, and it takes half the time.

        Args:
            observation: ``[N, features]``, as ``autoprec.encoding.encode`` returns it. Not changed.

        Returns:
            ``[N]``, -1, 0 or 1.

        Raises:
            FloatingPointError: If a logit is not finite, which takes weights that are not.
        """
        rows = np.asarray(observation, dtype=np.float32)
        self._check_shape(rows.shape)
        with np.errstate(all="ignore"):
            logits, novelty = self._plain_logits(rows), self._plain_novelty(rows)
            lower, higher = ((logits[:, move] - logits[:, 1]) * np.exp(-novelty) - novelty for move in (0, 2))
        if not np.isfinite(logits).all():
            raise FloatingPointError("the policy network's output is not finite")
        # of two equally good moves the one to the wider format
        return np.where(np.maximum(lower, higher) > 0, np.where(higher >= lower, 1, -1), 0)

    def _plain_logits(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        mean, std = _plain(self.mean), np.maximum(_plain(self.std), np.float32(MIN_STD))
        values = (rows - mean) / std
        if not np.isfinite(rows).all():
            values = np.where(np.isfinite(rows), values, np.float32(0.0))
        values = np.clip(values, -MAX_NORMAL, MAX_NORMAL)
        for layer in self.body:
            if isinstance(layer, nn.Linear):
                values = np.tanh(values @ _plain(layer.weight).T + _plain(layer.bias))
        return np.asarray(values @ _plain(self.head.weight).T + _plain(self.head.bias))

    def _plain_novelty(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        low, high = _plain(self.low), _plain(self.high)
        half_width = np.maximum((high - low) / 2, np.float32(MIN_STD))
        distance = np.maximum(low - rows, rows - high) / half_width
        distance = np.where(np.isfinite(rows), distance, np.float32(MAX_DISTANCE))
        return np.asarray(np.clip(distance, 0.0, MAX_DISTANCE).sum(axis=1))

    def set_normalisation(self, rows: Tensor) -> None:
        """Takes mean and spread of each feature from rows; before training, since it changes what the network sees.

        Args:
            rows: ``[N, features]``. Rows that are not finite are left out.

        Raises:
            ValueError: If no row is finite.
        """
        rows = self._checked(rows.detach())
        rows = rows[torch.isfinite(rows).all(dim=1)].double()
        if not len(rows):
            raise ValueError("Passed `set_normalisation(rows)` without a finite row. It needs some of a training.")
        self.mean.copy_(rows.mean(dim=0))
        self.std.copy_(rows.std(dim=0, unbiased=False))

    def set_training_range(self, low: Tensor, high: Tensor, names: Sequence[str] = FEATURES) -> None:
        """Takes the range of each feature in training; changes no output for rows inside of it.

        A feature that never changed has taught nothing. It is left out of account from here on, whatever its value.
        Features that name a kind of knob, layer or format are the exception: another value there is another kind of
        row, which the network does not know.

        Args:
            low: ``[features]``, least values.
            high: ``[features]``, largest values.
            names: Names of the features.

        Raises:
            ValueError: If a number is not finite, or a range is empty.
        """
        low, high = (limit.detach().to(self.low) for limit in (low, high))
        if not (torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all():
            raise ValueError("Passed `set_training_range(low, high)`. They must be finite, and `low` at most `high`.")
        is_kind = torch.tensor([name.startswith(_KINDS) for name in names], device=low.device)
        is_unused = (low == high) & ~is_kind
        seen = self._normalised(low[None])[0]
        self.mean.copy_(torch.where(is_unused, low - seen * _UNUSED_STD, self.mean))
        self.std.copy_(torch.where(is_unused, _UNUSED_STD, self.std))
        self.low.copy_(torch.where(is_unused, -LIMIT, low))
        self.high.copy_(torch.where(is_unused, LIMIT, high))

    def _checked(self, rows: Tensor) -> Tensor:
        self._check_shape(rows.shape)
        return rows.to(torch.float32)

    def _check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 2 or shape[1] != self.features:
            raise ValueError(
                f"Passed rows of shape {list(shape)} to a policy network with {self.features} features."
                f" Rows must have shape [N, {self.features}]."
            )

    def _normalised(self, rows: Tensor) -> Tensor:
        normal = (rows - self.mean) / self.std.clamp(min=MIN_STD)
        normal = torch.where(torch.isfinite(rows), normal, 0.0)
        return normal.clamp(-MAX_NORMAL, MAX_NORMAL)

    def _novelty(self, rows: Tensor) -> Tensor:
        half_width = ((self.high - self.low) / 2.0).clamp(min=MIN_STD)
        distance = torch.maximum(self.low - rows, rows - self.high).clamp(min=0.0) / half_width
        return torch.where(torch.isfinite(rows), distance, MAX_DISTANCE).clamp(max=MAX_DISTANCE).sum(dim=1)

    # ---- the names of huggingface_hub's mixin ----

    def save_pretrained(self, save_directory: str | Path, *, config: Any = None, **hub_options: Any) -> None:
        """Writes the network into a folder, as ``policy_file.save_policy`` does.

        Args:
            save_directory: Folder to write to.
            config: What its card says, a ``PolicyCard`` or a dictionary of its fields. By default the card that it was
                loaded with, or one that says nothing but what the network is.
            hub_options: Refused; see ``autoprec.policies.hub``.
        """
        from autoprec.policies.policy_file import card_for, save_policy

        _refuse_hub_options("save_pretrained", hub_options)
        save_policy(save_directory, self, card_for(self, config))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **hub_options: Any) -> PolicyNetwork:
        """Reads a network from a folder, as ``policy_file.load_policy`` does. Nothing is downloaded.

        Args:
            pretrained_model_name_or_path: Folder that ``save_pretrained`` has written.
            hub_options: Refused, ``local_files_only`` excepted; see ``autoprec.policies.hub``.
        """
        from autoprec.policies.policy_file import load_policy

        hub_options.pop("local_files_only", None)
        _refuse_hub_options("from_pretrained", hub_options)
        return load_policy(pretrained_model_name_or_path)[0]


def _linear(inner: int, outer: int, gain: float, generator: torch.Generator) -> nn.Linear:
    # on the CPU and in float32 whatever the user's defaults are; the global generator is left alone
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inner, outer, device="cpu", dtype=torch.float32)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _plain(value: Tensor) -> NDArray[np.float32]:
    return np.asarray(value.detach().cpu().numpy())


def _refuse_hub_options(name: str, options: dict[str, Any]) -> None:
    wanted = sorted(option for option, value in options.items() if value)
    if wanted:
        raise TypeError(
            f"Passed `PolicyNetwork.{name}(...)` the options {wanted}. It works on local folders only."
            " `autoprec.policies.hub.HubPolicyNetwork` takes them; it needs huggingface_hub."
        )
