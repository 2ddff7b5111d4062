"""Checks every GPU kernel against the reference or float64 and times it against torch; one table, under four minutes.

Exits with 0 if every check holds, 1 if one fails, 2 without a GPU. `--interpret` runs the checks, not the timings,
under Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# run as a file, this one finds its own folder only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.gpu_timings import ADAM, Row, scales, time_casts, time_matmuls, time_steps, time_torchao

SMALL = [(70, 33), (64,), (5000,), (48, 96), (1,), (0,), (257, 64), ()]
COPY_FORMATS = ["int8", "bf16", "fp16", "e4m3", None, "bf16", "int8", "e4m3"]


def grads_of(shapes: Sequence[tuple[int, ...]], device: str) -> list[Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [torch.randn(s, device=device).to(dtypes[i % 3]) for i, s in enumerate(shapes)]


def worst_relative(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest deviation relative to each tensor's largest entry."""
    pairs = [(a.double(), e.double()) for a, e in zip(actual, expected, strict=True) if a.numel()]
    return max(float((a - e).abs().max() / e.abs().max().clamp(min=1e-30)) for a, e in pairs)


def count_different(actual: Tensor | None, expected: Tensor | None) -> int:
    """Entries that differ in a bit, all NaN alike."""
    if actual is None or expected is None:
        return int(actual is not expected)
    a, e = actual.float(), expected.float()
    return int((~((a == e) & (torch.signbit(a) == torch.signbit(e)) | (a.isnan() & e.isnan()))).sum())


def check_statistics(device: str) -> Iterator[Row]:
    from autoprec.ops import statistics, triton_statistics

    grads = [*grads_of(SMALL, device), torch.tensor([3.0, math.inf, math.nan, 1e-42], device=device)]
    limits = [0.1] * len(grads)
    actual, expected = triton_statistics.grad_stats(grads, limits), statistics.grad_stats(grads, limits)
    wrong = sum(
        count_different(getattr(actual, name), getattr(expected, name))
        for name in ("amax", "nonfinite_count", "underflow_fraction")
    )
    yield Row("grad_stats: amax, counts, fractions", wrong == 0, f"{wrong} differ")
    exact = torch.stack([grad.double().norm() for grad in grads[:-1]])
    error = worst_relative([actual.norm[:-1]], [exact])
    yield Row("grad_stats: norms against float64", error < 1e-6, f"{error:.1e}")
    factor, found_inf = triton_statistics.grad_factor(torch.tensor(8.0, device=device), None, 2.0)
    error = abs(float(factor) * 4 - 1)
    yield Row("grad_factor", error < 1e-6 and not float(found_inf), f"{error:.1e}")


class Model:
    """Parameters with everything that a step reads and writes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str, moment: torch.dtype = torch.float32) -> None:
        from autoprec.ops import new_copy

        self.params = [torch.randn(s, device=device) for s in shapes]
        self.grads = grads_of(shapes, device)
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p, dtype=moment) for p in self.params]
        self.steps = [torch.zeros((), device=device) for _ in shapes]
        formats = (COPY_FORMATS * len(shapes))[: len(shapes)]
        self.copies = [
            None if name is None or not p.ndim else new_copy(p, name)
            for name, p in zip(formats, self.params, strict=True)
        ]

    def adam(self, module: Any, **options: Any) -> None:
        """One step with the module's implementation."""
        copies = options.pop("copies", None)
        step = module.PreparedAdam(self.params, self.exp_avgs, self.exp_avg_sqs, self.steps, copies)
        step(self.grads, **{**ADAM, **options})

    def written(self) -> list[Tensor]:
        """Everything that a step writes."""
        values = [one.values for one in self.copies if one is not None]
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *self.steps, *values]


def on_cpu(model: Model) -> Model:
    """A twin with the same numbers on the host."""
    twin = Model(SMALL, "cpu", model.exp_avg_sqs[0].dtype)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps"):
        setattr(twin, name, [tensor.cpu().clone() for tensor in getattr(model, name)])
    return twin


def check_steps(device: str) -> Iterator[Row]:
    from autoprec.ops import copies, cpu_steps, native, reference_prepared, triton_optimizers

    for moment in (torch.float32, torch.bfloat16, torch.float16):
        model = Model(SMALL, device, moment)
        other = copy.deepcopy(model)
        for step in range(2):
            options = {"offset": step, "found_inf": torch.zeros((), device=device)}
            model.adam(triton_optimizers, copies=model.copies, **options)
            other.adam(reference_prepared, **options)
        bound = 5e-7 if moment is torch.float32 else 0.02
        error = worst_relative(model.params, other.params)
        yield Row(f"AdamW, {str(moment)[6:]} second moment", error < bound, f"{error:.1e}")
        expected = copy.deepcopy(model.copies)
        copies.write_copies(model.params, expected)
        wrong = sum(
            count_different(getattr(a, part), getattr(e, part))
            for a, e in zip(model.copies, expected, strict=True)
            if a is not None and e is not None
            for part in ("values", "scale", "transposed_values", "transposed_scale")
        )
        yield Row("  its weight copies", wrong == 0, f"{wrong} differ")
    if native.missing() is None:
        twin = on_cpu(model)
        for module, one in ((triton_optimizers, model), (cpu_steps, twin)):
            one.adam(module, copies=one.copies, seed=3, grad_factor=0.3)
        wrong = sum(map(count_different, (t.cpu() for t in model.written()), twin.written()))
        yield Row("AdamW against the C kernel", wrong == 0, f"{wrong} differ")
    before = copy.deepcopy(model)
    model.adam(triton_optimizers, found_inf=torch.ones((), device=device), copies=model.copies)
    changed = sum(map(count_different, model.written(), before.written()))
    yield Row("AdamW with found_inf writes nothing", changed == 0, f"{changed} changed")
    model = Model(SMALL, device)
    other = copy.deepcopy(model)
    for step in range(2):
        for module, one in ((triton_optimizers, model), (reference_prepared, other)):
            options = {"momentum": 0.9, "nesterov": True, "is_first": step == 0, "weight_decay": 0.1}
            module.PreparedSgd(one.params, one.exp_avgs)(one.grads, lr=0.1, **options)
    error = worst_relative(model.params, other.params)
    yield Row("SGD, nesterov", error < 5e-7, f"{error:.1e}")


def check_staleness(device: str) -> Iterator[Row]:
    from autoprec.ops import reference_prepared, triton_optimizers

    model = Model(SMALL, device)
    modules = (triton_optimizers, reference_prepared)
    ours, theirs = (module.PreparedSgd(model.params, copies=model.copies) for module in modules)
    ours.refresh()
    found = [ours.stale(samples, 0) for samples in (4, 100, -1)]
    yield Row("copies as they were written are current", found == [None] * 3, str(found))
    wrong = 0
    for param in model.params:
        param.view(-1)[::2] *= 1.5
        wrong += sum(ours.stale(2, seed) != theirs.stale(2, seed) for seed in range(3))
        ours.refresh()
    yield Row("stale copies are those of the reference", wrong == 0, f"{wrong} differ")


def check_casts(device: str) -> Iterator[Row]:
    from autoprec.ops import reference_casts, triton_casts

    patterns = torch.randint(-(2**31), 2**31 - 1, (64, 260), device=device).int().view(torch.float32)
    x = torch.cat([torch.randn(130, 260, device=device) * 100, patterns])
    for format_name in reference_casts.FORMATS:
        is_scaled = format_name in reference_casts.SCALED
        wrong = 0
        # each combination is a kernel to compile, which is what this check spends its time on
        for granularity in (None, *reference_casts.GRANULARITIES) if is_scaled else (None,):
            for source, seed in ((x[:150, :33].bfloat16(), None), (x, 5), (x, None)):
                options: dict[str, Any] = {"granularity": granularity, "seed": seed, "with_amax": True}
                actual = triton_casts.cast(source, format_name, **options)
                expected = reference_casts.cast(source, format_name, **options)
                wrong += sum(map(count_different, actual, expected))
            back = triton_casts.restore(actual.values, actual.scale, granularity=granularity)
            exact = reference_casts.restore(expected.values, expected.scale, granularity=granularity)
            wrong += count_different(back, exact)
        yield Row(f"cast to {format_name} and back", wrong == 0, f"{wrong} differ")
    bits = torch.tensor([[8, 23, 0], [8, 7, 0], [5, 10, 0], [5, 2, 0], [4, 3, 1], [3, 2, 0]], device=device).t()
    rows = patterns[:6]
    arguments = (rows, bits[0], bits[1], bits[2].bool())
    wrong = count_different(triton_casts.fake_cast(*arguments), reference_casts.fake_cast(*arguments))
    yield Row("fake_cast", wrong == 0, f"{wrong} differ")


def check_matmuls(device: str) -> Iterator[Row]:
    from autoprec.ops import reference, triton_casts, triton_matmul

    rows, cols, inner = (300, 272, 1040) if device == "cuda" else (70, 144, 272)
    a = torch.randn(rows, inner, device=device) * torch.logspace(-3, 3, rows, device=device)[:, None]
    b = torch.randn(cols, inner, device=device)
    for name in ("e4m3", "e5m2"):
        a_cast = triton_casts.cast(a, name, granularity="1x128")
        b_cast = triton_casts.cast(b, "e4m3", granularity="128x128")
        y = triton_matmul.block_scaled_matmul(a_cast.values, b_cast.values, *scales(a_cast, b_cast))
        exact_a = triton_casts.restore(a_cast.values, a_cast.scale, granularity="1x128").double()
        exact_b = triton_casts.restore(b_cast.values, b_cast.scale, granularity="128x128").double()
        yield product_row(f"matmul {name} 1x128 x e4m3 128x128", y, exact_a, exact_b)
    a_cast, b_cast = (triton_casts.cast(x, "int8", granularity="row") for x in (a, b))
    y = triton_matmul.scaled_int8_matmul(a_cast.values, b_cast.values, *scales(a_cast, b_cast))
    exact_a, exact_b = (triton_casts.restore(c.values, c.scale, granularity="row").double() for c in (a_cast, b_cast))
    yield product_row("matmul int8 rows", y, exact_a, exact_b)
    if device == "cuda" and not reference.is_fp8_native(torch.device(device)):
        yield Row("torch's scaled fp8 matmul", None, "this GPU has no fp8 units")
        return
    for granularity in ("tensor", "row"):
        a_cast, b_cast = (triton_casts.cast(x[:256], "e4m3", granularity=granularity) for x in (a, b))
        y = triton_matmul.scaled_matmul(a_cast.values, b_cast.values, *scales(a_cast, b_cast))
        exact_a, exact_b = (
            triton_casts.restore(c.values, c.scale, granularity=granularity).double() for c in (a_cast, b_cast)
        )
        yield product_row(f"torch's scaled fp8 matmul, {granularity}", y, exact_a, exact_b, slack=2.0**-10)


def product_row(name: str, y: Tensor, a: Tensor, b: Tensor, slack: float = 2.0**-13) -> Row:
    """Error beyond the rounding to bfloat16, relative to the sum of the products' magnitudes.

    ``slack`` allows for what fp8 units lose within 128 products (about 14 bits on sm_90).
    """
    exact = a @ b.t()
    error = ((y.double() - exact).abs() - 2.0**-8 * exact.abs()).clamp(min=0) / (a.abs() @ b.abs().t()).clamp(min=1e-30)
    return Row(name, float(error.max()) < slack, f"{float(error.max()):.1e}")


def check_no_wait() -> Iterator[Row]:
    """A step from gradients to copies in torch's mode that raises where the host waits for the device."""
    from autoprec.ops import triton_optimizers, triton_statistics

    model = Model(SMALL[:4], "cuda")
    lists = (model.params, model.exp_avgs, model.exp_avg_sqs, model.steps, model.copies)
    step, inv_scale = triton_optimizers.PreparedAdam(*lists), torch.ones((), device="cuda")

    def run() -> None:
        stats = triton_statistics.grad_stats(model.grads)
        factor, found_inf = triton_statistics.grad_factor(stats.total_norm, inv_scale, 1.0)
        step(model.grads, **ADAM, grad_factor=factor, found_inf=found_inf)  # type: ignore[arg-type]

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        waited = ""
    except RuntimeError as error:
        waited = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield Row("a step without waiting for the device", not waited, waited or "none")


def check_large() -> Iterator[Row]:
    """A tensor of more than 2**31 entries, where the last one is the only one that is not zero."""
    from autoprec.ops import triton_casts, triton_statistics

    if torch.cuda.mem_get_info()[0] < 16 << 30:
        yield Row("more than 2**31 entries", None, "needs 16 GB of free memory")
        return
    x = torch.zeros(2**31 + 4096 + 3, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    amax = float(triton_statistics.grad_stats([x]).amax)
    last = float(triton_casts.cast(x, "e4m3", granularity="tensor").values[-1].float())
    yield Row("more than 2**31 entries", (amax, last) == (3.0, 448.0), f"amax {amax}, last {last}")


def rows_of(part: Callable[..., Iterator[Row]], *arguments: str) -> Iterator[Row]:
    """The rows of one part; one that raises is a row as well, and the other parts still run."""
    try:
        yield from part(*arguments)
    except Exception as error:
        yield Row(part.__name__, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="checks only, under Triton's interpreter on a CPU")
    parser.add_argument("--no-timings", action="store_true", help="checks only")
    options = parser.parse_args(arguments)
    if not options.interpret and not torch.cuda.is_available():
        print("gpu_check: there is no GPU here. `--interpret` runs the checks on a CPU.")
        return 2
    if options.interpret:
        # read when Triton is imported, which nothing has done so far
        os.environ["TRITON_INTERPRET"] = "1"
    device = "cpu" if options.interpret else "cuda"
    torch.manual_seed(0)
    name = "the interpreter" if options.interpret else torch.cuda.get_device_name()
    start = time.perf_counter()
    rows: list[Row] = []
    for check in (check_statistics, check_steps, check_staleness, check_casts, check_matmuls):
        rows += rows_of(check, device)
    if device == "cuda":
        parts = [check_no_wait, check_large]
        if not options.no_timings:
            parts += [time_steps, time_casts, time_matmuls, time_torchao]
        for part in parts:
            rows += rows_of(part)
    words = {True: "ok", False: "FAILED", None: ""}
    for row in rows:
        print(f"{row.name:<52} {words[row.is_good]:<7} {row.detail}")
    failed = sum(row.is_good is False for row in rows)
    checked = sum(row.is_good is not None for row in rows)
    seconds = time.perf_counter() - start
    print(f"gpu_check: device={name!r} checks={checked} failed={failed} seconds={seconds:.0f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
