"""Does the callback carry a run over what ruins it in static 16 bits? Ten recipes, each with several seeds.

    python -m benchmarks.divergence                  everything; started again, it goes on where it was interrupted
    python -m benchmarks.divergence --quick          one seed
    python -m benchmarks.divergence --recipe gan mask-constant
    python -m benchmarks.divergence --write-docs     everything, into docs/divergence.json and docs/divergence.md

A run is one training of one recipe in one arm with one seed, and leaves one file in benchmarks/results. The file's name
changes with the recipe, the versions, the machine and the source of autoprec. Recipes stand in
``divergence_recipes.py``, what survival is in ``survival.py``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autoprec.json_files import read_json, write_json
from autoprec.machine import circumstances
from benchmarks.convergence import progress
from benchmarks.divergence_recipes import RECIPES, Recipe
from benchmarks.divergence_report import figures, last_line, page_block, summarise
from benchmarks.divergence_runs import run
from benchmarks.docs import put_between
from benchmarks.report import as_text
from benchmarks.store import RESULTS, ROOT, numerics_digest

SUMMARY = ROOT / "docs" / "divergence.json"
PAGE = ROOT / "docs" / "divergence.md"
BEGIN, END = "<!-- divergence: begin -->", "<!-- divergence: end -->"
FIRST_SEED = 10
"""Recipes were made with seeds 0 and 1, which are not in the study."""
SEEDS = 5
Job = tuple[Recipe, str, int]


@functools.cache
def source_digest() -> str:
    """Returns a digest of the files that may change what a run computes."""
    return numerics_digest(["divergence_models.py", "divergence_recipes.py", "divergence_runs.py", "survival.py"])


def run_path(folder: Path, recipe: Recipe, arm: str, seed: int) -> Path:
    """Returns the file of a run; its name tells everything that its numbers depend on.

    Args:
        folder: Where results are.
        recipe: What is trained.
        arm: Name of one of its arms.
        seed: Seed of the run.
    """
    about = circumstances(torch.get_num_threads())
    fixed = [about["versions"], about["machine"], about["threads"], source_digest(), os.environ.get("AUTOPREC_ISA")]
    settings = [*recipe.identity(), *recipe.arms()[arm], seed]
    digest = hashlib.sha256(json.dumps([fixed, settings], sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"divergence-{recipe.name}-{arm.replace(' ', '')}-{seed}-{digest}.json"


def missing(recipes: Sequence[Recipe], seeds: Sequence[int], folder: Path) -> list[Job]:
    """Returns the runs that are still to be made, seed by seed."""
    jobs = [(recipe, arm, seed) for seed in seeds for recipe in recipes for arm in recipe.arms()]
    return [job for job in jobs if read_json(run_path(folder, *job)) is None]


def train(jobs: Sequence[Job], folder: Path) -> None:
    """Makes runs one after the other and keeps each as soon as it is there."""
    with progress(sum(recipe.steps for recipe, _, _ in jobs)) as (bar, line):
        for number, (recipe, arm, seed) in enumerate(jobs):
            bar.update(line, description=f"{number + 1}/{len(jobs)} {recipe.name} {arm} seed {seed}")
            way = recipe.arms()[arm]
            found = run(recipe, way, seed)
            write_json(
                run_path(folder, recipe, arm, seed),
                {"recipe": recipe.name, "arm": arm, "way": str(way), "seed": seed, **found},
            )
            bar.advance(line, recipe.steps)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--seeds", type=int, help=f"runs of each arm, {SEEDS} if not given")
    parser.add_argument("--quick", action="store_true", help="one seed: to see that it works")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where runs are kept")
    parser.add_argument("--write-docs", action="store_true", help="writes docs/divergence.json and docs/divergence.md")
    options = parser.parse_args(arguments)
    if options.quick and options.seeds is not None:
        parser.error("--quick means one seed; choose one of --quick and --seeds")
    options.seeds = 1 if options.quick else SEEDS if options.seeds is None else options.seeds
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: it takes at least one run of each arm")
    if options.write_docs and (options.recipe != [*RECIPES] or options.seeds < SEEDS):
        parser.error(f"--write-docs is for whole studies: every recipe, at least {SEEDS} seeds")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes what is missing, shows what became of each recipe, and counts the survivors."""
    options = parse(arguments)
    torch.set_num_threads(1)
    recipes = [RECIPES[name] for name in options.recipe]
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    if todo := missing(recipes, seeds, options.folder):
        train(todo, options.folder)
    study = _study(recipes, seeds, options.folder, sys.argv[1:] if arguments is None else arguments)
    write_json(options.folder / "divergence.json", study)
    if options.write_docs:
        write_json(SUMMARY, study)
        put_between(PAGE, BEGIN, END, page_block(study))
    print(as_text(figures(study["recipes"])), end="\n\n")
    for name, found in study["recipes"].items():
        print(f"{name}, seed {FIRST_SEED}\n  static: {found['symptoms']}\n  callback: {found['deeds']}")
    print(last_line(study["recipes"]))


def _study(recipes: Sequence[Recipe], seeds: Sequence[int], folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    found = {
        recipe.name: {arm: [read_json(run_path(folder, recipe, arm, seed)) for seed in seeds] for arm in recipe.arms()}
        for recipe in recipes
    }
    return circumstances(1) | {
        "command": shlex.join(["python", "-m", "benchmarks.divergence", *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": source_digest(),
        "seeds": list(seeds),
        "recipes": {recipe.name: summarise(recipe, found[recipe.name]) for recipe in recipes},
    }


if __name__ == "__main__":
    main()
