"""Small models, data and optimizers of the fault campaign."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, scaled_dot_product_attention
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from tests.small_fits import StatefulLoader, rows

ROWS, BATCH, WIDTH, TOKENS = 96, 8, 16, 16
BATCHES = ROWS // BATCH  # of an epoch


class Saboteur(Protocol):
    """Who may do something to a training step."""

    def on_batch(self, index: int, batch: Any) -> Any:
        """Returns what the step is given, ``None`` to leave it."""

    def on_loss(self, index: int, loss: Tensor) -> Tensor:
        """Returns the loss of the step."""


class Chaos(pl.LightningModule):
    """A module whose training steps pass through a saboteur, with a final loss in plain fp32."""

    def __init__(self, optimizer: str, has_schedule: bool, saboteur: Saboteur) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.has_schedule = has_schedule
        self.saboteur = saboteur
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index = self.trainer.fit_loop.epoch_loop.total_batch_idx
        batch = self.saboteur.on_batch(index, batch)
        if batch is None:
            return None
        loss = self.saboteur.on_loss(index, self.loss(batch))
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.scheduled(OPTIMIZERS[self.optimizer_name](self.parameters()))

    def scheduled(self, optimizer: Optimizer) -> Any:
        if not self.has_schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def final_loss(self) -> float:
        """Loss on all rows, without dropout, in the weights' own precision."""
        self.eval()
        with torch.no_grad():
            return float(self.loss(list(dataset_of(type(self)).tensors)))


class Regression(Chaos):
    """``net`` on rows of numbers."""

    net: nn.Module

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]).float(), batch[1].float())


class MLP(Regression):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.05), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )


class CNN(Regression):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 2),
        )


class LSTM(Regression):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rnn = nn.LSTM(2, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def loss(self, batch: Any) -> Tensor:
        states = self.rnn(batch[0].unflatten(1, (WIDTH // 2, 2)))[0]
        return mse_loss(self.head(states[:, -1]).float(), batch[1].float())


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(Chaos):
    """Predicts the next token; the head shares its weight with the embedding."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table, self.places = nn.Embedding(TOKENS, 16), nn.Embedding(8, 16)
        self.block, self.norm = Block(16, 2), nn.LayerNorm(16)
        self.head = nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def loss(self, batch: Any) -> Tensor:
        x = self.table(batch[0]) + self.places(torch.arange(8, device=batch[0].device))
        logits = self.head(self.norm(self.block(x)))
        return cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


class GAN(Chaos):
    """Two optimizers under manual optimization; noise is part of the rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        index = self.trainer.fit_loop.epoch_loop.total_batch_idx
        batch = self.saboteur.on_batch(index, batch)
        if batch is None:
            return
        optimizers: Any = self.optimizers()
        parts = (self.critic_loss, self.generator_loss)
        for optimizer, part in zip(optimizers, parts, strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.saboteur.on_loss(index, part(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(loss.detach()))
        for schedule in self.lr_schedulers() or () if self.has_schedule else ():  # type: ignore[union-attr]
            schedule.step()

    def critic_loss(self, batch: Any) -> Tensor:
        return judged(self.critic(batch[1]), 1.0) + judged(self.critic(self.generator(batch[0]).detach()), 0.0)

    def generator_loss(self, batch: Any) -> Tensor:
        return judged(self.critic(self.generator(batch[0])), 1.0)

    def loss(self, batch: Any) -> Tensor:
        """How far the moments of what is generated are from those of the data."""
        made, real = self.generator(batch[0]).float(), batch[1].float()
        return mse_loss(made.mean(0), real.mean(0)) + mse_loss(made.std(0), real.std(0))

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.optimizer_name]
        return [self.scheduled(make(part.parameters())) for part in (self.critic, self.generator)]

    def scheduled(self, optimizer: Optimizer) -> Any:
        made = super().scheduled(optimizer)
        return made if isinstance(made, dict) else {"optimizer": made}


def judged(logits: Tensor, target: float) -> Tensor:
    logits = logits.float()
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


class Lion(Optimizer):
    """A foreign optimizer, which kernels do not know (Chen et al. 2023)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.add_((0.9 * mean + 0.1 * parameter.grad).sign(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 0.01)
        return loss


class SAM(SGD):
    """Calls its closure a second time, at weights that it has moved (Foret et al. 2021)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [0.01 * p.grad for p in used]
        for parameter, move in zip(used, moves, strict=True):
            parameter.add_(move)
        with torch.enable_grad():
            closure()
        for parameter, move in zip(used, moves, strict=True):
            parameter.sub_(move)
        super().step()
        return loss


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.003),
    "foreign": lambda parameters: Lion(parameters, lr=0.003),
    "two closures": lambda parameters: SAM(parameters, lr=0.01, momentum=0.9),
}
MODELS: dict[str, type[Chaos]] = {"mlp": MLP, "cnn": CNN, "gpt": GPT, "lstm": LSTM, "gan": GAN}


def dataset_of(model: type[Chaos]) -> TensorDataset:
    """Rows of numbers with a linear target, or sequences that count upwards by steps of their own."""
    if model is not GPT:
        return rows(ROWS, WIDTH)
    generator = torch.Generator().manual_seed(1)
    start, stride = torch.randint(TOKENS, (2, ROWS, 1), generator=generator)
    tokens = (start + (1 + stride % 3) * torch.arange(9)) % TOKENS
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Batches(StatefulLoader):
    """Can go on in the middle of an epoch; ``order`` chooses the order of the rows."""

    def __init__(self, data: TensorDataset, order: int = 0) -> None:
        super().__init__(ROWS, BATCH)
        self.data = data
        self.epoch = 1000 * order  # every epoch has an order of its own


def loaders(model: type[Chaos], is_resumable: bool, order: int) -> tuple[Any, Any]:
    """The loaders of training and of validation."""
    data = dataset_of(model)
    validation = DataLoader(TensorDataset(*(tensor[:16] for tensor in data.tensors)), batch_size=BATCH)
    if is_resumable:
        return Batches(data, order), validation
    return DataLoader(data, batch_size=BATCH, shuffle=True), validation
