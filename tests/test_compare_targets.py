"""What a command trains: resolved from text, run in this process with other arguments for its Trainers.

Time budget: 30 s (a dozen fits of a few steps).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from autoprec.compare.targets import load_target
from autoprec.target_functions import TargetError
from tests.compared import Recording, write_training

# lightning 2.6.6 calls what jsonargparse 4.53 has renamed
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


@pytest.fixture(autouse=True)
def _training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_training(tmp_path)
    for name in ("training", "data"):  # of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def weights_of(observer: Recording) -> torch.Tensor:
    trainer, _ = observer.fits[0]
    return torch.cat([parameter.detach().flatten() for parameter in trainer.lightning_module.parameters()])


# without running anything


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("package.module:function", "function", "function"),
        ("training.py:build", "function", "build"),
        ("script.py", "script", "script"),
        ("config.yaml", "config", "config"),
    ],
)
def test_kinds(text: str, kind: str, name: str) -> None:
    target = load_target(text)
    assert (target.kind, target.name) == (kind, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("missing.py", "There is no file `missing.py`"),
        ("missing.py:build", "There is no file `missing.py`"),
        ("missing.yaml", "There is no file `missing.yaml`"),
        ("a-b:build", "`a-b` is no name of a module"),
        ("training", "A target is `package.module:function`"),
        ("training.txt", "A target is `package.module:function`"),
    ],
)
def test_what_is_no_target_is_refused(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=re.escape(message)) as found:
        load_target(text)
    assert f"Passed `{text}`" in str(found.value)


def test_words_for_a_function_have_names() -> None:
    with pytest.raises(TargetError, match=re.escape("write `name=value` instead of `--dropout`")):
        load_target("training.py:build", ["--dropout"])


# functions


def test_a_function_is_trained_with_the_observers_arguments() -> None:
    observer = Recording()
    load_target("training.py:build", ["dropout=0.5"]).train(observer, seed=3)
    ((trainer, arguments),) = observer.fits
    assert observer.arguments == [{"max_epochs": 2}]
    assert observer.packages == ["lightning.pytorch"]
    assert trainer.global_step == 16
    assert arguments["model"].net[2].p == 0.5
    assert arguments["val_dataloaders"] is not None


def test_nothing_is_left_of_it() -> None:
    before = (pl.Trainer.__init__, pl.Trainer.fit, pl.seed_everything, sys.path[:], sys.argv[:])
    load_target("training.py:build").train(Recording(max_epochs=1), seed=0)
    assert before == (pl.Trainer.__init__, pl.Trainer.fit, pl.seed_everything, sys.path, sys.argv)


def test_the_seed_decides_on_the_weights() -> None:
    runs = [Recording(max_epochs=1) for _ in range(3)]
    for observer, seed in zip(runs, (0, 0, 1), strict=True):
        load_target("training.py:build").train(observer, seed)
    first, again, other = map(weights_of, runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_module_is_found_in_the_working_directory() -> None:
    observer = Recording(max_epochs=1)
    load_target("training:build").train(observer, seed=0)
    assert len(observer.fits) == 1


def test_a_function_gets_the_seed_if_it_takes_one(tmp_path: Path) -> None:
    (tmp_path / "seeded.py").write_text(
        "from training import *\nSEEN = []\ndef f(seed):\n SEEN.append(seed)\n return build()\n"
    )
    load_target("seeded.py:f").train(Recording(max_epochs=1), seed=5)
    assert sys.modules.pop("seeded").SEEN == [5]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("training.py:missing", [], "has no function `missing`. It has: "),
        ("empty.py:build", [], "has no function `build`. It has none; a script is passed without `:function`."),
        ("no_such_module:build", [], "There is no module `no_such_module`"),
        ("training.py:build", ["width=3"], "cannot be called with {'width': 3}"),
        ("training.py:only_a_module", [], "returned Net. It must return (LightningModule, data, Trainer arguments)"),
        ("training.py:wrong_data", [], "returned data of type `int`"),
    ],
)
def test_a_wrong_function_is_named(tmp_path: Path, text: str, words: list[str], message: str) -> None:
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(TargetError, match=re.escape(message)):
        load_target(text, words).train(Recording(), seed=0)


def test_an_error_of_the_users_code_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library\ndef f(): pass\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_target("broken.py:f").train(Recording(), seed=0)


# scripts


def test_a_script_runs_with_its_arguments_and_the_seed_of_the_run() -> None:
    observer = Recording()
    load_target("script.py", ["--epochs", "2"]).train(observer, seed=1)
    assert [trainer.global_step for trainer, _ in observer.fits] == [16, 8]
    assert observer.seeds == [7]
    assert observer.arguments[0]["precision"] == "bf16-mixed"
    other = Recording()
    load_target("script.py", ["--epochs", "2"]).train(other, seed=2)
    assert not torch.equal(weights_of(observer), weights_of(other))


def test_a_script_of_the_other_package_is_observed(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    (tmp_path / "other.py").write_text(
        "import pytorch_lightning as pl\nfrom pytorch_lightning.demos.boring_classes import BoringModel\n"
        "pl.Trainer(max_steps=2, limit_val_batches=0).fit(BoringModel())\n"
    )
    observer = Recording()
    load_target("other.py").train(observer, seed=0)
    assert observer.packages == ["pytorch_lightning"]
    assert len(observer.fits) == 1


def test_a_script_that_ends_with_an_error_is_named(tmp_path: Path) -> None:
    (tmp_path / "usage.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n"
    )
    with pytest.raises(TargetError, match=re.escape("The script `usage.py` ended with exit code 2")):
        load_target("usage.py").train(Recording(), seed=0)


# configs


def test_a_config_is_trained() -> None:
    observer = Recording()
    load_target("config.yaml", ["--trainer.max_epochs=1"]).train(observer, seed=0)
    ((trainer, arguments),) = observer.fits
    assert trainer.global_step == 8
    assert arguments["model"].net[0].out_features == 16
    assert observer.arguments[0]["precision"] == "16-mixed"
    assert observer.seeds == [3]


@pytest.mark.parametrize("text", ["model: {class_path: training.Missing}\n", "model: {width: 3}\n", "trainers: {}\n"])
def test_a_config_that_cannot_be_read_says_what_is_supported(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(TargetError, match="cannot be read by `LightningCLI`(.|\n)*with `class_path` and `init_args`"):
        load_target("bad.yaml").train(Recording(), seed=0)


def test_an_option_that_the_config_cannot_take_is_named() -> None:
    with pytest.raises(TargetError, match="cannot be read by `LightningCLI`: .*max_epoks"):
        load_target("config.yaml", ["--trainer.max_epoks=3"]).train(Recording(), seed=0)


def test_the_users_files_are_known(tmp_path: Path) -> None:
    target = load_target("script.py", ["--epochs", "2"])
    target.train(Recording(max_epochs=1), seed=0)
    assert {path.name for path in target.sources()} >= {"script.py", "training.py"}
    assert all(path.is_relative_to(tmp_path.resolve()) for path in target.sources())
