"""Why a model is not there that should be: its last move failed, or its process ended. The scheduler knows only that.

Owns the words until the model arrives again, and that none of them says where our folders are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from greenroom.core.model import ModelId, SlotId
from greenroom.errors import GreenroomError, LoadFailed
from greenroom.process.spawn import Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog, Entry

# Lines of the process that go with the error.
LAST_LINES: Final = 20


class Failures(dict[ModelId, GreenroomError]):
    def __init__(self, state_dir: StateDir, catalog: Catalog, is_going: Callable[[SlotId], bool]) -> None:
        """`is_going` says which slots are to leave anyway."""
        super().__init__()
        self._is_going = is_going
        self._state_dir = state_dir
        self._catalog = catalog

    def keep(self, model: ModelId, error: GreenroomError) -> None:
        # An engine's words may say where it was to listen.
        error.message = self._state_dir.unnamed(error.message)
        error.details = None if error.details is None else self._state_dir.unnamed(error.details)
        self[model] = error

    def ended(self, entry: Entry, slot: SlotId, who: str, exit: Exit, lines: Sequence[str]) -> None:
        """A process that had served ended by itself: whoever is refused for it hears how, as after a failed load."""
        if self._catalog.revision(entry.id, entry.spec.revision) is None or self._is_going(slot):
            # Of a model that was changed, removed or told to leave nobody wants this one back.
            return
        said = f"{entry.id} was lost: its {who} ended ({exit})."
        self.keep(entry.id, LoadFailed(said, public=said, details="\n".join(lines) or None))
