"""Policies and swappers of other packages, found by entry point when the configuration names them.

Imports nothing that is not named: a package that is merely installed costs nothing and cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from greenroom.core.events import Limits
from greenroom.core.policy.base import PolicyFactory
from greenroom.core.policy.registry import BUILT_IN, SWAPPERS, SwapperFactory, make_policy
from greenroom.errors import ConfigError

Factory = TypeVar("Factory")


class Named(Mapping[str, Factory], Generic[Factory]):
    """Factories by name: the built-in ones and those of an entry point group."""

    def __init__(self, word: str, built_in: Mapping[str, Factory], group: str) -> None:
        self._word = word
        self._known = dict(built_in)
        self._group = group

    def __getitem__(self, name: str) -> Factory:
        if name not in self._known:
            self._known[name] = self._load(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._known, *(entry.name for entry in entry_points(group=self._group))}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _load(self, name: str) -> Factory:
        for entry in entry_points(group=self._group):
            if entry.name == name:
                try:
                    factory: Factory = entry.load()
                except Exception as error:
                    raise ConfigError(
                        f"scheduler.{self._word}: {name!r} of {entry.value} does not load: {error}"
                    ) from error
                return factory
        raise ConfigError(f"scheduler.{self._word}: there is no {self._word} {name!r}; there are {', '.join(self)}")


POLICIES: Named[PolicyFactory] = Named("policy", BUILT_IN, "greenroom.policies")
SWAPPERS_BY_NAME: Named[SwapperFactory] = Named("swapper", SWAPPERS, "greenroom.swappers")


def require(limits: Limits) -> None:
    """Raise ConfigError unless the named policy and swapper exist and can be constructed."""
    POLICIES[limits.policy]
    SWAPPERS_BY_NAME[limits.swapper]
    try:
        make_policy(limits, POLICIES, SWAPPERS_BY_NAME)
    except Exception as error:
        raise ConfigError(f"scheduler.policy: {limits.policy!r} cannot be made: {error}") from error
