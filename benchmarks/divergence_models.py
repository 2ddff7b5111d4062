"""Modules of the divergence study: ten small ones, each written as somebody might write it who trains in fp32.

Nothing here knows about precision. What each one runs into in 16 bits stands in ``divergence_recipes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Study(pl.LightningModule):
    """A module with one loss and one optimizer.

    Args:
        make_optimizer: Makes the optimizer from the parameters.
        schedule: Factor on the learning rate by optimizer step.
    """

    def __init__(self, make_optimizer: MakeOptimizer, schedule: Callable[[int], float] | None = None) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.schedule = schedule

    def loss(self, batch: Any) -> Tensor:
        """The loss of one batch."""
        raise NotImplementedError

    def held_out_loss(self, batch: Any) -> Tensor:
        """What a run is judged by; the loss unless a recipe says otherwise."""
        return self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss of one batch."""
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs what a run is judged by, in the Trainer's precision."""
        self.log("val_loss", self.held_out_loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        """The optimizer, with the schedule if there is one."""
        optimizer = self.make_optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self.schedule), "interval": "step"},
        }


class Perceptron(Study):
    """A classifier of 64 pixels.

    Args:
        widths: Sizes of the hidden layers.
        activation: Makes the layer after each hidden one.
        is_normed: Whether a LayerNorm stands before the last layer.
        weight: Factor on the training loss.
        options: Those of :class:`Study`.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (32, 32),
        activation: Callable[[], nn.Module] = nn.ReLU,
        is_normed: bool = False,
        weight: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.weight = weight
        sizes = (64, *widths)
        hidden = [(nn.Linear(a, b), activation()) for a, b in zip(sizes, widths, strict=False)]
        norm = [nn.LayerNorm(sizes[-1])] if is_normed else []
        layers = (layer for pair in hidden for layer in pair)
        self.net = nn.Sequential(nn.Flatten(), *layers, *norm, nn.Linear(sizes[-1], 10))

    def loss(self, batch: Any) -> Tensor:
        """Cross entropy times ``weight``."""
        return self.weight * self.held_out_loss(batch)

    def held_out_loss(self, batch: Any) -> Tensor:
        """Mean cross entropy."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)


class SquaredReLU(nn.Module):
    """The square of what is positive."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``relu(x) ** 2``."""
        return F.relu(x).square()


class Prototypes(Study):
    """Classifies by the distance to prototypes in grey levels.

    Args:
        pixels: First prototypes, ``[10, 64]``.
        temperature: What logits are divided by.
        options: Those of :class:`Study`.
    """

    def __init__(self, pixels: Tensor, temperature: float = 20_000.0, **options: Any) -> None:
        super().__init__(**options)
        self.temperature = temperature
        self.products = nn.Linear(64, 10, bias=False)
        with torch.no_grad():
            self.products.weight.copy_(pixels)

    def loss(self, batch: Any) -> Tensor:
        """Cross entropy of minus half the squared distances, without what all ten have in common."""
        images, labels = batch
        lengths = self.products.weight.square().sum(1)
        logits = (self.products(images.flatten(1)) - lengths / 2) / self.temperature
        return F.cross_entropy(logits, labels)


class ConvNet(Study):
    """Two convolutions with BatchNorm on 8 x 8 images."""

    def __init__(self, width: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.Flatten()),
        )
        self.head = nn.Linear(8 * width, 10)

    def loss(self, batch: Any) -> Tensor:
        """Mean cross entropy."""
        images, labels = batch
        return F.cross_entropy(self.head(self.features(images)), labels)


class MaskedAttention(Study):
    """One causal attention over bytes; what is padded is masked with a constant, as a whole row if need be.

    Args:
        width: Size of an embedding.
        context: Bytes in a line.
        options: Those of :class:`Study`.
    """

    PADDING = 128

    def __init__(self, width: int = 16, context: int = 24, **options: Any) -> None:
        super().__init__(**options)
        self.embed, self.position = nn.Embedding(129, width), nn.Embedding(context, width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, 129)
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps bytes ``[batch, time]`` below 128, or ``PADDING``, to logits ``[batch, time, 129]``."""
        length = tokens.shape[1]
        x = self.embed(tokens) + self.position.weight[:length]
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        is_seen = self.causal[:length, :length] & (tokens != self.PADDING).unsqueeze(1)  # type: ignore[index]
        scores = scores + (~is_seen).to(scores.dtype) * -1e9
        logits: Tensor = self.head(x + self.project(scores.softmax(-1).to(value.dtype) @ value))
        return logits

    def loss(self, batch: Any) -> Tensor:
        """Mean cross entropy of the next byte, padding left out."""
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=self.PADDING)


class Recurrent(Study):
    """A hand-written ReLU recurrence over the rows of an image; its first weights are ``torch.randn``'s.

    Weights of ``1 / sqrt(width)`` would keep the size of the state. These multiply it by about ``sqrt(width / 2)`` with
    each row.

    Args:
        width: Size of the state.
        options: Those of :class:`Study`.
    """

    def __init__(self, width: int = 64, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        self.read, self.recur = nn.Linear(8, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        nn.init.normal_(self.recur.weight)

    def loss(self, batch: Any) -> Tensor:
        """Mean cross entropy of the last state."""
        images, labels = batch
        state = images.new_zeros(len(images), self.width)
        for row in images.flatten(1).split(8, dim=1):
            state = F.relu(self.read(row) + self.recur(state))
        return F.cross_entropy(self.head(self.norm(state)), labels)


class MatchingGAN(Study):
    """A GAN whose generator matches second moments of the critic's features (as McGAN does), with two optimizers.

    Args:
        noise: Size of the generator's input.
        width: Size of hidden layers.
        grey: Largest grey level.
        options: Those of :class:`Study`.
    """

    def __init__(self, noise: int = 8, width: int = 32, grey: float = 4095.0, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.grey = grey
        self.generator = nn.Sequential(nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())
        self.features = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2))
        self.critic = nn.Linear(width, 1)

    def imagine(self, z: Tensor) -> Tensor:
        """Maps noise ``[batch, noise]`` to grey levels ``[batch, 64]``."""
        images: Tensor = self.generator(z) * self.grey
        return images

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One step of the critic, then one of the generator."""
        images, z = batch
        real, fake = images.flatten(1), self.imagine(z)
        optimizers: Any = self.optimizers()
        of_critic, of_generator = optimizers
        scores = self.critic(self.features(real)), self.critic(self.features(fake.detach()))
        self._step(of_critic, F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean())
        apart = self._moments(real) - self._moments(fake)
        self._step(of_generator, (apart / self.grey**2).square().sum())

    def _moments(self, images: Tensor) -> Tensor:
        features = self.features(images)
        moments: Tensor = features.T @ features / len(images)
        return moments

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def held_out_loss(self, batch: Any) -> Tensor:
        """Mean squared distance of the pixels' means, in units of their variance over real images."""
        images, z = batch
        real, fake = images.flatten(1).float(), self.imagine(z).float()
        apart: Tensor = (real.mean(0) - fake.mean(0)).square().mean() / real.var(0).mean()
        return apart

    def configure_optimizers(self) -> Any:
        """One optimizer for the critic with its features, one for the generator."""
        critic = [*self.features.parameters(), *self.critic.parameters()]
        return [self.make_optimizer(critic), self.make_optimizer(self.generator.parameters())]
