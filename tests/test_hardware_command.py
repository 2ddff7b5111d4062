"""``autoprec hardware`` in this process.

Time budget: 10 s.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import cli
from autoprec.hardware import describe, probing, reload
from autoprec.hardware.probing import Facts
from tests.hardware_rows import ROW, SOURCE, folder

__all__ = ["folder"]


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["hardware", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_shows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    device = describe(torch.device("cpu"))
    assert re.search(rf"^cpu +{re.escape(device.name)}$", out, re.MULTILINE)
    assert re.search(r"fp32 +native", out)
    for name in ("tf32", "fp8"):
        assert re.search(rf"{name} +emulated", out)
    assert max(map(len, out.splitlines())) <= 80


def test_shows_a_card_with_rates_and_documents(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts(device_type="cuda", name="NVIDIA GeForce RTX 4090", capability="8.9", memory_bytes=25_000_000_000)
    monkeypatch.setattr("autoprec.commands.hardware.devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(probing, "probe", lambda device: facts)
    code, out, _ = call(capsys)
    assert code == 0
    assert "cuda:0  NVIDIA GeForce RTX 4090" in out
    assert "25.0 GB, 1008 GB/s" in out
    assert re.search(r"fp16 +native +165\.2 +fp32 +8 +330\.3 summed in fp16", out)
    assert "https://images.nvidia.com" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("words", [(), ("--all",), ("--family", "hopper"), ("--recommend", "fine-tuning")])
def test_json_is_whole(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, _ = call(capsys, *words, "--json")
    assert code == 0
    data: list[dict[str, Any]] = json.loads(out)
    keys = {(): "native", "--all": "devices", "--family": "devices", "--recommend": "by_kind"}
    assert all(("formats" in each) or keys[words[0]] in each for each in data)
    if words[:1] == ("--all",):
        assert {"hopper", "x86", "apple"} <= {each["name"] for each in data}
    if words[:1] == ("--family",):
        (h200,) = [row for row in data[0]["devices"] if row["name"] == "H200 SXM"]
        assert h200["formats"]["bf16"]["tflops"] == 989.5
        assert h200["sources"][0]["url"].startswith("https://")


def test_lists_the_database(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--all")
    assert code == 0
    assert re.search(r"H100 SXM +80 +3350 +66\.9 +494\.7 +989\.4 +989\.4 +1979 +1979", out)
    assert "AVX512-BF16" in out
    assert max(map(len, out.splitlines())) <= 80


def test_shows_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--family", "cdna3")
    assert code == 0
    assert "gfx942" in out
    assert "e4m3fnuz" in out
    assert "AMD Instinct MI300X data sheet" in out
    assert "hopper" not in out


def test_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--recommend", "training-small", "--bound", "compute")
    assert code == 0
    assert re.search(r"norm +fp32", out)
    assert "limited by  compute" in out
    native = describe(torch.device("cpu")).native
    assert ('AutoPrecisionConfig(formats=("fp32",))' in out) is ("tf32" not in native)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--family", "hoper"), "Known families: ada, ampere"),
        (("--recommend", "inferense"), "Did you mean 'inference'?"),
        (("--all", "--family", "ada"), "--all and --family do not go together"),
        (("--bound", "compute"), "together with --recommend"),
        (("--recommend", "inference", "--bound", "speed"), "compute or memory"),
    ],
)
def test_bad_words_end_with_code_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert said in re.sub(r"[│\s]+", " ", err)


def test_checks_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_text(SOURCE + ROW)
    assert call(capsys, "--check", str(path)) == (0, f"{path}: every row is right.\n", "")
    path.write_text(SOURCE + ROW.replace("tflops = 100", "tflops = 'fast'").replace("ada", "adda"))
    code, out, err = call(capsys, "--check", str(path))
    assert (code, out) == (1, "")
    assert err == (
        f"{path}: device 'Test Card 1', field `formats.bf16.tflops`: Got 'fast'. Input should be a valid number.\n"
    )
    code, out, _ = call(capsys, "--check", str(path), "--json")
    assert code == 1
    assert [(each["row"], each["field"]) for each in json.loads(out)] == [
        ("device 'Test Card 1'", "formats.bf16.tflops")
    ]
    code, _, err = call(capsys, "--check", str(tmp_path / "missing.toml"))
    assert code == 1
    assert "Cannot be read: No such file or directory." in err


def test_says_what_was_left_out_of_the_users_files(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "mine.toml").write_text("schema = 3")
    reload()
    code, out, err = call(capsys)
    assert code == 0
    assert re.search(r"fp32 +native", out)
    assert err.startswith(f"left out: {folder / 'mine.toml'}: field `schema`: Got 3.")


def test_names_the_folders(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = call(capsys, "--folders")
    assert code == 0
    assert out.splitlines()[-1] == str(folder)
    assert len(out.splitlines()) == 2


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "autoprec hardware --check my_card.toml" in out
    assert "training-large" in out
