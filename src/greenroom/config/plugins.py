"""Parts that other packages bring: schedulers, policies, swappers and engines, found by entry point. Imports nothing
that is not named: a package that is merely installed costs nothing and cannot fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Final, Generic, TypeVar

from greenroom.errors import ConfigError

SCHEDULER_GROUP: Final = "greenroom.schedulers"
POLICY_GROUP: Final = "greenroom.policies"
SWAPPER_GROUP: Final = "greenroom.swappers"
ENGINE_GROUP: Final = "greenroom.engines"

Factory = TypeVar("Factory")


class Named(Mapping[str, Factory], Generic[Factory]):
    """Factories by name: the built-in ones and those of an entry point group."""

    def __init__(self, word: str, built_in: Mapping[str, Factory], group: str) -> None:
        self.word = word
        self._built_in = built_in
        self._loaded: dict[str, Factory] = {}
        self._group = group

    def __getitem__(self, name: str) -> Factory:
        if name in self._built_in:
            return self._built_in[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._built_in, *(entry.name for entry in entry_points(group=self._group))}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _load(self, name: str) -> Factory:
        for entry in entry_points(group=self._group):
            if entry.name == name:
                try:
                    factory: Factory = entry.load()
                except Exception as error:
                    raise ConfigError(f"{name!r} of {entry.value} does not load: {error}") from error
                return factory
        raise ConfigError(f"there is no {self.word} {name!r}; there are {', '.join(self)}")
