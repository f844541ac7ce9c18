"""Takes keys out of a mapping of the source one by one, so that none is forgotten: what is left is named at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from greenroom.config.reader import Value, Where
from greenroom.importing.result import Notes, leaves

UNKNOWN = "llama-swap has no such key"
# Words that our own reader keeps as text, and that other programs take for true or false.
_WORDS = {"yes": True, "on": True, "no": False, "off": False}


class SourceKeys:
    """`tree` is read to decide, `written` is what goes into the new file: there macros may be kept."""

    def __init__(self, tree: Value, written: Value, where: Where, notes: Notes) -> None:
        self.tree = tree if isinstance(tree, dict) else {}
        self.where = where
        self.notes = notes
        self._written = written if isinstance(written, dict) else {}
        self._left = dict(self.tree)

    def number(self, key: str, least: float = 0) -> int | float | None:
        """A number of at least this; None if there is none."""
        value = self._taken(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= least):
            return value
        self._refuse(key, "a number is wanted" if least < 0 else f"a number of at least {least:g} is wanted")
        return None

    def flag(self, key: str) -> bool | None:
        value = self._taken(key)
        value = _WORDS.get(value.lower(), value) if isinstance(value, str) else value
        if value is None or isinstance(value, bool):
            return value
        self._refuse(key, "true or false is wanted")
        return None

    def text(self, key: str) -> str | None:
        """A text; None if there is none, or an empty one."""
        value = self._taken(key)
        if value is None or isinstance(value, str):
            return value or None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        self._refuse(key, "a text is wanted")
        return None

    def texts(self, key: str) -> list[str]:
        value = self._taken(key)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value):
            return [str(one) for one in value]
        self._refuse(key, "a list of texts is wanted")
        return []

    def below(self, key: str) -> SourceKeys:
        """The mapping under this key. Its own keys are taken from it, and told by its `name_rest`."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            self.notes.unmapped((*self.where, key), "a mapping is wanted")
        return SourceKeys(value, self._written.get(key), (*self.where, key), self.notes)

    def each(self) -> Iterator[tuple[str, SourceKeys]]:
        """Every key with the mapping under it."""
        for key in list(self._left):
            yield key, self.below(key)

    def written(self, key: str) -> Value:
        """What is written for a key that was taken: with macros where they are kept."""
        return self._written.get(key, self.tree.get(key))

    def name_rest(self, reasons: Mapping[str, str] | None = None) -> None:
        """Name every key that was not taken: with its reason, or as unknown. `*` stands for any one key."""
        for key, value in self._left.items():
            for where in leaves(value, (key,)):
                self.notes.unmapped((*self.where, *where), _reason(where, reasons or {}) or UNKNOWN)
        self._left = {}

    def _taken(self, key: str) -> Value:
        value = self._left.pop(key, None)
        self.notes.mapped += key in self.tree
        return value

    def _refuse(self, key: str, wanted: str) -> None:
        """Name a key that was taken. Its value is not shown: it may be a secret."""
        self.notes.mapped -= 1
        self.notes.unmapped((*self.where, key), wanted)


def _reason(where: Where, reasons: Mapping[str, str]) -> str | None:
    """The reason for this place, or for the nearest mapping around it."""
    names = [str(step) for step in where]
    for size in range(len(names), 0, -1):
        for pattern, reason in reasons.items():
            wanted = pattern.split(".")
            if len(wanted) == size and all(want in ("*", name) for want, name in zip(wanted, names, strict=False)):
                return reason
    return None
