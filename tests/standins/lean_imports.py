"""A quick start for programs of the tests: what asyncio imports and they hardly ever use is imported when it is used.

Thousands of them are started, and to import is most of what each does. Call `put_off` before `asyncio` is imported. A
module that asyncio wants more of, in another version of Python, is imported at once.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType

# No `typing` and no `Any`: this is imported before everything else.


class Logger:
    """A logger until there is something to log. asyncio tells details whenever a loop is made."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        logging = sys.modules["logging"]
        return getattr(logging.Logger.manager.getLogger(self._name), name)


class Unused(ModuleType):
    """Stands for a module until one of its names is used that is not given here."""

    def __init__(self, name: str, **given: object) -> None:
        super().__init__(name)
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> object:
        # The machinery of imports looks for these.
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
            __import__(self.__name__)
            self.__dict__.update(sys.modules[self.__name__].__dict__)
        return getattr(sys.modules[self.__name__], name)


def put_off() -> None:
    """Let these be imported later, and OpenSSL never. No garbage is looked for until `gc.enable()`."""
    gc.disable()
    for name in ("ssl", "_hashlib"):
        sys.modules[name] = None  # type: ignore[assignment]
    for name in ("asyncio.sslproto", "hashlib", "inspect", "linecache", "pathlib"):
        sys.modules[name] = Unused(name)
    sys.modules["logging"] = Unused("logging", DEBUG=10, getLogger=Logger)
    sys.modules["subprocess"] = Unused("subprocess", PIPE=-1, STDOUT=-2, DEVNULL=-3)
    sys.modules["traceback"] = Unused("traceback", extract_stack=None)
    import concurrent

    ends = {name: name for name in ("FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED")}
    concurrent.futures = sys.modules["concurrent.futures"] = Unused("concurrent.futures", **ends)  # type: ignore[attr-defined]
