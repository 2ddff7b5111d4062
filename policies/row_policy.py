"""The policy as stable-baselines3 trains it: one network for all rows, whose actor is the one that ships.

The actor is a ``PolicyNetwork``, normalisation and novelty included, so what is exported decides as what was trained.
The critic sees the same normalised features through layers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from autoprec.encoding import LIMIT
from autoprec.policies.network import MAX_NORMAL, MIN_STD, MOVES, PolicyNetwork
from autoprec.policies.policy_file import load_policy
from autoprec.policies.train_settings import SettingsError


class RowNetworks(nn.Module):
    """Actor and critic of a row, as ``mlp_extractor`` of stable-baselines3.

    Args:
        features: Columns of a row.
        hidden: Widths of the hidden layers of both.
    """

    def __init__(self, features: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.actor = PolicyNetwork(features, hidden)
        widths = (features, *hidden)
        pairs = zip(widths, hidden, strict=False)
        self.critic = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))
        self.latent_dim_pi, self.latent_dim_vf = len(MOVES), widths[-1]

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the actor and what the critic's last layer gets."""
        return self.forward_actor(rows), self.forward_critic(rows)

    def forward_actor(self, rows: Tensor) -> Tensor:
        """Returns logits ``[N, 3]``."""
        logits: Tensor = self.actor(rows)
        return logits

    def forward_critic(self, rows: Tensor) -> Tensor:
        """Returns ``[N, latent_dim_vf]``."""
        normal = (rows - self.actor.mean) / self.actor.std.clamp(min=MIN_STD)
        latent: Tensor = self.critic(normal.clamp(-MAX_NORMAL, MAX_NORMAL))
        return latent


class RowPolicy(ActorCriticPolicy):
    """An ``ActorCriticPolicy`` for rows of ``ProxyVecEnv``.

    It begins as "keep" everywhere: the head is zero but for the bias of keep.

    Args:
        observation_space: A ``Box`` of one row.
        action_space: ``Discrete(3)``.
        lr_schedule: Learning rate by the progress that remains.
        keep_bias: First logit of keep; the others have 0.
        options: Of ``ActorCriticPolicy``; ``net_arch`` is a list of widths.
    """

    mlp_extractor: RowNetworks  # type: ignore[assignment]

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        lr_schedule: Schedule,
        *,
        keep_bias: float = 0.5,
        **options: Any,
    ) -> None:
        self._keep_bias = keep_bias
        super().__init__(observation_space, action_space, lr_schedule, **options)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        actor = self.mlp_extractor.actor
        self.action_net = nn.Identity()  # the actor's own head makes the logits
        nn.init.zeros_(actor.head.weight)
        nn.init.zeros_(actor.head.bias)
        with torch.no_grad():
            actor.head.bias[MOVES.index(0)] = self._keep_bias
        make_optimizer: Any = self.optimizer_class
        self.optimizer = make_optimizer(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def _build_mlp_extractor(self) -> None:
        assert isinstance(self.net_arch, (list, tuple))
        self.mlp_extractor = RowNetworks(self.features_dim, [int(width) for width in self.net_arch])

    def extract_features(self, obs: Any, features_extractor: Any = None) -> Any:
        """Returns rows as they are: the networks normalise them."""
        return obs

    @property
    def network(self) -> PolicyNetwork:
        """The actor."""
        return self.mlp_extractor.actor

    def begin_with(self, folder: str) -> Tensor:
        """Takes over the actor of a policy, normalisation included, and returns its training range.

        Args:
            folder: Of the policy.

        Returns:
            ``[2, features]``: least and largest values.

        Raises:
            SettingsError: If there is none for this version, or its layers are of other widths.
        """
        try:
            found, _ = load_policy(folder)
        except (OSError, ValueError) as error:
            raise SettingsError(f"Passed `start={folder!r}`. {error}") from error
        if found.hidden != self.network.hidden:
            raise SettingsError(
                f"Passed `start={folder!r}`. Its hidden layers are {list(found.hidden)}, those of the settings"
                f" `net_arch={list(self.network.hidden)}`. They must agree."
            )
        self.network.load_state_dict(found.state_dict())
        self.network.low.fill_(-LIMIT)  # no row is new to what still learns
        self.network.high.fill_(LIMIT)
        return torch.stack([found.low, found.high])


def to_network(model: Any, low: Tensor | None = None, high: Tensor | None = None) -> PolicyNetwork:
    """Returns a copy of the trained actor, which decides as the model does on rows within the training range.

    Args:
        model: A ``PPO`` with a ``RowPolicy``, or the policy itself.
        low: Least value of each feature in training; by default every row is within the range.
        high: Largest values.
    """
    trained: PolicyNetwork = getattr(model, "policy", model).network
    copy = PolicyNetwork(trained.features, trained.hidden)
    copy.load_state_dict(trained.state_dict())
    if low is not None and high is not None:
        copy.set_training_range(low, high)
    return copy.eval()
