"""Who decides: the controller protocol, three controllers that follow orders, and how a policy is named.

What lives here: fixed formats, scripts and saved maps. What does not: policies that look at the observation, the file
of a map (``map_file``), and whether what a controller asks for is legal.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig
from autoprec.encoding import Observation
from autoprec.formats import FORMATS, get_format, nearest
from autoprec.map_file import load_map
from autoprec.planning import ModelFacts
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import Proposal

Moves = NDArray[np.integer[Any]]


class Controller(ABC):
    """Decides at the boundaries between optimizer windows.

    A run calls ``start`` once before its first window and asks ``initial_map`` unless it resumes. Before window ``n``
    it asks ``step_action(n)``, before epoch ``m`` ``epoch_action(m)``, and whenever a decision is due ``decide``. All
    of them must be deterministic, and none may touch a global random generator. A controller that is not autoprec's own
    is asked in another thread and has ``AutoPrecisionConfig.decision_timeout_s`` for each answer.

    Attributes:
        name: Short name for records and reports.
        looks: Whether ``decide`` looks at the observation, so that a run shorter than the interval needs a word.
        needs_facts: Whether it is told of the model by ``note_facts``, at the start and before each ``decide``.
        is_relative: Whether what ``decide`` requests is relative to what is there, as moves are: a clip threshold goes
            on following the median norm by another multiplier, and a loss scale is not taken for somebody's choice.
    """

    name: str = "controller"
    looks: bool = True
    needs_facts: bool = False
    is_relative: bool = False

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:  # noqa: B027
        """Begins a run afresh; in a resumed run a state is loaded after it.

        Args:
            names: Unit names in the order of their rows.
            legal: For each unit the formats it may be given, from wide to narrow.
        """

    def initial_map(self) -> Mapping[str, str] | None:
        """Returns the formats wanted from window 0 on, by unit name or pattern. ``None`` keeps what is there."""
        return None

    def note_facts(self, facts: ModelFacts) -> None:  # noqa: B027
        """Takes in what is known about the model; called where ``needs_facts`` is set.

        Args:
            facts: Layers, what they may run in and, where they were wanted, measured errors.
        """

    def wants_errors(self) -> bool:
        """Returns whether facts and readings before the next ``decide`` must hold newly measured errors."""
        return False

    def notes(self) -> Sequence[str]:
        """Returns lines for the table at the end of fit."""
        return ()

    def step_action(self, window: int) -> Action | None:
        """Returns what is wanted before an optimizer window.

        Args:
            window: Index from 0, skipped windows included.
        """
        return None

    def epoch_action(self, epoch: int) -> Action | None:
        """Returns what is wanted before an epoch.

        Args:
            epoch: Index from 0.
        """
        return None

    def propose(self, units: Sequence[UnitReading], run: GlobalReading) -> Proposal | None:
        """Returns what a table of costs and errors proposes; asked before an observation is made of the readings.

        What it proposes is in the observation, as moves from where each knob is. Nothing else follows from it.

        Args:
            units: Readings of the units.
            run: Reading of the run.
        """
        return None

    @abstractmethod
    def decide(self, observation: Observation) -> Moves | Action | None:
        """Decides from an observation.

        Args:
            observation: ``[n_knobs, n_features]``, float32, as ``autoprec.encoding.encode`` returns it.

        Returns:
            One move -1, 0 or 1 per row, or a request, or ``None`` for no change.
        """

    def reasons(self) -> Mapping[str, str]:
        """Returns why the latest decision asked for what it did, by name of the unit or knob; for the record."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as primitives and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state.
        """


class FixedController(Controller):
    """Puts every unit that computes with a weight matrix into one format and leaves it there.

    Args:
        format: One of ``autoprec.formats.FORMATS``.

    Raises:
        ValueError: If there is no such format.
    """

    looks = False

    def __init__(self, format: str) -> None:
        self.format = get_format(format).name
        self.name = f"fixed:{self.format}"

    def initial_map(self) -> Mapping[str, str]:
        """Returns the format for all units with a weight matrix."""
        return {"*": self.format}

    def decide(self, observation: Observation) -> None:
        """Changes nothing."""


class ScriptedController(Controller):
    """Asks for given actions before given windows and epochs.

    A subclass may override ``decide`` to look at the observation as well.

    Args:
        steps: Action by optimizer window, counted from 0, skipped windows included.
        epochs: Action by epoch, counted from 0.

    Raises:
        TypeError: If a key is not an int or a value is not an ``Action``.
        ValueError: If a key is negative.

    Example:
        >>> script = ScriptedController(steps={3: Action(precision={"net.0": "bf16"})})
        >>> script.step_action(3)
        Action(precision={'net.0': 'bf16'}, loss_scale=None, clip=None, batch_size=None, accumulate=None)
    """

    name = "scripted"

    looks = False

    def __init__(self, steps: Mapping[int, Action] | None = None, epochs: Mapping[int, Action] | None = None) -> None:
        self.steps = _checked_script("steps", steps)
        self.epochs = _checked_script("epochs", epochs)

    def step_action(self, window: int) -> Action | None:
        """Returns the action scripted for a window.

        Args:
            window: Index from 0.
        """
        return self.steps.get(window)

    def epoch_action(self, epoch: int) -> Action | None:
        """Returns the action scripted for an epoch.

        Args:
            epoch: Index from 0.
        """
        return self.epochs.get(epoch)

    def decide(self, observation: Observation) -> Moves | Action | None:
        """Changes nothing. Override it to act on the observation.

        Args:
            observation: ``[n_knobs, n_features]``.
        """
        return None


class MapController(Controller):
    """Trains with a saved map: formats, loss scale, clip threshold and batch size from window 0 on, never changed.

    Args:
        source: File written by ``save_map``, or format names by unit name or pattern.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If ``source`` is neither, or its keys and values are not strings.
        ValueError: If the file is not a map, or a format name is unknown.
    """

    looks = False

    def __init__(self, source: str | Path | Mapping[str, str]) -> None:
        if isinstance(source, (str, Path)):
            self.name = f"map:{source}"
            self.action = load_map(source)
        else:
            self.name = "map"
            self.action = Action(precision=source)

    def initial_map(self) -> Mapping[str, str] | None:
        """Returns the formats of the map."""
        return self.action.precision

    def step_action(self, window: int) -> Action | None:
        """Returns loss scale and clip threshold of the map before the first window.

        Args:
            window: Index from 0.
        """
        knobs = Action(loss_scale=self.action.loss_scale, clip=self.action.clip)
        return knobs if window == 0 and not knobs.is_empty else None

    def epoch_action(self, epoch: int) -> Action | None:
        """Returns the batch size of the map before the first epoch.

        Args:
            epoch: Index from 0.
        """
        size = self.action.batch_size
        return Action(batch_size=size) if epoch == 0 and size is not None else None

    def decide(self, observation: Observation) -> None:
        """Changes nothing."""


_BY_NAME = {
    "pretrained": "autoprec.policies.pretrained_policy:pretrained_policy",
    "rule": "autoprec.rule:RuleController",
    "table": "autoprec.table_policy:TableController",
    "shape": "autoprec.policies.analytic:shape_policy",
    "fisher": "autoprec.policies.analytic:fisher_policy",
    "snip": "autoprec.policies.analytic:snip_policy",
}
"""Policies by name, each with the place of a callable that takes the settings, as an entry point has it. They build on
this module, so it knows them by name only and imports them on use."""

_LEARNED = "autoprec.policies.pretrained_policy:PretrainedController"


def resolve_policy(policy: str | Path | Controller, config: AutoPrecisionConfig | None = None) -> Controller:
    """Returns the controller that ``policy`` names.

    Args:
        policy: ``"rule"``, ``"table"``, ``"pretrained"``, ``"shape"``, ``"fisher"``, ``"snip"``, ``"fixed:<format>"``,
            the folder of a learned policy, the path of a file written by ``save_map``, or a controller.
        config: Settings for a policy made by name or from a folder.

    Raises:
        FileNotFoundError: If the path of a map has no file, a folder lacks the files of a policy, or none is shipped.
        ModuleNotFoundError: If a policy needs an extra that is not installed.
        TypeError: If ``policy`` is something else.
        ValueError: If there is no such policy, the file is not a map, or the policy in a folder cannot be used.
    """
    if isinstance(policy, Controller):
        return policy
    if not isinstance(policy, (str, Path)):
        raise TypeError(
            f"Passed `policy={policy!r}` with type `{type(policy).__qualname__}`."
            " `policy` must be a policy's name, the folder of a policy, the path of a map or a Controller."
        )
    if isinstance(policy, str) and policy in _BY_NAME:
        controller: Controller = pkgutil.resolve_name(_BY_NAME[policy])(config)
        return controller
    if isinstance(policy, str) and policy in _fixed_names():
        return FixedController(policy.removeprefix("fixed:"))
    if Path(policy).suffix in (".yaml", ".yml") or Path(policy).is_file():
        return MapController(policy)
    if Path(policy).is_dir() or isinstance(policy, Path) or len(Path(policy).parts) > 1:
        learned: Controller = pkgutil.resolve_name(_LEARNED)(policy, config)
        return learned
    known = [*_BY_NAME, *_fixed_names()]
    raise ValueError(
        f"Passed `policy={str(policy)!r}`. Known policies: {sorted(known)}, the folder of a policy, the path of a"
        " map file, or a Controller."
        f"{nearest(str(policy), known)}"
    )


_PLAIN = (str, int, float, bool, type(None), Tensor)


def checked_state(state: object) -> dict[str, Any]:
    """Returns the state of a controller if a checkpoint may hold it.

    Args:
        state: What ``state_dict`` returned.

    Raises:
        TypeError: If it is not a dict, or holds anything but numbers, strings, tensors, and lists and dicts of them.
    """
    if type(state) is not dict:
        raise TypeError(f"`state_dict()` must return a dict, not {state!r}")
    pending: list[Any] = [state]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            pending.extend((*value.keys(), *value.values()))
        elif type(value) in (list, tuple):
            pending.extend(value)
        elif type(value) not in _PLAIN:
            raise TypeError(
                f"`state_dict()` may hold numbers, strings, tensors, and lists and dicts of them, not {value!r}"
            )
    return state


def checked_reasons(reasons: object) -> Mapping[str, str]:
    """Returns the reasons of a controller if a record may hold them.

    Args:
        reasons: What ``reasons`` returned.

    Raises:
        TypeError: If it is not a mapping from strings to strings.
    """
    if not isinstance(reasons, Mapping) or not all(isinstance(text, str) for pair in reasons.items() for text in pair):
        raise TypeError(f"`reasons()` must return a mapping from names to texts, not {reasons!r}")
    return {str(name): str(text) for name, text in reasons.items()}


def _fixed_names() -> list[str]:
    return [f"fixed:{name}" for name in FORMATS]


def _checked_script(name: str, script: Mapping[int, Action] | None) -> dict[int, Action]:
    script = {} if script is None else script
    if not isinstance(script, Mapping):
        raise TypeError(
            f"Passed `ScriptedController({name}=...)` with type `{type(script).__qualname__}`."
            f" `{name}` must be a mapping from ints >= 0 to Action."
        )
    for key, action in script.items():
        passed = f"Passed `ScriptedController({name}={{{key!r}: {action!r}}})`."
        if isinstance(key, bool) or not isinstance(key, int):
            raise TypeError(f"{passed} Keys must be of type `int`, not `{type(key).__qualname__}`.")
        if key < 0:
            raise ValueError(f"{passed} Keys must be >= 0. Windows and epochs count from 0.")
        if not isinstance(action, Action):
            raise TypeError(f"{passed} Values must be of type `Action`, not `{type(action).__qualname__}`.")
    return dict(script)
