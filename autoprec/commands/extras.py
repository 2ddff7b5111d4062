"""What comes with extras: which modules each brings, which of them are missing, and how to get them."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    "cli": ("typer", "rich", "matplotlib", "scipy", "sklearn"),
    "compress": ("zstandard",),
    "monitor": ("prometheus_client",),
    "plan": ("scipy",),
    "ray": ("ray",),
    "report": ("jinja2", "plotly"),
    "rl": ("gymnasium", "stable_baselines3", "sb3_contrib"),
    "sweep": ("optuna", "optuna_dashboard", "sqlalchemy", "filelock", "plotly"),
    "wandb": ("wandb", "wandb_workspaces"),
}
"""Modules that autoprec imports, by the extra that they come with."""


def missing(extra: str) -> list[str]:
    """Returns the modules of an extra that are not installed.

    Args:
        extra: Its name.
    """
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def how_to_install(*extras: str) -> str:
    """Returns the sentence that says how to get extras.

    Args:
        extras: Their names.
    """
    return f"Run `pip install '.[{','.join(extras)}]'` in a checkout of autoprec."


def extra_of(module: str | None) -> str | None:
    """Returns an extra that brings a module, ``None`` if none does.

    Args:
        module: The module's name, with or without parts of it.
    """
    top = (module or "").split(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)
