"""The winner as YAML that LightningCLI takes: Trainer precision, callback, and the model's own hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autoprec import __version__
from autoprec.json_files import write_whole
from autoprec.sweep.config import SweepConfig
from autoprec.sweep.measure import MAP_FILE
from autoprec.sweep.options import as_init_args
from autoprec.sweep.plan import START_MAP, TrialPlan, make_plan, word_of
from autoprec.sweep.results import SweepResult, TrialRecord
from autoprec.sweep.space import load_yaml

CALLBACK = "autoprec.AutoPrecisionCallback"
BEST_FILE, BEST_MAP = "best.yaml", "best_map.yaml"


def write_best(config: SweepConfig, result: SweepResult) -> None:
    """Writes ``best.yaml``, and ``best_map.yaml`` where the winner has a map; without a winner neither is there.

    Args:
        config: The sweep.
        result: What it gave.
    """
    if result.best is None:
        for name in (BEST_FILE, BEST_MAP):
            (config.out / name).unlink(missing_ok=True)
        return
    document, notes = best_document(config, result.best)
    head = "".join(f"# {note}\n" for note in [f"{result.message} (autoprec {__version__})", *notes])
    write_whole(config.out / BEST_FILE, (head + yaml.safe_dump(document, sort_keys=False)).encode())
    final_map = config.out / "trials" / str(result.best.number) / MAP_FILE
    if final_map.is_file():
        write_whole(config.out / BEST_MAP, final_map.read_bytes())
    else:
        (config.out / BEST_MAP).unlink(missing_ok=True)


def best_document(config: SweepConfig, best: TrialRecord) -> tuple[dict[str, Any], list[str]]:
    """Returns a config of LightningCLI that trains as a trial did, and what a reader should know about it.

    Args:
        config: The sweep.
        best: The trial.
    """
    plan = make_plan(config, best.arm, best.params)
    target = config.load_target()
    notes: list[str] = []
    document: dict[str, Any] = {}
    if target.kind == "config":
        document = load_yaml(Path(target.file).read_text(encoding="utf-8")) or {}
        for name, value in plan.arguments.items():
            _set(document, name.split("."), value)
    elif plan.arguments:
        words = " ".join(f"{name}={word_of(value)}" for name, value in plan.arguments.items())
        notes.append(f"with these arguments of `{config.target}`: {words}")
    trainer = document["trainer"] = document.get("trainer") or {}  # `trainer:` with nothing below it is a None
    if plan.is_static:
        _set_static(trainer, plan.arm, notes)
    else:
        trainer["precision"] = config.precision
        trainer["callbacks"] = [
            *_others(trainer),
            {"class_path": CALLBACK, "init_args": _init_args(config, plan, best)},
        ]
    return document, notes


def _set_static(trainer: dict[str, Any], arm: str, notes: list[str]) -> None:
    trainer["precision"] = arm.removesuffix("-medium")
    if arm.endswith("-medium"):
        notes.append('with torch.set_float32_matmul_precision("medium"), which no config can set')
    if "callbacks" in trainer:
        trainer["callbacks"] = _others(trainer)


def _others(trainer: Mapping[str, Any]) -> list[Any]:
    """The callbacks of a config without ours."""
    before = trainer.get("callbacks") or []
    kept = before if isinstance(before, list) else [before]
    return [one for one in kept if not str(_class_path(one)).endswith("AutoPrecisionCallback")]


def _class_path(callback: Any) -> Any:
    return callback.get("class_path") if isinstance(callback, Mapping) else callback


def _init_args(config: SweepConfig, plan: TrialPlan, best: TrialRecord) -> dict[str, Any]:
    arguments = as_init_args(plan.options)
    if plan.map is not None:
        arguments["policy"] = str(config.out.resolve() / "trials" / str(best.number) / START_MAP)
    if plan.reward is not None:
        from autoprec.sweep.reward_policies import policy_folder

        arguments["policy"] = str(policy_folder(plan.reward, config.policy_training, config.out / "policies"))
    return arguments


def _set(document: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        document = _settings_of(document, part)
        inner = document.get(part)
        if not isinstance(inner, dict):
            inner = document[part] = {}
        document = inner
    _settings_of(document, path[-1])[path[-1]] = value


def _settings_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Where a setting is: LightningCLI takes `--model.width` for `--model.init_args.width`, but not in a file."""
    if "class_path" not in document or name in ("class_path", "init_args", "dict_kwargs"):
        return document
    if not isinstance(document.get("init_args"), dict):
        document["init_args"] = {}
    inner: dict[str, Any] = document["init_args"]
    return inner
