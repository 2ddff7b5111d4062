"""Profiles of real devices: what follows from the database's rates, and how tasks come to run on them.

Time budget: 5 s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from autoprec import hardware
from autoprec.envs.devices import DEVICES, LAYER_WIDTHS, profile_from, profile_of
from autoprec.envs.engine import FORMATS
from autoprec.envs.profiles import PROFILES
from autoprec.envs.proxies import Bank, Distribution, draw_task
from autoprec.hardware import Device, FormatRate
from autoprec.hardware.database import DIRECTORY_VARIABLE

WIDE = 4096


def device(**rates: FormatRate) -> Device:
    return Device(device="cuda:0", name="made up", family="none", formats=rates, memory_gb_per_s=1000.0)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_is_known_to_the_database_and_has_a_complete_profile(name: str) -> None:
    for width in LAYER_WIDTHS:
        profile = profile_of(name, width)
        assert profile.name == name
        assert profile.cost["fp32"] == 1.0
        assert all(0.02 < cost < 2.5 for cost in profile.costs())
        assert 0.0 < profile.overhead.low < profile.overhead.high < 3.0


def test_kinds_of_hardware_keep_their_names() -> None:
    assert profile_of("bf16-only") is PROFILES["bf16-only"]
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        profile_of("h10")


@pytest.mark.parametrize(
    ("name", "cheaper", "no_cheaper"),
    [
        ("h100", ("bf16", "fp16", "fp8"), ()),
        ("a100", ("bf16", "fp16", "int8"), ("fp8",)),
        ("v100", ("fp16",), ("bf16", "fp8", "int8")),
        ("t4", ("fp16",), ("bf16", "fp8", "int8")),
        ("mi300x", ("bf16", "fp16"), ("fp8", "int8")),
        ("cpu-avx2", (), ("bf16", "fp16", "fp8", "int8")),
        ("cpu-avx512", ("int8",), ("bf16", "fp16", "fp8")),
        ("cpu-avx512-bf16", ("bf16", "int8"), ("fp16",)),
        ("cpu-amx", ("bf16", "int8"), ("fp16",)),
    ],
)
def test_what_a_device_computes_itself_pays(name: str, cheaper: tuple[str, ...], no_cheaper: tuple[str, ...]) -> None:
    cost = profile_of(name, WIDE).cost
    assert all(cost[format_name] < 0.7 for format_name in cheaper)
    widest = min(cost["fp32"], cost["bf16"])  # what narrow formats are computed in where they are not native
    assert all(cost[format_name] > widest for format_name in no_cheaper if format_name != "bf16")
    assert cost["bf16"] > 1.0 or "bf16" not in no_cheaper


def test_small_layers_pay_more_for_casts_and_for_kernels() -> None:
    small, large = profile_of("h100", 512), profile_of("h100", WIDE)
    assert small.cost["fp8"] > small.cost["bf16"]
    assert large.cost["fp8"] < large.cost["bf16"]
    assert small.cost["fp8"] > small.cost["fp8-unscaled"]  # looking for the amax
    assert small.overhead.low > 2.0 * large.overhead.low
    assert small.cast_cost > large.cast_cost


def test_a_layer_bound_by_arithmetic_costs_what_rates_say() -> None:
    rates = {"fp32": FormatRate(tflops=0.1), "bf16": FormatRate(tflops=0.4), "fp8": FormatRate(tflops=0.8)}
    cost = profile_from(device(**rates), name="slow", width=WIDE).cost
    assert cost["bf16"] == pytest.approx(0.25, rel=0.02)
    assert cost["fp8"] == pytest.approx(0.125, rel=0.02)
    assert cost["int8"] == pytest.approx(0.25, rel=0.02)  # no rate: computed in bf16
    assert cost["fp16"] == pytest.approx(1.0, rel=0.02)
    emulated = profile_from(device(**{**rates, "fp8": replace(rates["fp8"], is_native=False)}), name="x", width=WIDE)
    assert emulated.cost["fp8"] == pytest.approx(0.25, rel=0.02)
    with_tf32 = profile_from(device(**rates, tf32=FormatRate(tflops=0.4)), name="x", width=WIDE)
    assert with_tf32.cost["bf16"] == pytest.approx(1.0, rel=0.02)


def test_a_layer_bound_by_memory_costs_its_traffic() -> None:
    rates = {"fp32": FormatRate(tflops=1e6), "bf16": FormatRate(tflops=2e6), "fp8": FormatRate(tflops=4e6)}
    cost = profile_from(device(**rates), name="fast", width=WIDE).cost
    assert 0.5 < cost["bf16"] < 0.7
    assert cost["fp8"] > cost["bf16"]


@pytest.mark.parametrize(
    "broken", [device(), replace(device(fp32=FormatRate(tflops=1.0)), memory_gb_per_s=None)], ids=["rate", "bandwidth"]
)
def test_a_device_without_the_numbers_is_named(broken: Device) -> None:
    with pytest.raises(ValueError, match="'made up'. Its row in the database must state"):
        profile_from(broken, name="x")


def test_files_of_the_user_change_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = '[[device]]\nname = "H100 SXM"\nfamily = "hopper"\nmatch = ["*h100 80gb hbm3"]\nmemory_gb_per_s = 1\n'
    (tmp_path / "own.toml").write_text(f"schema = 1\n{row}", encoding="utf-8")
    before = profile_of("h100")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    hardware.reload()
    profile_of.cache_clear()
    assert profile_of("h100") == before
    monkeypatch.undo()
    hardware.reload()


def test_tasks_run_on_kinds_of_hardware_and_on_devices() -> None:
    tasks = list(Bank("train", 200))
    on_devices = [task.profile in DEVICES for task in tasks]
    assert 0.4 < np.mean(on_devices) < 0.6
    assert {task.profile for task in tasks} == {*DEVICES, *PROFILES}


def test_a_distribution_can_be_moved_to_one_device() -> None:
    base = Distribution()
    for name in ("a100", "bf16-only"):
        moved = base.on(name)
        assert {task.profile for task in Bank("test", 5, moved)} == {name}
        assert moved.digest() != base.digest()
    same, other = (draw_task(3, base.on(name)) for name in ("a100", "nothing-pays"))
    assert same.spec.tobytes() == other.spec.tobytes()  # what is trained does not depend on what it runs on
    assert (same.cost[:, FORMATS.index("bf16")] < other.cost[:, FORMATS.index("bf16")]).all()
    with pytest.raises(ValueError, match="Profiles are"):
        base.on("z80")
    with pytest.raises(ValidationError, match="layer_widths"):
        Distribution(layer_widths=())
    with pytest.raises(ValidationError, match="Choose at least one of"):
        Distribution(devices=("z80",))


def test_the_digest_knows_the_numbers_of_the_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Distribution().digest()
    monkeypatch.setitem(PROFILES, "bf16-only", PROFILES["bf16-only"].model_copy(update={"jitter": 0.3}))
    profile_of.cache_clear()
    assert Distribution().digest() != before
    monkeypatch.undo()
    profile_of.cache_clear()
    assert Distribution().digest() == before
