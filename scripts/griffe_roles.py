"""For the site: docstrings name things by roles (``:class:`~autoprec.action.Action```), Markdown by backticks.

griffe shows doctests as code under ``Examples:`` only.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod):`(~?)([\w.]+)`")


def without_roles(text: str) -> str:
    """Returns a docstring with each role as code: the last name after ``~``, else the whole path."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    return _ROLE.sub(lambda each: f"`{each[2].rpartition('.')[2] if each[1] else each[2]}`", text)


class WithoutRoles(griffe.Extension):
    """Called by mkdocstrings for everything it reads."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)
