"""Casts under Triton's interpreter: bit for bit the reference. Delayed scaling, which needs no kernel.

Time budget: 40 s.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_ops_triton.py starts it under Triton's interpreter", allow_module_level=True)

from autoprec.formats import BF16, E4M3, E5M2, FP16, TF32, NumberFormat
from autoprec.ops import reference_casts, triton_casts
from autoprec.ops.reference_random import random_words, round_stochastic
from autoprec.ops.reference_scaling import DelayedScaling

# numpy, which carries out the interpreter's arithmetic, warns where a GPU goes on with inf and NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def bad_matrix() -> Tensor:
    x = torch.randn(20, 140)
    x[0] = 0.0
    x[3, 5], x[10, 130] = math.inf, math.nan
    return x


INPUTS = {
    "odd": torch.randn(37, 150, generator=torch.Generator().manual_seed(0)) * 10,
    "vector": torch.linspace(-3, 3, 300),
    "0-dim": torch.tensor(3.3),
    "empty": torch.zeros(0, 5),
    "no columns": torch.zeros(5, 0),
    "bf16": torch.linspace(-9, 9, 130 * 260).reshape(130, 260).bfloat16(),
    "fp16": torch.linspace(-9, 9, 5 * 7 * 33).reshape(5, 7, 33).half(),
    "long rows": torch.linspace(-2, 5, 2 * 5000).reshape(2, 5000),
    "transposed": torch.linspace(-2, 5, 800).reshape(40, 20).t(),
    "unaligned": torch.linspace(-2, 5, 801)[1:].view(20, 40),
    "subnormal": torch.full((4, 4), 1e-41),
    "bad": bad_matrix(),
}


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bit for bit, signs of zeros included, all NaN alike."""
    if a is None or b is None:
        return a is b
    a, b = a.float(), b.float()
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b)) | (a.isnan() & b.isnan())
    return a.shape == b.shape and bool(equal.all())


@pytest.mark.parametrize("seed", [None, 7], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("format_name", sorted(reference_casts.FORMATS))
def test_unscaled_cast_is_the_reference(format_name: str, seed: int | None) -> None:
    for name, x in INPUTS.items():
        for saturate in (True, False):
            options = {"saturate": saturate, "seed": seed, "offset": 3, "with_amax": True}
            actual = triton_casts.cast(x, format_name, **options)  # type: ignore[arg-type]
            expected = reference_casts.cast(x, format_name, **options)  # type: ignore[arg-type]
            assert actual.values.dtype == expected.values.dtype
            assert all(map(same, actual, expected)), (name, saturate)


@pytest.mark.parametrize("granularity", reference_casts.GRANULARITIES)
@pytest.mark.parametrize("format_name", reference_casts.SCALED)
def test_scaled_cast_is_the_reference_there_and_back(format_name: str, granularity: str) -> None:
    for name, x in INPUTS.items():
        for seed in (None, 2**63 + 5) if name in ("odd", "bad") else (None,):
            actual = triton_casts.cast(x, format_name, granularity=granularity, seed=seed, offset=2**40)
            expected = reference_casts.cast(x, format_name, granularity=granularity, seed=seed, offset=2**40)
            assert all(map(same, actual, expected)), (name, seed)
        back = triton_casts.restore(actual.values, actual.scale, granularity=granularity)
        assert same(back, reference_casts.restore(expected.values, expected.scale, granularity=granularity)), name


def test_rows_longer_than_a_tile_are_read_twice() -> None:
    x = torch.randn(2, triton_casts.CHUNK + 100)
    actual, expected = (module.cast(x, "e4m3", granularity="row") for module in (triton_casts, reference_casts))
    assert all(map(same, actual, expected))


def test_a_scale_known_beforehand_takes_one_pass_and_yields_the_amax() -> None:
    x = torch.randn(40, 50) * 100
    scale = torch.tensor(8.0)
    actual = triton_casts.cast(x, "e4m3", scale=scale, with_amax=True)
    assert same(actual.values, (x * 8).clamp(-448, 448).to(torch.float8_e4m3fn))
    assert float(actual.amax) == float(x.abs().max())  # type: ignore[arg-type]


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Passed `granularity='rows'`.*Did you mean 'row'"):
        triton_casts.cast(torch.randn(2, 2), "e4m3", granularity="rows")


def test_fake_cast_rounds_each_row_to_its_format() -> None:
    formats = [(8, 23, 0), (8, 7, 0), (5, 10, 0), (5, 2, 0), (4, 3, 0), (4, 3, 1), (2, 1, 0), (3, 4, 1), (8, 10, 0)]
    exponent, mantissa, finite = torch.tensor(formats).unbind(1)
    powers = torch.logspace(-40, 38, 500, dtype=torch.float64).float()
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 464.0, 465.0, 61440.0, 65520.0])
    patterns = torch.randint(-(2**31), 2**31 - 1, (400,)).int().view(torch.float32)
    x = torch.cat([torch.randn(500) * powers, patterns, special]).expand(len(formats), -1)
    actual = triton_casts.fake_cast(x, exponent, mantissa, finite.bool())
    expected = reference_casts.fake_cast(x, exponent, mantissa, finite.bool())
    for row, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert same(one, two), formats[row]
    assert triton_casts.fake_cast(torch.zeros(0, 3), exponent[:0], mantissa[:0], finite[:0]).shape == (0, 3)


# ---- random bits, in eager torch ----


def test_random_words_are_philox() -> None:
    """Known answers of Random123 for zero counters and keys, and for all ones."""
    zero = random_words(0, 0, torch.tensor([0, 16, 32, 48]))
    assert [hex(word) for word in zero.tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert len(set(random_words(1, 2, torch.arange(4096)).tolist())) > 4090
    assert not torch.equal(random_words(1, 2, torch.arange(64)), random_words(1, 3, torch.arange(64)))


@pytest.mark.parametrize("number_format", [BF16, FP16, E4M3, E5M2, TF32], ids=lambda f: f.name)
@given(value=st.floats(2.0**-20, 400.0))
@example(value=2.0**-11)
def test_stochastic_rounding_is_unbiased(number_format: NumberFormat, value: float) -> None:
    """The mean over n draws is within five standard errors; one draw has at most half a step of deviation."""
    n = 4096
    x = torch.full((n,), value)
    rounded = round_stochastic(x, number_format, random_words(11, 0, torch.arange(n)))
    step = max(2.0 ** math.floor(math.log2(value)), number_format.tiny) * number_format.eps
    assert abs(float(rounded.double().mean()) - float(x[0])) <= 5 * step / 2 / math.sqrt(n) + 2.0**-32
    assert rounded.unique().numel() <= 2


# ---- delayed scaling ----


def test_scale_follows_the_largest_amax_of_the_history() -> None:
    scaling = DelayedScaling([448.0, 57344.0], history_length=3, margin=1)
    assert scaling.scale.tolist() == [1.0, 1.0]
    seen = []
    for amax in (2.0, 8.0, 1.0, 1.0, 1.0, 1.0):
        scaling.record(0, torch.tensor(amax))
        scaling.advance()
        seen.append(448.0 / 2 / float(scaling.scale[0]))
    assert seen == [2.0, 8.0, 8.0, 8.0, 1.0, 1.0]
    assert float(scaling.scale[1]) == 1.0


def test_history_advances_once_for_a_step_whatever_was_recorded() -> None:
    """Recomputation and accumulation record the same tensor again; a NaN is no range."""
    scaling = DelayedScaling([448.0], history_length=2)
    for amax in (1.0, 4.0, 4.0, math.nan, math.inf, 2.0):
        scaling.record(0, torch.tensor(amax))
    scaling.advance()
    assert scaling.state_dict()["history"].flatten().tolist() == [0.0, 4.0]


@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_a_skipped_step_leaves_no_trace(skipped: int) -> None:
    plain, flagged = (DelayedScaling([448.0], history_length=4) for _ in range(2))
    for step in range(6):
        for scaling in (plain, flagged):
            scaling.record(0, torch.tensor(float(step + 1)))
        flagged.advance(torch.zeros(()))
        plain.advance()
        if step == 2:
            for _ in range(skipped):
                flagged.record(0, torch.tensor(100.0))
                flagged.advance(torch.ones(()))
    assert torch.equal(plain.scale, flagged.scale)
    assert torch.equal(plain.state_dict()["history"], flagged.state_dict()["history"])


def test_state_resumes_exactly() -> None:
    scaling = DelayedScaling([448.0, 448.0], history_length=3)
    for step in range(5):
        scaling.record(step % 2, torch.tensor(float(step + 1)))
        scaling.advance()
    resumed = DelayedScaling([448.0, 448.0], history_length=3)
    resumed.load_state_dict(scaling.state_dict())
    for one in (scaling, resumed):
        one.record(0, torch.tensor(0.5))
        one.advance()
    assert torch.equal(scaling.scale, resumed.scale)
    with pytest.raises(ValueError, match=r"history \[3, 2\]. This object keeps \[4, 2\]"):
        DelayedScaling([448.0, 448.0], history_length=4).load_state_dict(scaling.state_dict())
    with pytest.raises(ValueError, match="history_length=0"):
        DelayedScaling([1.0], history_length=0)
