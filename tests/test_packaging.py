"""The wheel is complete and works without the checkout.

Time budget: 60 s (five builds, four of them with the kernels, one fit in another process).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import lightning
import pytest
import torch

import autoprec.envs
import autoprec.policies
from autoprec.policies.policy_file import CARD_FILE, WEIGHTS_FILE
from autoprec.policies.pretrained_policy import SHIPPED
from tests.policy_networks import saved

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("autoprec", "envs", "policies")
DATA = ("monitoring/data", "report/templates")

FIT = """
import json, warnings
warnings.simplefilter("ignore")
from autoprec.ops import implementations
import autoprec, autoprec.envs, autoprec.policies
from autoprec import AutoPrecisionCallback
from autoprec.hardware import database
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

callback = AutoPrecisionCallback()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(accelerator="cpu", max_steps=4, limit_val_batches=0, callbacks=[callback], **quiet).fit(BoringModel())
learned = AutoPrecisionCallback("pretrained", verbose=False)
modules = [autoprec, autoprec.envs, autoprec.policies]
print(json.dumps({"files": [m.__file__ for m in modules], "applied": callback.applied_steps,
                  "cpu": implementations()["cpu"].detail, "families": len(database.load().families),
                  "policy": learned.controller.name}))
"""


def copy_of_checkout(folder: Path) -> Path:
    """Copies what a build needs, so that it finds no leftovers and leaves none.

    There is a learned policy in each copy: one that nobody has trained, until one is shipped.
    """
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    if not SHIPPED.is_dir():
        saved(folder / "policies" / "pretrained")
        (folder / "policies" / "pretrained" / "MODEL_CARD.md").write_text("Nobody has trained it.\n")
        saved(folder / "policies" / "pretrained" / "seeds" / "1")
    return folder


def build_wheel(source: Path, *options: str) -> Path:
    output = source / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(output.glob("*.whl"))


def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def is_code(path: Path) -> bool:
    return path.suffix in (".py", ".c", ".h", ".toml", ".yaml") or path.parent.name == "templates"


def kernels(files: set[str]) -> set[str]:
    """The compiled library, whatever the platform calls it."""
    return {name for name in files if name.startswith("autoprec/ops/_C.")}


def sources() -> set[str]:
    """Every file of code and of data in the checkout, under its name in the wheel."""
    files = [
        path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.[pchtyj]*") if is_code(path)
    ]
    files += [path.relative_to(ROOT) for data in DATA for path in (ROOT / "autoprec" / data).iterdir()]
    return {str(path) if path.parts[0] == "autoprec" else f"autoprec/{path}" for path in files} | shipped()


def shipped() -> set[str]:
    """The files of the learned policy, under their names in the wheel."""
    files = {CARD_FILE, WEIGHTS_FILE, "MODEL_CARD.md", f"seeds/1/{CARD_FILE}", f"seeds/1/{WEIGHTS_FILE}"}
    if SHIPPED.is_dir():
        found = [path.relative_to(SHIPPED) for path in SHIPPED.rglob("*") if path.is_file()]
        files = {str(path) for path in found if path.suffix in (".json", ".safetensors", ".md")}
    return {f"autoprec/policies/pretrained/{name}" for name in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_of_checkout(tmp_path_factory.mktemp("source")), "--wheel")


def test_packages_come_from_this_checkout() -> None:
    for module, folder in ((autoprec, "autoprec"), (autoprec.envs, "envs"), (autoprec.policies, "policies")):
        assert Path(str(module.__file__)).resolve().parent == ROOT / folder


def test_links_are_relative() -> None:
    for name in ("envs", "policies"):
        assert os.readlink(ROOT / "autoprec" / name) == f"../{name}"


def test_wheel_holds_every_file(wheel: Path) -> None:
    files = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert len(kernels(files)) == 1
    assert files - kernels(files) == sources() | {"autoprec/py.typed"}


def test_wheel_without_a_compiler_lacks_the_kernels_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    files = {name for name in contents(build_wheel(copy_of_checkout(tmp_path), "--wheel")) if ".dist-info/" not in name}
    assert files == sources() | {"autoprec/py.typed"}


def test_wheel_metadata(wheel: Path) -> None:
    info = f"autoprec-{autoprec.__version__}.dist-info"
    archive = zipfile.ZipFile(wheel)
    assert archive.read(f"{info}/top_level.txt").decode().split() == ["autoprec"]
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "[lightning.pytorch.callbacks_factory]\nautoprec = autoprec._factory:callbacks" in entry_points
    assert "[console_scripts]\nautoprec = autoprec.cli:main" in entry_points


def test_fit_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    # torch and what it needs are too large to install again; a folder in a .pth file brings no editable install along
    packages = next(environment.glob("lib/python*/site-packages"))
    installed = {str(Path(str(module.__file__)).parents[1]) for module in (torch, lightning)}
    (packages / "installed.pth").write_text("\n".join(installed))

    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", FIT], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["applied"] == 4
    assert result["cpu"].startswith("C kernels")
    assert result["families"] == 13
    assert result["policy"] == "pretrained"
    for file in result["files"]:
        assert packages in Path(file).parents


@pytest.mark.slow
def test_wheel_from_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    assert contents(build_wheel(copy_of_checkout(tmp_path))) == contents(wheel)


@pytest.mark.slow
def test_wheel_from_clone_without_links_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """Git writes a link as a file with its target where links are not supported."""
    source = copy_of_checkout(tmp_path)
    for name in ("envs", "policies"):
        link = source / "autoprec" / name
        link.unlink()
        link.write_text(f"../{name}")
    assert contents(build_wheel(source, "--wheel")) == contents(wheel)
