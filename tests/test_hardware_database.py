"""The database's files: the shipped ones are right, a user's add and correct, broken ones say what is wrong.

Time budget: 10 s.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec import FORMATS, AutoPrecisionCallback
from autoprec.hardware import database, describe, native_formats, reload
from tests.hardware_rows import ROW, SOURCE, Pretend, example, folder, pretend
from tests.small_fits import Plain, loader, quiet

__all__ = ["folder", "pretend"]

FAMILIES = {
    *("x86", "arm", "volta", "turing", "ampere", "ada", "hopper", "blackwell"),
    *("cdna2", "cdna3", "rdna3", "xe", "apple"),
}
ADA: dict[str, Any] = {"device_type": "cuda", "capability": "8.9"}


def test_one_file_for_each_family(folder: Path) -> None:
    known = database.load()
    assert set(known.families) == FAMILIES == {path.stem for path in database.SHIPPED.glob("*.toml")}
    assert not known.problems


def test_every_number_has_a_document(folder: Path) -> None:
    known = database.load()
    for name, entries in known.entries.items():
        family = known.families[name]
        assert all(source.url for source in (*family.sources, *family.alignment_sources))
        assert bool(family.row.alignment) == bool(family.alignment_sources)
        for entry in entries:
            assert entry.sources, entry.row.name
            assert all(source.url and source.title for source in entry.sources), entry.row.name


def test_rows_are_of_one_name_and_one_pattern(folder: Path) -> None:
    for entries in database.load().entries.values():
        names = [entry.row.name for entry in entries]
        patterns = [pattern for entry in entries for pattern in entry.row.match]
        assert len(set(names)) == len(names)
        assert len(set(patterns)) == len(patterns)


def test_rates_rise_from_wide_to_narrow(folder: Path) -> None:
    """A slip of the pen, or a sparse figure beside dense ones, would stand out."""
    for entries in database.load().entries.values():
        for entry in entries:
            rates = {name: rate.tflops for name, rate in entry.row.formats.items() if rate.tflops}
            for wide, narrow, most in [
                ("fp32", "tf32", 16.0),
                ("tf32", "bf16", 2.05),
                ("bf16", "fp16", 1.0),
                ("fp16", "fp8", 2.05),
                ("fp16", "int8", 4.05),
            ]:
                if wide in rates and narrow in rates:
                    assert 1.0 <= rates[narrow] / rates[wide] <= most, (entry.row.name, wide, narrow)


def test_the_example_in_the_documentation_works(folder: Path, pretend: Pretend) -> None:
    (folder / "mine.toml").write_text(example())
    assert database.check(folder / "mine.toml") == []
    device = pretend(**ADA, name="NVIDIA GeForce RTX 4070 Ti SUPER", multiprocessors=66)
    assert device.row == ("GeForce RTX 4070 Ti SUPER",)
    assert device.formats["fp16"].tflops == 88.2
    assert device.formats["bf16"].tflops is None
    assert "fp8" not in device.native
    assert device.alignment["fp16"] == 64
    assert "my own measurements" in device.source
    volta = pretend(device_type="cuda", capability="7.0", name="Tesla V100-PCIE-16GB", multiprocessors=80)
    assert (volta.formats["fp32"].tflops, volta.formats["fp16"].tflops) == (13.1, 112)
    assert volta.memory_gb_per_s == 900
    assert "V100" in volta.source


def test_a_correction_keeps_what_it_leaves_out(folder: Path, pretend: Pretend) -> None:
    row = '[[device]]\nname = "geforce rtx 4090"\nfamily = "ada"\nmatch = ["*rtx 4090"]\nformats.fp16 = {{ {} }}\n'
    (folder / "a.toml").write_text("schema = 1\n" + row.format("tflops = 160"))
    (folder / "b.toml").write_text("schema = 1\n" + row.format("native = false"))
    device = pretend(**ADA, name="NVIDIA GeForce RTX 4090")
    fp16 = device.formats["fp16"]
    assert (fp16.tflops, fp16.other_tflops, fp16.is_native) == (160, {"fp16": 330.3}, False)
    assert device.formats["bf16"].tflops == 165.2
    assert "fp16" not in native_formats(torch.device("cuda", 0))


def test_a_family_of_the_users(folder: Path, pretend: Pretend) -> None:
    text = """
[family]
name = "future"
title = "Cards of the future"
device_type = "cuda"
capabilities = ["20.0"]
source = "mine"
formats.fp32 = { accumulate = "fp32" }
formats.fp8 = { accumulate = "fp32" }

[[device]]
name = "Future 1"
match = ["future 1"]
"""
    (folder / "future.toml").write_text(SOURCE + text)
    device = pretend(device_type="cuda", capability="20.0", name="Future 1")
    assert (device.family, device.native, device.row) == ("future", ("fp32", "fp8"), ("Future 1",))


def test_a_row_for_this_cpu_by_name_and_flags(folder: Path, pretend: Pretend) -> None:
    text = """
[[device]]
name = "My server"
family = "x86"
match = ["*epyc*"]
requires = ["avx512_f"]
memory_gb_per_s = 60
formats.fp32 = { tflops = 0.5 }
"""
    (folder / "server.toml").write_text("schema = 1\n" + text)
    facts: dict[str, Any] = {"device_type": "cpu", "capability": "x86_64", "name": "AMD EPYC 9654"}
    device = pretend(**facts, flags=frozenset({"avx2", "fma3", "avx512_f"}))
    assert device.row == ("AVX2", "AVX512", "My server")
    assert (device.formats["fp32"].tflops, device.memory_gb_per_s) == (0.5, 60)
    assert "My server" not in pretend(**facts, flags=frozenset({"avx2", "fma3"})).row


BROKEN = {
    'schema = 1\nname = "x"': (": field `name`: Is no table of this file.",),
    "schema = 2": (": field `schema`: Got 2. This version of autoprec reads `schema = 1`.",),
    "": (": field `schema`: Is missing. This version of autoprec reads `schema = 1`.",),
    "schema = ": (": Is not TOML: ",),
    "schema = 1\ndevice = 3": (": field `device`: Must be a list of tables: write [[device]]",),
    'schema = 1\n[device]\nname = "x"': (": field `device`: Must be a list of tables: write [[device]]",),
    "schema = 1\nsources = 3": (": field `sources`: Must hold tables",),
    "schema = 1\n[sources.mine]\nurl = 'ftp://x'": (
        ": [sources.mine], field `title`: Is missing.",
        ": [sources.mine], field `url`: Got 'ftp://x'. String should match pattern",
    ),
    "schema = 1\n[[device]]\nname = 3": (": device number 1, field `name`: Got 3. Input should be a valid string.",),
    SOURCE + ROW.replace("family", "famly"): (
        ": device 'Test Card 1', field `famly`: Is no field of this table. Known fields: ['alignment', 'family',",
        " Did you mean 'family'?",
    ),
    SOURCE + ROW.replace("ada", "adda"): (
        ": device 'Test Card 1', field `family`: Got 'adda'. Known families: ['ada', 'ampere', 'apple',",
        " Did you mean 'ada'?",
    ),
    SOURCE + ROW.replace('family = "ada"\n', ""): (": device 'Test Card 1', field `family`: Is missing. Known fam",),
    SOURCE + ROW.replace('"mine"', '"mien"'): (
        ": device 'Test Card 1', field `source`: Got 'mien', which is no source of this file. Known: ['mine'].",
        " Did you mean 'mine'?",
    ),
    SOURCE + ROW.replace('match = ["*test card 1"]\n', ""): (": device 'Test Card 1', field `match`: Is missing.",),
    SOURCE + ROW.replace("*test", "*Test"): (
        ": device 'Test Card 1', field `match`: Got '*Test card 1'. Patterns are compared with lower-case names: write",
    ),
    SOURCE + ROW.replace("bf16", "bf61"): (
        ": device 'Test Card 1', field `formats.bf61`: Passed `'bf61'` as a number format. Known formats: [",
        " Did you mean 'bf16'?",
    ),
    SOURCE + ROW.replace("tflops = 100", 'tflops = "100"'): (
        ": device 'Test Card 1', field `formats.bf16.tflops`: Got '100'. Input should be a valid number.",
    ),
    SOURCE + ROW.replace("tflops = 100", "tflops = -100"): (
        ": device 'Test Card 1', field `formats.bf16.tflops`: Got -100. Input should be greater than 0.",
    ),
    SOURCE + ROW.replace("tflops = 100", "tflops = nan"): (
        ": device 'Test Card 1', field `formats.bf16.tflops`: Got nan. Input should be",
    ),
    SOURCE + ROW.replace("tflops = 100", "tflop = 100"): (
        ": device 'Test Card 1', field `formats.bf16.tflop`: Is no field of this table. Known fields: ['accumulate',",
        " Did you mean 'tflops'?",
    ),
    SOURCE + ROW.replace("tflops = 100", 'accumulate = "fp64"'): (
        ": device 'Test Card 1', field `formats.bf16.accumulate`: Got 'fp64'. Input should be 'fp32', 'fp16'",
    ),
    SOURCE + '[family]\nname="x"\ntitle="X"\ndevice_type="cuda"\ncapabilities=["sm_99"]\nformats={}\nsource="mine"': (
        ": [family], field `capabilities`: Got 'sm_99', allowed are names like '8.9'.",
    ),
    SOURCE + '[family]\nname = "x"\ntitle = "X"\ndevice_type = "tpu"\nformats = {}\nsource = "you"': (
        ": [family], field `device_type`: Got 'tpu'. Input should be 'cpu', 'cuda', 'rocm', 'xpu' or 'mps'.",
    ),
    SOURCE + '[family]\nname = "x"\ntitle = "X"\ndevice_type = "xpu"\nformats = {}\nsource = "you"': (
        ": [family], field `source`: Got 'you', which is no source of this file. Known: ['mine'].",
    ),
}


@pytest.mark.parametrize("text", list(BROKEN))
def test_what_is_broken_is_named(folder: Path, text: str) -> None:
    path = folder / "broken.toml"
    path.write_text(text)
    said = "\n".join(map(str, database.check(path)))
    assert said.startswith(str(path))
    for part in BROKEN[text]:
        assert part in said
    assert len(database.check(path)) == max(1, sum(part.startswith(":") for part in BROKEN[text]))


_WORDS = [
    *("name", "family", "match", "requires", "formats", "alignment", "source", "tflops", "native", "other_tflops"),
    *("fp16", "bf16", "mine", "ada", "schema", "sources", "device", "title", "url", "capabilities", "device_type"),
]
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(device=st.lists(_values, max_size=3) | _values, family=_values, sources=_values)
def test_no_file_is_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Any, family: Any, sources: Any
) -> None:
    document = {"schema": 1, "device": device, "family": family, "sources": sources}
    problems: list[database.Problem] = []
    with monkeypatch.context() as patch:
        patch.setattr(database, "read_toml", lambda path: document)
        database._add(database.Database(problems=problems), tmp_path / "any.toml")
    assert all(str(problem) for problem in problems)


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    assert "Cannot be read: No such file or directory." in str(database.check(folder / "missing.toml")[0])
    (folder / "latin.toml").write_bytes(b"schema = 1 # \xe9")
    assert "Is not UTF-8 text." in str(database.check(folder / "latin.toml")[0])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no tomllib to stand in")
def test_python_310_reads_with_tomli(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomli", importlib.import_module("tomllib"))
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert set(database.load().families) == FAMILIES


def test_the_rest_of_a_broken_file_counts(folder: Path, pretend: Pretend) -> None:
    broken = ROW.replace("Card 1", "Card 2").replace("card 1", "card 2").replace("tflops = 100", "tflops = -1")
    (folder / "mine.toml").write_text(SOURCE + broken + ROW)
    with pytest.warns(UserWarning, match=r"mine\.toml: device 'Test Card 2', field `formats\.bf16\.tflops`: Got -1"):
        assert pretend(**ADA, name="Test Card 1").row == ("Test Card 1",)
    with pytest.warns(UserWarning, match="Test Card 2"):
        assert pretend(**ADA, name="Test Card 2").row == ()


def test_a_run_goes_on_without_a_broken_row_and_warns_once(folder: Path) -> None:
    path = folder / "mine.toml"
    path.write_text(SOURCE + ROW.replace("tflops = 100", "tflops = 0"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            callback = AutoPrecisionCallback("fixed:bf16", verbose=False)
            quiet(max_epochs=1, callbacks=[callback]).fit(Plain(), loader())
            assert callback.applied_steps > 0
    said = [str(each.message) for each in caught if "hardware files" in str(each.message)]
    assert said == [
        f"autoprec leaves out a part of your hardware files. {path}: device 'Test Card 1', field `formats.bf16.tflops`:"
        " Got 0. Input should be greater than 0."
    ]


def test_a_row_of_the_users_decides_what_a_run_may_use(folder: Path) -> None:
    """The formats that policies get come from the same database."""
    family = describe(torch.device("cpu")).family
    formats = "".join(f"formats.{name} = {{ native = false }}\n" for name in FORMATS if name != "fp32")
    row = f'[[device]]\nname = "This CPU"\nfamily = "{family}"\nmatch = ["*"]\n{formats}'
    (folder / "mine.toml").write_text(f"schema = 1\n{row}")
    reload()
    callback = AutoPrecisionCallback(interval=1, verbose=False)
    quiet(max_epochs=2, callbacks=[callback]).fit(Plain(), loader())
    assert native_formats(torch.device("cpu")) == ("fp32",)
    assert set(callback.precision_map().values()) == {"fp32"}


def test_a_folder_that_is_named_must_be_there(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(database.DIRECTORY_VARIABLE, str(tmp_path / "missing"))
    reload()
    (problem,) = database.load().problems
    assert re.search(r"missing: AUTOPREC_HARDWARE_DIR names it, and it is not a directory\.$", str(problem))
    monkeypatch.delenv(database.DIRECTORY_VARIABLE)
    reload()
    assert database.load().problems == []


def test_files_lie_below_the_configuration_folder_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretend: Pretend
) -> None:
    own = tmp_path / "config" / "hardware"
    own.mkdir(parents=True)
    monkeypatch.setattr("platformdirs.user_config_dir", lambda *names, **options: str(tmp_path / "config"))
    (own / "mine.toml").write_text(SOURCE + ROW)
    (folder / "mine.toml").write_text(SOURCE + ROW.replace("tflops = 100", "tflops = 90"))  # goes before
    device = pretend(**ADA, name="Test Card 1")
    assert (device.formats["fp32"].tflops, device.formats["bf16"].tflops) == (40, 90)
