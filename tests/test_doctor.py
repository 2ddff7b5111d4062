"""What `autoprec doctor` says of a machine, and what it advises.

Time budget: 10 s.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import cli
from autoprec.calibration.cache import Cache, key_of
from autoprec.calibration.layer_runs import Measured
from autoprec.commands import diagnosis, extras
from autoprec.commands.doctor import lines_of

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    found = diagnosis.diagnose()
    found["threads"]["torch"] = 1
    found["environment"] = {}
    found["lightning"]["packages"] = ["lightning"]
    found["kernels"]["why_missing"] = None
    for each in found["caches"].values():
        each["is_writable"] = True
    found["devices"] = [{**found["devices"][0], "native": ["fp32", "bf16"]}]
    return {key: value for key, value in found.items() if key != "advice"}


def test_tells_native_from_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for line in (
        r"autoprec +\d+\.\d+\.\d+, Python 3",
        r"versions +torch \d.*lightning \d",
        r"processor .*cores",
        r"device +cpu: ",
        r"  native +fp32",
        r"  emulated .*fp16",
        r"kernels +cpu: ",
        r"  chosen +(cpu|reference)",
        r"cache +calibration: .*writable",
        r"extra +cli: installed",
        r"extra +rl: (installed|missing)",  # docs/environments.md needs it
        r"extra +sweep: (installed|missing)",
        r"lightning +packages lightning",
        r"advice ",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE), line


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        *("versions", "system", "threads", "devices", "kernels", "caches", "environment", "extras", "lightning"),
        "advice",
    }
    assert found["versions"]["torch"] == torch.__version__
    assert any("cpu: " in line for line in lines_of(found))


def test_knows_every_extra_and_names_the_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (CHECKOUT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    named = set(re.findall(r"^(\w+) = \[", section, flags=re.MULTILINE)) - {"all", "dev"}
    assert set(extras.EXTRAS) == named
    monkeypatch.setitem(extras.EXTRAS, "cli", ("typer", "no_such_module"))
    cli.main(["doctor"])
    assert "cli: missing no_such_module: pip install '.[cli]' in a checkout" in capsys.readouterr().out


def test_shows_variables_that_matter_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPREC_CHECK", "1")
    monkeypatch.setenv("MY_TOKEN", "secret")
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "variable   AUTOPREC_CHECK=1\n" in out
    assert "secret" not in out


def test_state_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "measurements"
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(folder))
    assert diagnosis.diagnose()["caches"]["calibration"]["files"] == []
    own = Cache(key_of(torch.device("cpu")), folder)
    own.add({"a": Measured(1.0, 0.0, 0, 0)})
    Cache({"device": "another"}, folder).add({"a": Measured(1.0, 0.0, 0, 0)})
    states = {each["name"]: each["state"] for each in diagnosis.diagnose()["caches"]["calibration"]["files"]}
    assert "1 measurements, used by runs" in states.pop(own.path.name)
    assert "of another device" in next(iter(states.values()))
    own.path.write_text("{")
    states = {each["name"]: each["state"] for each in diagnosis.diagnose()["caches"]["calibration"]["files"]}
    assert "is left out of account" in states[own.path.name]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = diagnosis.diagnose()
    assert found["caches"]["calibration"]["is_writable"] is False
    assert any("Set AUTOPREC_CACHE_DIR to a folder of yours" in line for line in found["advice"])
    assert any("NOT writable" in line for line in lines_of(found))


def test_a_cache_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calibration-gone.json").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path))

    def refuse(path: Path, **options: Any) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    found = diagnosis._caches()["calibration"]
    assert found["files"] == [{"name": "calibration-gone.json", "state": "cannot be read: No such file or directory"}]
    assert not found["is_writable"]


def test_nothing_to_advise(healthy: dict[str, Any]) -> None:
    assert list(diagnosis.advise(healthy)) == []
    assert "advice     none: nothing that is known to go wrong" in list(lines_of({**healthy, "advice": []}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("threads", "torch"), 1 << 20, "Set OMP_NUM_THREADS="),
        (("kernels", "why_missing"), "no compiler", "no compiler. Until then plain PyTorch"),
        (("lightning", "packages"), ["lightning", "pytorch_lightning"], "The two do not mix"),
        (("devices", 0, "native"), ["fp32"], "low precision saves no time"),
        (("environment", "AUTOPREC_AUTO"), "1", "two stateful callbacks"),
        (("environment", "AUTOPREC_CHECK"), "1", "Unset it for real runs"),
        (("environment", "ONEDNN_MAX_CPU_ISA"), "AVX2", "keeps instructions of this CPU unused"),
        (("environment", "CUDA_LAUNCH_BLOCKING"), "1", "times mean nothing"),
        (("environment", "NVIDIA_TF32_OVERRIDE"), "0", "`tf32` is a format here"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_advice(healthy: dict[str, Any], path: tuple[Any, ...], value: Any, message: str) -> None:
    found = copy.deepcopy(healthy)
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (line,) = diagnosis.advise(found)
    assert message in line
