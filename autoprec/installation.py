"""Puts the plugin in place of a Trainer's own for a fit, and gives the Trainer its own back.

What lives here: whose plugin stands where, for one callback. What does not: what the plugin does (``precision``), and
which Trainers it can serve (``trainer_facts``).
"""

from __future__ import annotations

from typing import Any

from autoprec.plugins import check_base
from autoprec.precision import AutoPrecision
from autoprec.settings import PluginSettings
from autoprec.trainer_facts import check_idle


class Installation:
    """Knows what a callback found in a Trainer, for one Trainer at a time.

    Attributes:
        owner: The Trainer whose fit is under way, ``None`` outside of one.
    """

    def __init__(self) -> None:
        self.owner: Any = None
        self._plugin: AutoPrecision | None = None
        self._found: Any = None
        self._found_settings: PluginSettings | None = None

    def install(self, trainer: Any, settings: PluginSettings) -> AutoPrecision:
        """Returns the Trainer's own :class:`AutoPrecision` under other settings, or a new one in place of its plugin.

        Args:
            trainer: The Trainer.
            settings: Settings of the callback.

        Raises:
            MisconfigurationException: If the fit of another Trainer is under way.
        """
        if self.owner is not None and self.owner is not trainer:
            check_idle(self.owner)
            self.remove(self.owner)  # its fit ended without telling
        found = trainer.strategy.precision_plugin
        if isinstance(found, AutoPrecision):
            self._found_settings = found.settings
        else:
            self._found = found
            found = AutoPrecision(base=check_base(found))
            trainer.strategy.precision_plugin = found
        found.settings = settings
        self.owner, self._plugin = trainer, found
        return found

    def remove(self, trainer: Any) -> None:
        """Gives the Trainer its own plugin, or its own settings, back; does nothing if it has them."""
        if self.owner is not trainer or self._plugin is None:
            return
        self.owner = None
        if self._found is not None:
            self._plugin.release()
            trainer.strategy.precision_plugin = self._found
            self._found = None
        elif self._found_settings is not None:
            self._plugin.settings, self._found_settings = self._found_settings, None
