"""The model zoo: tiny models of many families, each with data and a way to ask for its loss.

What must hold for them is in ``zoo_check.py``. Everything is built offline from configurations with random weights.
Labels are random: the zoo shows that training runs, not that it learns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import boring_classes, lstm, transformer
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_data import (
    BATCH,
    VOCAB,
    Batches,
    Draw,
    boring_batches,
    draw_image,
    draw_masked_text,
    draw_speech,
    draw_text,
    draw_translation,
    loader,
    wikitext_batches,
    wikitext_sequences,
)

Probe = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class ZooModel:
    """One entry of the zoo.

    ``probe(module, batch)`` is the loss of one batch without a trainer, ``trainer`` holds extra Trainer arguments and
    ``requires`` names modules without which the entry is skipped.
    """

    name: str
    build: Callable[[], LightningModule]
    batches: Batches
    probe: Probe
    trainer: Mapping[str, Any] = field(default_factory=dict)
    requires: Sequence[str] = ()


class TransformersModule(LightningModule):
    """A model of the transformers library, trained on the loss that it returns itself."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Classifier(LightningModule):
    """Any network that maps an image to class scores, with SGD and a step schedule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["pixel_values"]), batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batchnorm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Seq2Seq(LightningModule):
    """``torch.nn.Transformer`` with one embedding table for both sides and a tied output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.transformer = nn.Transformer(32, 2, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        target = batch["labels"]
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1) - 1)
        source, shifted = self.embedding(batch["input_ids"]), self.embedding(target[:, :-1])
        output = self.transformer(source, shifted, tgt_mask=causal, tgt_is_causal=True)
        return F.cross_entropy(self.head(output).flatten(0, 1), target[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.loss(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class CarriedLSTM(LightningModule):
    """A recurrent language model whose hidden state goes from one batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, VOCAB)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def loss(self, batch: dict[str, Tensor], hidden: tuple[Tensor, Tensor] | None = None) -> Tensor:
        ids = batch["input_ids"]
        output, self.hidden = self.lstm(self.embedding(ids[:, :-1]), hidden)
        output, _ = self.gru(output)
        return F.cross_entropy(self.head(output).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        carried = None if self.hidden is None else (self.hidden[0].detach(), self.hidden[1].detach())
        return self.loss(batch, carried)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


class GAN(LightningModule):
    """Two networks and two optimizers with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(8, 64),
            nn.Unflatten(1, (4, 4, 4)),
            nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, stride=4),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * 8 * 8, 1)
        )

    def adversarial(self, images: Tensor, real: bool) -> Tensor:
        score = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.adversarial(batch["pixel_values"], True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        first, second = optimizers
        fake = self.generator(torch.randn(BATCH, 8, device=self.device))
        loss_discriminator = self.loss(batch) + self.adversarial(fake.detach(), False)
        first.zero_grad()
        self.manual_backward(loss_discriminator)
        first.step()

        self.toggle_optimizer(second)
        loss_generator = self.adversarial(fake, True)
        second.zero_grad()
        self.manual_backward(loss_generator)
        second.step()
        self.untoggle_optimizer(second)
        return {"loss": loss_discriminator.detach() + loss_generator.detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
            torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        ]


class DemoTransformer(transformer.LightningTransformer):
    """The demo without its download."""

    def prepare_data(self) -> None:
        """Text is written by ``wikitext``."""


class DemoLSTM(lstm.LightningLSTM):
    """The demo without its download, and with a smaller network."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.model = lstm.SimpleLSTM(vocab_size, ninp=32, nhid=32, nlayers=2)

    def prepare_data(self) -> None:
        """Text is written by ``wikitext``."""


def huggingface(model: str, config: str, options: dict[str, Any]) -> Callable[[], LightningModule]:
    """Builds a model class of transformers with random weights from its configuration class."""

    def build() -> LightningModule:
        library = importlib.import_module("transformers")
        return TransformersModule(getattr(library, model)(getattr(library, config)(**options)))

    return build


def timm(name: str) -> Callable[[], LightningModule]:
    def build() -> LightningModule:
        return Classifier(importlib.import_module("timm").create_model(name, pretrained=False, num_classes=10))

    return build


def _loss(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.loss(batch)
    return loss


def _boring_loss(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.step(batch)
    return loss


def _demo_loss(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module(batch).sum()
    return loss


def _transformer_loss(module: Any, batch: Any) -> Tensor:
    return F.nll_loss(module(*batch), batch[1].view(-1))


def _lstm_loss(module: Any, batch: Any) -> Tensor:
    output, _ = module.model(batch[0], module.model.init_hidden(batch[0].size(0)))
    return F.nll_loss(output, batch[1].view(-1))


_TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
_ATTENTION = {**_TEXT, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
_WHISPER = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
_WHISPER_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_WHISPER_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
_WHISPER_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_IMAGE = {"image_size": 32, "num_labels": 10}
_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
_SWIN = {"patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
_CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1}
_EFFICIENTNET = {"width_coefficient": 0.25, "hidden_dim": 320, "kernel_sizes": [3, 5], "in_channels": [16, 16]}
_EFFICIENTNET_BLOCKS = {"out_channels": [16, 24], "strides": [1, 2], "num_block_repeats": [1, 2]}
# the usual stride of 32 and dropout of 0.8 leave numbers that are too noisy to compare formats
_MOBILENET = {"depth_multiplier": 0.35, "output_stride": 8, "classifier_dropout_prob": 0.2}

_TRANSFORMERS: tuple[tuple[str, str, Draw, dict[str, Any]], ...] = (
    ("GPT2LMHeadModel", "GPT2", draw_text, {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    ("BertForMaskedLM", "Bert", draw_masked_text, _ATTENTION),
    ("T5ForConditionalGeneration", "T5", draw_translation, {"vocab_size": VOCAB, **_T5}),
    ("LlamaForCausalLM", "Llama", draw_text, {**_ATTENTION, "num_key_value_heads": 1}),
    ("MambaForCausalLM", "Mamba", draw_text, {**_TEXT, "state_size": 8}),
    (
        "WhisperForConditionalGeneration",
        "Whisper",
        draw_speech,
        {"vocab_size": VOCAB, **_WHISPER, **_WHISPER_LAYERS, **_WHISPER_HEADS, **_WHISPER_TOKENS},
    ),
    (
        "ResNetForImageClassification",
        "ResNet",
        draw_image,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 10},
    ),
    ("ConvNextForImageClassification", "ConvNext", draw_image, {**_IMAGE, **_CONVNEXT}),
    ("ViTForImageClassification", "ViT", draw_image, {**_IMAGE, **_VIT}),
    ("SwinForImageClassification", "Swin", draw_image, {**_IMAGE, **_SWIN}),
    ("MobileNetV2ForImageClassification", "MobileNetV2", draw_image, {**_IMAGE, **_MOBILENET}),
    (
        "EfficientNetForImageClassification",
        "EfficientNet",
        draw_image,
        {**_IMAGE, **_EFFICIENTNET, **_EFFICIENTNET_BLOCKS, "expand_ratios": [1, 4]},
    ),
)


def _transformers_entries() -> list[ZooModel]:
    return [
        ZooModel(
            family.lower(),
            huggingface(model, f"{family}Config", options),
            loader(draw),
            _loss,
            requires=("transformers",),
        )
        for model, family, draw, options in _TRANSFORMERS
    ]


def _torch_entries() -> list[ZooModel]:
    image = loader(draw_image)
    vision = ("torchvision", "timm")
    return [
        ZooModel("nn_transformer", Seq2Seq, loader(draw_translation), _loss, {"gradient_clip_val": 1.0}),
        ZooModel("gan", GAN, image, _loss),
        ZooModel("batchnorm_cnn", lambda: Classifier(batchnorm_cnn()), image, _loss, {"accumulate_grad_batches": 2}),
        ZooModel("carried_lstm", CarriedLSTM, loader(draw_text), _loss),
        ZooModel("timm_resnet", timm("test_resnet"), image, _loss, requires=vision),
        ZooModel("timm_vit", timm("test_vit"), image, _loss, requires=vision),
    ]


def _demo_entries() -> list[ZooModel]:
    return [
        ZooModel("boring", boring_classes.BoringModel, boring_batches(False), _boring_loss),
        ZooModel("boring_manual", boring_classes.ManualOptimBoringModel, boring_batches(True), _boring_loss),
        ZooModel("demo", boring_classes.DemoModel, boring_batches(True), _demo_loss),
        ZooModel("demo_transformer", lambda: DemoTransformer(VOCAB), wikitext_batches, _transformer_loss),
        ZooModel("demo_lstm", lambda: DemoLSTM(VOCAB), wikitext_sequences, _lstm_loss, {"gradient_clip_val": 0.25}),
    ]


ZOO: dict[str, ZooModel] = {
    entry.name: entry for entry in (*_demo_entries(), *_torch_entries(), *_transformers_entries())
}


def missing_module(entry: ZooModel) -> str | None:
    """The reason why an entry cannot run here, or None."""
    for name in entry.requires:
        try:
            importlib.import_module(name)
        # torchvision beside another build of torch fails with RuntimeError: its operators are missing
        except (ImportError, RuntimeError) as error:
            return f"`import {name}` fails ({error})"
    return None
