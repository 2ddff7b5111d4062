"""`autoprec calibrate` and `autoprec apply` on targets of every kind.

Time budget: 20 s.
"""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import cli
from autoprec.map_file import save_map

SOURCE = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{imports}

class Module(pl.LightningModule):
    def __init__(self, width: int = 32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 4)

    def training_step(self, batch, index):
        {step}
        return nn.functional.cross_entropy(self.head(self.body(batch[0])).float(), batch[1])

    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(shuffle=False):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.arange(64) % 4), batch_size=8, shuffle=shuffle)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(True)

    def val_dataloader(self):
        return loader(True)  # in another order each time


def build(width: int = 32):
    print("building")
    return Module(width), (loader(True), loader()), {{"max_epochs": 2, "gradient_clip_val": 1.0}}


def without_validation():
    module = Module()
    return module, loader(), {{"max_epochs": 1}}
"""

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended:UserWarning"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
]


@pytest.fixture(autouse=True)
def _unmarked_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # a run sets both
    monkeypatch.setenv("PL_SEED_WORKERS", "1")


@pytest.fixture
def targets(tmp_path: Path) -> dict[str, list[str]]:
    """Words of the command line, by kind of target."""

    def write(name: str, imports: str = "", step: str = "pass", more: str = "") -> str:
        (tmp_path / name).write_text(SOURCE.format(imports=imports, step=step) + more)
        return str(tmp_path / name)

    file = write("small_target.py")
    config = {
        "model": {"class_path": "small_target.Module"},
        "data": {"class_path": "small_target.Data"},
        "trainer": {"max_epochs": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    fit = "\nprint('a script', sys.argv[1:])\npl.Trainer(max_epochs=2).fit(Module(), datamodule=Data())\n"
    return {
        "function": [f"{file}:build"],
        "arguments": [f"{file}:build", "--", "width=48"],
        "config": [str(tmp_path / "config.yaml")],
        "script": [write("script.py", more=f"{fit}\nraise SystemExit('the rest of the script ran')\n")],
        "no validation": [f"{file}:without_validation"],
        "interrupted": [f"{write('stops.py', step='raise KeyboardInterrupt')}:build"],
        "failing": [f"{write('fails.py', step='raise ArithmeticError(12)')}:build"],
        "no fit": [write("nothing.py")],
        "unfit": [f"{file}:loader"],
    }


KINDS = ["function", "arguments", "config", "script"]


def call(
    capsys: pytest.CaptureFixture[str], words: list[str], target: list[str], *options: str
) -> tuple[int, str, str]:
    code = cli.main([*words, target[0], *options, *target[1:]])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- calibrate ----


@pytest.mark.parametrize("kind", KINDS)
def test_costs_of_every_layer(
    kind: str, targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = call(capsys, ["calibrate"], targets[kind], "--json", "--budget", "5")
    assert code == 0, err
    found = json.loads(out)
    assert set(found["units"]) == {"body.0", "body.2", "head"}
    width = 48 if kind == "arguments" else 32
    assert found["units"]["head"]["calls"] == {f"Linear 8 x {width} -> 4": 1}
    for unit in found["units"].values():
        assert unit["choice"] in unit["formats"]
        assert unit["kind"] == "linear"
        for name, cost in unit["formats"].items():
            assert cost["ms"] > 0
            assert (cost["error"] < 1e-5) is (name == "fp32")
            assert (cost["why_not"] is None) is cost["pays"]
    assert found["measured"] >= 3  # more where formats changed what a layer gets
    assert found["from_cache"] == 0
    assert list((tmp_path / "cache").glob("calibration-*.json"))
    assert logging.getLogger("lightning.pytorch").level != logging.WARNING


def test_the_second_time_comes_from_the_cache_and_the_table_says_so(
    targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    call(capsys, ["calibrate"], targets["function"])
    code, out, _ = call(capsys, ["calibrate"], targets["function"])
    assert code == 0
    text = " ".join(out.split())
    assert "0 layer shapes measured in 0.0 s, " in text
    assert " from the cache; kept in" in text
    assert "Linear 8 x 16 -> 32" in text
    assert "All layers together:" in text
    assert all(len(line) <= 80 for line in out.splitlines())


def test_formats_and_threads_are_settings(targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--formats", "fp32,bf16,fp16", "--threads", "2", "--no-cache"]
    code, out, _ = call(capsys, ["calibrate"], targets["function"], *options)
    found = json.loads(out)
    assert (code, found["threads"], found["cache"]) == (0, 2, None)
    assert set(found["units"]["head"]["formats"]) == {"fp32", "bf16", "fp16"}
    assert torch.get_num_threads() == 1


def test_an_interruption_says_where_results_are(
    targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    code, out, err = call(capsys, ["calibrate"], targets["interrupted"])
    assert (code, out) == (130, "building\n")
    assert f"is in `{tmp_path / 'cache'}`" in err
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("failing", 1, "ArithmeticError: 12"),
        ("no fit", 2, "ended without a `Trainer.fit`"),
        ("unfit", 2, "must return (LightningModule, data, Trainer arguments)"),
    ],
)
@pytest.mark.parametrize("words", [["calibrate"], ["apply", "--map", "map.yaml"]], ids=["calibrate", "apply"])
def test_targets_that_cannot_be_measured(
    kind: str,
    code: int,
    message: str,
    words: list[str],
    targets: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_map("map.yaml", {"head": "bf16"})
    found, _, err = call(capsys, words, targets[kind])
    assert found == code
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


@pytest.mark.parametrize("options", [["--formats", "b16"], ["--budget", "0"], ["--steps", "1"]])
def test_wrong_options_of_calibrate(
    options: list[str], targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, ["calibrate"], targets["function"], *options)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


# ---- apply ----


@pytest.mark.parametrize("kind", KINDS)
def test_fidelity_and_time_of_a_map(
    kind: str, targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_map("map.yaml", {"body.*": "bf16", "head": "fp16"})
    code, out, err = call(capsys, ["apply", "--map", "map.yaml"], targets[kind], "--json", "--batches", "3")
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads((tmp_path / "autoprec-apply.json").read_text())
    assert found["formats"] == {"body.0": "bf16", "body.2": "bf16", "head": "fp16"}
    assert found["emulated"] == {"head": "fp16"}
    assert found["batches"] == 3
    assert 0.0 < found["fidelity"]["kl"] < 1e-3
    assert found["fidelity"]["rows"] == 24
    assert found["time_ratio"] > 0
    assert not list(tmp_path.glob("lightning_logs"))


def test_fp32_is_without_error_whatever_the_order_of_batches(
    targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    save_map("map.yaml", {"*": "fp32"})
    options = ["--rounds", "0", "--out", "of/mine.json"]
    code, out, _ = call(capsys, ["apply", "--map", "map.yaml"], targets["config"], *options)
    assert code == 0
    assert "fidelity   logit_sqnr_db unbounded" in out
    assert "fidelity   max_abs_difference 0\n" in out
    assert "time       not measured" in out
    assert json.loads(Path("of/mine.json").read_text())["time_ratio"] is None


def test_weights_of_a_checkpoint(targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    save_map("map.yaml", {"head": "bf16"})
    zeros: Any = {"body.0": (32, 16), "body.2": (32, 32), "head": (4, 32)}
    state = {f"{name}.weight": torch.zeros(shape) for name, shape in zeros.items()}
    state |= {f"{name}.bias": torch.ones(shape[0]) for name, shape in zeros.items()}
    torch.save({"state_dict": state}, "last.ckpt")
    words = ["apply", "--map", "map.yaml", "--checkpoint", "last.ckpt"]
    code, out, _ = call(capsys, words, targets["function"], "--rounds", "0")
    assert code == 0
    assert "weights    last.ckpt" in out
    assert "max_abs_difference 0\n" in out  # ones are exact in bf16
    torch.save({"state_dict": {"other": torch.zeros(1)}}, "last.ckpt")
    code, _, err = call(capsys, words, targets["function"])
    assert code == 2
    assert "whose weights do not fit this target" in err


@pytest.mark.parametrize(
    ("map", "kind", "message"),
    [
        ({"*ffn*": "bf16"}, "function", "meets no unit of this model. Close to it: 'body.0'"),
        ({"head": "fp8"}, "function", "fp8 for 'head', which cannot be"),
        ({"head": "bf16"}, "no validation", "has no validation"),
        (None, "function", "There is no such file"),
    ],
    ids=["unknown name", "illegal", "no validation", "no file"],
)
def test_maps_that_cannot_be_applied(
    map: dict[str, str] | None,
    kind: str,
    message: str,
    targets: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if map is not None:
        save_map("map.yaml", map)
    code, _, err = call(capsys, ["apply", "--map", "map.yaml"], targets[kind])
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert not (tmp_path / "autoprec-apply.json").exists()


def test_a_place_that_cannot_be_written(targets: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    save_map("map.yaml", {"head": "bf16"})
    Path("file").write_text("in the way")
    code, out, err = call(capsys, ["apply", "--map", "map.yaml", "--out", "file/a.json"], targets["function"])
    assert (code, out) == (2, "")
    assert "Traceback" not in err
