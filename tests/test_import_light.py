"""``import autoprec`` brings in nothing beyond its declared dependencies.

Lightning itself imports scipy, matplotlib, rich and transformers where they are installed (torchmetrics does), so what
is there before autoprec does not count. What autoprec's own modules import counts even then.

Time budget: 15 s (one process).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

HEAVY = {
    "gymnasium",
    "matplotlib",
    "optuna",
    "plotly",
    "prometheus_client",
    "ray",
    "rich",
    "sb3_contrib",
    "scipy",
    "stable_baselines3",
    "torchao",
    "transformers",
    "triton",
    "typer",
    "wandb",
    "zstandard",
}
CORE = {"autoprec", "lightning", "numpy", "platformdirs", "pydantic", "safetensors", "torch", "yaml"}

PROBE = """
import builtins, json, sys
import torch, lightning.pytorch

plain_import, loaded, own = builtins.__import__, set(sys.modules), set()

def watched_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = str((globals or {}).get("__name__"))
    if level == 0 and importer.split(".")[0] == "autoprec":
        own.add(name.split(".")[0])
    return plain_import(name, globals, locals, fromlist, level)

def seen():
    new = {name.split(".")[0] for name in set(sys.modules) - loaded}
    return {"new": sorted(new), "own": sorted(own - sys.stdlib_module_names)}

builtins.__import__ = watched_import
import autoprec
honest = seen()
exec("import scipy, typer", {"__name__": "autoprec.heavy"})
print(json.dumps({"honest": honest, "heavy": seen(), "before": sorted(loaded)}))
"""

Seen = Mapping[str, list[str]]


@pytest.fixture(scope="module")
def probe() -> Mapping[str, Seen]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: Mapping[str, Seen] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_loads_nothing_heavy(probe: Mapping[str, Seen]) -> None:
    assert HEAVY.isdisjoint(probe["honest"]["new"])


def test_own_modules_import_only_the_core(probe: Mapping[str, Seen]) -> None:
    assert set(probe["honest"]["own"]) <= CORE


def test_the_check_can_fail(probe: Mapping[str, Seen]) -> None:
    """The same probe after a module of autoprec has imported typer, and scipy, which may be loaded already."""
    assert "typer" in probe["heavy"]["new"]
    assert {"scipy", "typer"} <= set(probe["heavy"]["own"])
