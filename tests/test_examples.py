"""Examples run from top to bottom, in a small size, and print what they promise.

Time budget: 20 s.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.doc_pages import ROOT, read

for _name in ("sklearn.datasets", "sb3_contrib", "transformers"):
    pytest.importorskip(_name)  # the first two set environment variables when they are imported, as examples do

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
ELSEWHERE = {
    "monitored_run.py": "tests/test_cli.py",
    "offline_report.py": "tests/test_report.py",
    "sweep_target.py": "tests/test_sweep_runs.py",
    "wandb_offline.py": "tests/test_wandb_logging.py::test_the_example_logs_two_runs_of_one_group",
    "compare_target.py": "tests/test_compare_runs.py::test_transformers_models_are_targets",
    "digits_cnn.py": "tests/test_cli.py::test_examples_name_bad_arguments",
    "gpt_source.py": "tests/test_cli.py::test_example_says_when_no_decision_was_due",
    "surviving_run.py": "tests/test_cli.py::test_example_survives",
    "training_environment.py": "tests/test_training_env.py::test_the_example_runs",
}
OWN = {
    "digits_cnn.py",
    "finetune_bert.py",
    "gan.py",
    "own_controller.py",
    "own_hardware.py",
    "own_policy.py",
    "quickstart.py",
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # examples set both
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    return Runner(capsys, monkeypatch)


class Runner:
    """Runs an example as `python examples/<name>.py <words>` does."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, name: str, *words: str) -> str:
        self.monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return self.capsys.readouterr().out


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # they start as a reader would start them


def test_every_example_is_run_and_listed() -> None:
    assert set(EXAMPLES) == OWN | set(ELSEWHERE)
    page = read("docs/examples.md")
    assert not [name for name in EXAMPLES if f"`{name}`" not in page]


def test_quickstart(run: Runner) -> None:
    out = run("quickstart", "--steps", "30", "--width", "32")
    assert "formats at the end: {'net.0': " in out
    assert "step 16: clip inf -> " in out


def test_digits_cnn(run: Runner) -> None:
    out = run("digits_cnn", "--epochs", "1")
    assert "with autoprec: {'val_loss': " in out
    assert "optimizer steps: applied 23 skipped 0" in out


def test_gan(run: Runner) -> None:
    out = run("gan", "--epochs", "2", "--width", "32")
    assert "optimizer steps of both: applied 56 skipped 0" in out
    assert float(out.split("distance of pixel means: ")[1].split()[0]) < 0.5


def test_own_controller(run: Runner) -> None:
    out = run("own_controller", "--epochs", "3")
    assert "fp32 -> bf16 (applied)" in out
    assert "a resumed run decides the same: True" in out


def test_own_hardware(run: Runner) -> None:
    out = run("own_hardware")
    with_row = out.split("with a row of our own: ")[1].splitlines()[0]
    assert "fp32" in with_row
    assert "bf16" not in with_row
    assert "formats of a run: {'layer': 'fp32'}" in out


def test_own_policy(run: Runner) -> None:
    out = run("own_policy", "--decisions", "256")
    assert "policy.json" in out
    assert "policy.safetensors" in out


def test_finetune_bert(run: Runner) -> None:
    out = run("finetune_bert", "--steps", "24", "--width", "32", "--layers", "1")
    assert "model.bert.embeddings.word_embeddings fp32" in out
    assert out.count("accuracy") == 2  # and that both runs end with the same map, which it asserts itself


@pytest.mark.parametrize("name", ["quickstart", "gan", "finetune_bert", "own_controller", "own_policy"])
def test_bad_arguments_are_named(run: Runner, name: str) -> None:
    option = {"quickstart": "--steps", "finetune_bert": "--steps", "own_policy": "--decisions"}.get(name, "--epochs")
    with pytest.raises(SystemExit) as stop:
        run(name, option, "0")
    assert stop.value.code == 2
    assert option in run.capsys.readouterr().err
