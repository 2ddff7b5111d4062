"""Implementation choices against torch's own on one thread: ``python -m benchmarks.implementations``.

Forward and backward. Variants take turns; a ratio above 1 says how many times as fast the choice is. Errors are norms
relative to float64, choice / torch's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec import onednn
from autoprec.attention_product import attend
from autoprec.calibration.layer_runs import relative_error
from autoprec.layouts import find_containers, swapped
from benchmarks.timing import measure

Row = tuple[str, float, float, str]
_PRODUCTS = ((64, 128, 128), (64, 512, 512), (512, 512, 512), (512, 512, 2048), (512, 2048, 2048))
_CALLS = (
    (16, 2, 64),
    (16, 2, 128),
    (4, 4, 256),
    (2, 8, 256),
    (2, 4, 512),
    (1, 4, 1024),
)


def _pulled(run: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    output = run(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def _errors(chosen: Callable[..., Tensor], usual: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> str:
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = _pulled(usual, wide, grad.double())
    worst = [
        max(relative_error(one, truth) for one, truth in zip(_pulled(run, leaves, grad), exact, strict=True))
        for run in (chosen, usual)
    ]
    return f"{worst[0]:.1e} / {worst[1]:.1e}"


def linear_rows(rounds: int) -> Iterator[Row]:
    """Linear layers on oneDNN, by rows x inputs x outputs."""
    for rows, inputs, outputs in _PRODUCTS:
        leaves = [torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        grad = torch.randn(rows, outputs)
        variants: dict[str, Callable[[], object]] = {
            "default": lambda leaves=leaves, grad=grad: _pulled(F.linear, leaves, grad),  # type: ignore[misc]
            "onednn": lambda leaves=leaves, grad=grad: _pulled(onednn.linear, leaves, grad),  # type: ignore[misc]
        }
        timing = measure(variants, rounds=rounds)
        name = f"linear fp32 {rows}x{inputs}x{outputs}"
        yield (
            name,
            timing.median("default"),
            timing.ratio("default", "onednn"),
            _errors(onednn.linear, F.linear, leaves, grad),
        )


def attention_rows(rounds: int) -> Iterator[Row]:
    """Attention by products, by batch x heads x length; heads of 64."""
    for dtype in (torch.bfloat16, torch.float32):
        for batch, heads, length in _CALLS:
            for is_causal in (True, False):
                yield _attention_row(dtype, (batch, length, heads, 64), is_causal, rounds)


def _attention_row(dtype: torch.dtype, shape: tuple[int, ...], is_causal: bool, rounds: int) -> Row:
    leaves = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape).to(dtype).transpose(1, 2)

    def usual(*operands: Tensor) -> Tensor:
        fused: Any = F.scaled_dot_product_attention
        output: Tensor = fused(*operands, is_causal=is_causal)
        return output

    def chosen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, None, is_causal, query.shape[-1] ** -0.5)

    timing = measure(
        {"default": lambda: _pulled(usual, leaves, grad), "matmul": lambda: _pulled(chosen, leaves, grad)},
        rounds=rounds,
    )
    batch, length, heads, _ = shape
    name = f"attention {str(dtype)[6:]} {batch}x{heads}x{length}{' causal' if is_causal else ''}"
    return name, timing.median("default"), timing.ratio("default", "matmul"), _errors(chosen, usual, leaves, grad)


def conv_rows(rounds: int) -> Iterator[Row]:
    """A chain of four convolutions."""
    for dtype in (torch.float32, torch.bfloat16):
        layers = [
            layer
            for width in ((3, 32), (32, 32), (32, 64), (64, 64))
            for layer in (nn.Conv2d(*width, 3, padding=1), nn.BatchNorm2d(width[1]), nn.ReLU())
        ]
        model = nn.ModuleList([nn.Sequential(*layers)])
        containers = find_containers(model, lambda module: True, lambda module: None)
        images = torch.randn(32, 3, 32, 32)

        def step(model: nn.ModuleList = model, images: Tensor = images, dtype: torch.dtype = dtype) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = model[0](images).float().square().mean()
            loss.backward()

        def chosen(containers: Sequence[object] = containers, step: Callable[[], None] = step) -> None:
            with swapped(containers):  # type: ignore[arg-type]
                step()

        timing = measure({"default": step, "channels_last": chosen}, rounds=rounds)
        yield (
            f"chain of 4 conv {str(dtype)[6:]}",
            timing.median("default"),
            timing.ratio("default", "channels_last"),
            "",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of turns (default 9)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'what':<42} {'default ms':>10} {'times as fast':>14}  errors")
    for rows in (linear_rows, attention_rows, conv_rows):
        for name, seconds, ratio, errors in rows(rounds):
            print(f"{name:<42} {seconds * 1e3:>10.2f} {ratio:>14.2f}  {errors}", flush=True)


if __name__ == "__main__":
    main()
