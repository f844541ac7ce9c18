"""Packages that only some tests ask with, such as the clients of others: imported by the tests that use them.

Each takes up to seconds to import, and every process that runs tests imports every file of tests.
"""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """`openai = Later("openai")` is the module `openai`, imported when the first of its public names is used."""

    # What pytest asks of every name in a file of tests.
    __test__ = False

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        # pytest asks every object in a file of tests for `_mock_name` and `__wrapped__`, too.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)
