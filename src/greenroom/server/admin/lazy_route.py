"""Routes of the management API that cost next to nothing until they are used.

The framework analyses the signature of every route and compiles a schema for each of its parameters and its answer. For
all routes together that takes a tenth of a second, longer than the rest of a gateway's start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import compile_path


class LazyRoute(APIRoute):
    """A route that is analysed when it first answers, or is first described. Until then it can only be matched."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = set(options["methods"] or ("GET",))
        self._options = options

    def __getattr__(self, name: str) -> Any:
        """Called for what only an analysed route has."""
        options = self.__dict__.pop("_options", None)
        if options is None:
            raise AttributeError(name)
        super().__init__(self.path, self.endpoint, **options)
        return getattr(self, name)
