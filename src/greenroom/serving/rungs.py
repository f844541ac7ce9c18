"""A request for a task, read once for each model that may serve it.

Owns what becomes of a model that cannot take just this request, such as one with pictures: it is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenroom.access.limits import Quota, QuotaHold
from greenroom.core.model import ModelId
from greenroom.errors import GreenroomError, MediaRefused, ModelNotFound, NoAbility
from greenroom.runtime.catalogue import Catalog
from greenroom.serving.ask import Ask, Rungs, smaller
from greenroom.serving.body import peek
from greenroom.serving.tasks import CandidateFacts, FactsOf, Ladder


def model_facts(catalog: Catalog) -> FactsOf:
    """What tasks need to know of the models in this catalog."""

    def facts_of(name: str) -> CandidateFacts | None:
        entry = catalog.find(name)
        if entry is None:
            return None
        facts, engine = entry.facts, entry.engine
        return CandidateFacts.of(
            entry.id,
            entry.config,
            engine.name,
            facts.abilities,
            keeps_json=engine.keeps_json,
            is_remote=facts.is_remote,
        )

    return facts_of


class RungReader:
    """`asks` are by the ids in the scheduler. Raises the first model's error if none can take the request."""

    def __init__(self, ladder: Ladder, read_for: Callable[[str], Ask]) -> None:
        self._ladder = ladder
        self._served_as: dict[ModelId, ModelId] = {}
        self.asks: dict[ModelId, Ask] = {}
        refused: GreenroomError | None = None
        for facts in ladder.models:
            try:
                ask = read_for(facts.id)
            except (NoAbility, MediaRefused, ModelNotFound) as error:
                refused = refused or error
            else:
                self.asks[ask.entry.id] = ask
                self._served_as[facts.id] = ask.entry.id
        if refused is not None and not self.asks:
            raise refused

    def ask(self, charge: QuotaHold | None, meters: Sequence[Quota | None] | None) -> Ask:
        """The request, with what its task says. `meters` limit its models, in their order."""
        ask, section = next(iter(self.asks.values())).copied(), self._ladder.task.section
        by_model = dict(zip(self.asks, meters or [None] * len(self.asks), strict=True))
        ask.rungs = Rungs(self.asks, by_model, self._ladder.choice(self._served_as))
        ask.charge = charge
        if charge is not None and ask.peeked is not None:
            charge.tokens_asked = peek.tokens_asked(ask.peeked.fields)
        ask.budget_s = smaller(ask.budget_s, section.budget_s)
        return ask
