"""What a device is taken for, by what it says of itself. No test needs the device: ``probing.probe`` is replaced.

Time budget: 5 s.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autoprec import FORMATS
from autoprec.hardware import describe, devices, isa, native_formats, probing, reload
from autoprec.hardware.probing import Facts
from tests.hardware_rows import GPU, Pretend, folder, pretend

__all__ = ["folder", "pretend"]

CPU = torch.device("cpu")
ZEN = frozenset({"avx2", "fma3", "avx512_f", "avx512_vnni", "avx512_bf16"})
SAPPHIRE_RAPIDS = ZEN | {"avx512_fp16", "amx_bf16", "amx_int8"}


def test_this_cpu_is_described(folder: Path) -> None:
    device = describe(CPU)
    assert (device.device, device.family in ("x86", "arm")) == ("cpu", True)
    assert device.native == native_formats(CPU)
    assert device.native[0] == "fp32"
    assert device.memory_bytes is None or device.memory_bytes > 2**28
    assert device.sources
    assert CPU in devices()


def test_native_formats_agree_with_what_torch_says_of_the_cpu(folder: Path) -> None:
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    limited = any("MAX_CPU_ISA" in note for note in describe(CPU).notes)
    if describe(CPU).family == "x86" and not limited:
        assert ("bf16" in native_formats(CPU)) is has_bf16
        assert ("int8" in native_formats(CPU)) is torch.cpu._is_vnni_supported()


def test_a_description_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    probe = probing.probe

    def counted(device: torch.device) -> Facts:
        asked.append(device)
        return probe(device)

    monkeypatch.setattr(probing, "probe", counted)
    for _ in range(3):
        native_formats(CPU)
        describe(CPU)
    assert asked == [CPU]
    reload()
    describe(CPU)
    assert asked == [CPU, CPU]


def test_a_description_is_plain_data(folder: Path) -> None:
    device = describe(CPU)
    assert pickle.loads(pickle.dumps(device)) == device
    assert json.loads(json.dumps(device.to_dict()))["formats"]["fp32"]["is_native"] is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.name = "another"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("capability", "family", "native"),
    [
        ("6.1", "unknown", ("fp32",)),
        ("7.0", "volta", ("fp32", "fp16")),
        ("7.5", "turing", ("fp32", "fp16")),
        ("8.0", "ampere", ("fp32", "tf32", "bf16", "fp16", "int8")),
        ("8.6", "ampere", ("fp32", "tf32", "bf16", "fp16", "int8")),
        ("8.9", "ada", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")),
        ("9.0", "hopper", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")),
        ("10.0", "blackwell", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")),
        ("12.0", "blackwell", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")),
    ],
)
def test_nvidia_by_capability(pretend: Pretend, capability: str, family: str, native: tuple[str, ...]) -> None:
    device = pretend(device_type="cuda", name="NVIDIA Something", capability=capability)
    assert (device.family, device.native) == (family, native)
    assert native_formats(GPU) == native
    assert all(rate.tflops is None for rate in device.formats.values())
    assert device.notes


@pytest.mark.parametrize(
    ("capability", "family", "native"),
    [
        ("gfx90a", "cdna2", ("fp32", "bf16", "fp16")),
        ("gfx942", "cdna3", ("fp32", "bf16", "fp16")),
        ("gfx1100", "rdna3", ("fp32", "bf16", "fp16")),
        ("gfx1030", "unknown", ("fp32", "fp16")),
        ("gfx908", "unknown", ("fp32", "fp16")),
    ],
)
def test_amd_by_gfx_name(pretend: Pretend, capability: str, family: str, native: tuple[str, ...]) -> None:
    device = pretend(device_type="rocm", name="AMD Something", capability=capability)
    assert (device.family, device.native) == (family, native)


@pytest.mark.parametrize(
    ("device_type", "capability", "family", "closest"),
    [
        ("cuda", "13.0", "blackwell", "(12.1)"),
        ("cuda", "8.8", "ampere", "(8.7)"),
        ("rocm", "gfx950", "cdna3", "(gfx942)"),
        ("rocm", "gfx1201", "rdna3", "(gfx1103)"),
    ],
)
def test_a_device_of_tomorrow_is_taken_as_the_closest_family_and_says_so(
    pretend: Pretend, device_type: str, capability: str, family: str, closest: str
) -> None:
    device = pretend(device_type=device_type, name="Card of tomorrow", capability=capability)
    assert device.family == family
    assert any(note.startswith(f"{capability} is not in the database") and closest in note for note in device.notes)


@pytest.mark.parametrize("capability", ["", "unheard of", "9", "gfx"])
def test_a_strange_capability_is_no_crash(pretend: Pretend, capability: str) -> None:
    device = pretend(device_type="cuda", name="?", capability=capability)
    assert (device.family, device.native) == ("unknown", ("fp32",))
    assert "The database has no family for cuda" in device.notes[0]


@pytest.mark.parametrize("name", ["meta", "hpu", "xla"])
def test_a_kind_of_device_that_is_not_known_computes_fp32(folder: Path, name: str) -> None:
    assert native_formats(torch.device(name)) == ("fp32",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device")
def test_a_device_that_is_not_there_is_no_crash(folder: Path) -> None:
    device = describe(torch.device("cuda", 3))
    assert device.native == ("fp32",)
    assert any("does not answer" in note for note in device.notes)


def test_rates_depend_on_what_products_are_summed_in(pretend: Pretend) -> None:
    device = pretend(device_type="cuda", name="NVIDIA GeForce RTX 4090", capability="8.9", multiprocessors=128)
    fp16 = device.formats["fp16"]
    assert (fp16.tflops, fp16.accumulate, fp16.other_tflops) == (165.2, "fp32", {"fp16": 330.3})
    assert device.memory_gb_per_s == 1008
    assert device.alignment["fp8"] == 16
    assert "Ada GPU Architecture whitepaper" in device.source
    assert not device.notes
    assert device.ratio("fp16") == pytest.approx(2.0)
    assert device.ratio("fp8", over="bf16") == pytest.approx(330.3 / 165.2)
    assert device.ratio("fp4") is None


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA GeForce RTX 4080", "GeForce RTX 4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "GeForce RTX 4080 SUPER"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4070 Ti", None),
    ],
)
def test_names_that_begin_alike_are_different_cards(pretend: Pretend, name: str, row: str | None) -> None:
    device = pretend(device_type="cuda", name=name, capability="8.9")
    assert device.row == ((row,) if row else ())


@pytest.mark.parametrize(
    ("capability", "name", "row"),
    [
        ("9.0", "NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("9.0", "NVIDIA H100 PCIe", "H100 PCIe"),
        ("9.0", "NVIDIA H100 NVL", "H100 NVL"),
        ("9.0", "NVIDIA H200", "H200 SXM"),
        ("9.0", "NVIDIA H200 NVL", "H200 NVL"),
        ("9.0", "NVIDIA GH200 480GB", "GH200 96GB"),
        ("8.0", "NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("8.0", "NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("8.6", "NVIDIA A10", "A10"),
        ("8.6", "NVIDIA A10G", "A10G"),
        ("7.0", "Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("7.5", "Tesla T4", "T4"),
        ("10.0", "NVIDIA B200", "B200"),
        ("10.0", "NVIDIA GB200", "GB200"),
        ("10.3", "NVIDIA B300 SXM6 AC", "B300"),
        ("12.0", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("12.1", "NVIDIA GB10", "GB10"),
    ],
)
def test_names_as_drivers_write_them(pretend: Pretend, capability: str, name: str, row: str) -> None:
    assert pretend(device_type="cuda", name=name, capability=capability).row == (row,)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "Quadro RTX 6000 with Max-Q Design"])
def test_a_laptop_card_has_no_rates_of_the_desktop_card(pretend: Pretend, name: str) -> None:
    device = pretend(device_type="cuda", name=name, capability="8.9", multiprocessors=76)
    assert device.row == ()
    assert {rate.tflops for rate in device.formats.values()} == {None}
    assert device.notes[0].startswith("Laptop cards run at clocks that their makers choose")


def test_a_mig_slice_is_a_share_of_its_card(pretend: Pretend) -> None:
    whole = pretend(
        device_type="cuda",
        name="NVIDIA A100-SXM4-40GB",
        capability="8.0",
        multiprocessors=108,
        memory_bytes=42_000_000_000,
    )
    part = pretend(
        device_type="cuda",
        name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        capability="8.0",
        multiprocessors=14,
        memory_bytes=5_000_000_000,
    )
    assert whole.row == part.row == ("A100 SXM4 40GB",)
    assert whole.formats["bf16"].tflops == 312
    assert part.formats["bf16"].tflops == pytest.approx(312 * 14 / 108, abs=0.01)
    assert part.memory_gb_per_s == pytest.approx(1555 / 8, abs=0.1)
    assert part.memory_bytes == 5_000_000_000
    assert not whole.notes
    assert part.notes[0].startswith("A slice: 14 of 108 multiprocessors")


def test_a_compute_partition_is_a_share_of_its_card(pretend: Pretend) -> None:
    device = pretend(device_type="rocm", name="AMD Instinct MI300X", capability="gfx942", multiprocessors=38)
    assert device.formats["bf16"].tflops == pytest.approx(1307.4 / 8, abs=0.01)


def test_what_a_device_has_and_autoprec_does_not_use_is_emulated_with_the_reason(pretend: Pretend) -> None:
    device = pretend(device_type="rocm", name="AMD Instinct MI300X", capability="gfx942", multiprocessors=304)
    fp8 = device.formats["fp8"]
    assert (fp8.tflops, fp8.is_native) == (2614.9, False)
    assert "e4m3fnuz" in str(fp8.note)


@pytest.mark.parametrize(
    ("flags", "native", "bf16_rate"),
    [
        (frozenset({"avx2", "fma3"}), ("fp32",), None),
        (frozenset({"avx2", "fma3", "avx512_f"}), ("fp32",), None),
        (frozenset({"avx2", "fma3", "avx512_f", "avx512_vnni"}), ("fp32", "int8"), None),
        (ZEN, ("fp32", "bf16", "int8"), 128),
        (SAPPHIRE_RAPIDS, ("fp32", "bf16", "int8"), 1024),
        (SAPPHIRE_RAPIDS | {"amx_fp16"}, ("fp32", "bf16", "int8"), 1024),
    ],
)
def test_x86_by_instruction_sets(
    pretend: Pretend, flags: frozenset[str], native: tuple[str, ...], bf16_rate: float | None
) -> None:
    device = pretend(device_type="cpu", name="A CPU", capability="x86_64", flags=flags)
    assert device.native == native
    assert getattr(device.formats.get("bf16"), "flops_per_cycle", None) == bf16_rate
    assert not device.notes


def test_rates_of_a_cpu_need_its_clock(pretend: Pretend) -> None:
    facts = {"device_type": "cpu", "name": "A CPU", "capability": "x86_64", "flags": ZEN, "cores": 8}
    assert pretend(**facts).formats["fp32"].tflops is None
    device = pretend(**facts, ghz=4.0)
    assert device.formats["fp32"].tflops == pytest.approx(64 * 8 * 4 / 1000, abs=0.01)
    assert device.ratio("bf16") == pytest.approx(2.0)


def test_arm_by_features(pretend: Pretend) -> None:
    facts = {"device_type": "cpu", "name": "Neoverse-V1", "capability": "aarch64"}
    assert pretend(**facts, flags=frozenset({"neon"})).native == ("fp32",)
    device = pretend(**facts, flags=frozenset({"neon", "bf16", "i8mm", "sve", "sve_bf16"}))
    assert (device.native, device.family) == (("fp32", "bf16"), "arm")


def test_apple_and_intel(pretend: Pretend) -> None:
    apple = pretend(device_type="mps", name="Apple M4 Pro")
    assert (apple.native, apple.memory_gb_per_s, apple.row) == (("fp32", "fp16"), 273, ("Apple M4 Pro",))
    arc = pretend(device_type="xpu", name="Intel(R) Arc(TM) B580 Graphics", flags=frozenset({"xmx"}))
    assert (arc.native, arc.formats["int8"].tflops) == (("fp32", "bf16", "fp16"), 233)
    small = pretend(device_type="xpu", name="Intel(R) Iris(R) Xe Graphics")
    assert (small.native, small.row) == (("fp32", "fp16"), ())


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({}, ZEN),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, ZEN - {"avx512_vnni", "avx512_bf16"}),
        ({"DNNL_MAX_CPU_ISA": "avx512_core"}, ZEN - {"avx512_vnni", "avx512_bf16"}),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, ZEN - {"avx512_bf16"}),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, ZEN),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, ZEN),
        ({"ONEDNN_MAX_CPU_ISA": "no such level"}, ZEN),  # oneDNN ignores it as well
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "DNNL_MAX_CPU_ISA": "AVX2"}, ZEN),  # the first counts
        ({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, ZEN - {"avx512_f"}),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, ZEN),
    ],
)
def test_limits_in_the_environment(variables: dict[str, str], left: frozenset[str]) -> None:
    flags, notes = isa.limit(ZEN, variables)
    assert flags == left
    is_limited = left != ZEN or "ATEN_CPU_CAPABILITY" in variables
    assert len(notes) == int(is_limited)
    assert not notes or notes[0].startswith(next(iter(variables)))


def test_a_limit_makes_formats_emulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "cpu_flags", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(probing, "_machine", lambda: "x86_64")
    assert describe(CPU).native == ("fp32", "bf16", "int8")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    reload()
    device = describe(CPU)
    assert device.native == ("fp32",)
    assert device.formats["fp32"].flops_per_cycle == 64
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in device.notes[0]


def test_without_onednn_a_cpu_computes_fp32_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "cpu_flags", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    device = describe(CPU)
    assert device.native == ("fp32",)
    assert "without oneDNN" in device.notes[-1]


def test_older_torch_says_it_in_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    for name in ("avx2", "avx512", "vnni", "avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: True, raising=False)
    assert isa.cpu_flags() == ZEN | {"amx_bf16", "amx_int8"}


def test_flags_of_arm_come_from_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd bf16 svebf16 crc32\n")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    for name in ("avx2", "avx512", "vnni", "avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(isa, "_CPUINFO", tmp_path / "cpuinfo")
    assert isa.cpu_flags() == {"neon", "bf16", "sve_bf16"}
    monkeypatch.setattr(isa, "_CPUINFO", tmp_path / "missing")
    assert isa.cpu_flags() == set()


def test_what_torch_says_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="Card", major=9, minor=0, gcnArchName="gfx942:sramecc+:xnack-", total_memory=80, multi_processor_count=7
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert probing.probe(GPU) == Facts(
        device_type="cuda", name="Card", capability="9.0", memory_bytes=80, multiprocessors=7
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert probing.probe(GPU) == Facts(
        device_type="rocm", name="Card", capability="gfx942", memory_bytes=80, multiprocessors=7
    )
    xpu = SimpleNamespace(
        name="Arc", total_memory=12, max_compute_units=160, has_subgroup_matrix_multiply_accumulate=True
    )
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: xpu)
    assert probing.probe(torch.device("xpu", 0)) == Facts(
        device_type="xpu", name="Arc", memory_bytes=12, multiprocessors=160, flags=frozenset({"xmx"})
    )


def test_formats_stand_from_wide_to_narrow(pretend: Pretend) -> None:
    device = pretend(device_type="cuda", name="NVIDIA H200", capability="9.0", multiprocessors=132)
    assert list(device.formats) == [name for name in FORMATS if name in device.formats]
