"""What a matrix means, written out in full: slow, and plain enough to be believed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from greenroom.core.model import ModelId
from greenroom.core.policy.language import AllOf, AnyOf, Expression, Name, leaves, parse
from greenroom.core.policy.matrix import COST_DEFAULT, Matrix


def companies(spec: Matrix, expression: Expression, definitions: Mapping[str, Expression]) -> set[frozenset[ModelId]]:
    """Every combination of models that a set allows; any part of one is allowed too."""
    if isinstance(expression, Name):
        return {frozenset({spec.model(expression.text)})}
    if isinstance(expression, AnyOf):
        return set().union(*(companies(spec, part, definitions) for part in expression.parts))
    if isinstance(expression, AllOf):
        choices = itertools.product(*(companies(spec, part, definitions) for part in expression.parts))
        return {frozenset().union(*chosen) for chosen in choices}
    return companies(spec, definitions[expression.text], definitions)


class Expansion:
    def __init__(self, spec: Matrix) -> None:
        definitions = {name: parse(name, text) for name, text in spec.sets}
        self.written = [
            spec.model(leaf.text)
            for expression in definitions.values()
            for leaf in leaves(expression)
            if isinstance(leaf, Name)
        ]
        self.families = [companies(spec, expression, definitions) for expression in definitions.values()]
        self.costs = {spec.model(name): cost for name, cost in spec.costs.items()}

    def is_allowed(self, together: frozenset[ModelId]) -> bool:
        return len(together) <= 1 or any(together <= company for family in self.families for company in family)

    def cost(self, models: frozenset[ModelId]) -> int:
        return sum(self.costs.get(model, COST_DEFAULT) for model in models)

    def leavers(
        self, newcomer: ModelId, present: Sequence[ModelId], staying: frozenset[ModelId]
    ) -> frozenset[ModelId] | None:
        others = frozenset(present) - {newcomer}
        found = [
            min(answers, key=lambda leaving: (self.cost(leaving), [model in leaving for model in self.written]))
            for family in self.families
            if (answers := list(self._answers(family, newcomer, others, staying)))
        ]
        if newcomer not in self.written and not others & staying:
            found.append(others)
        # The first of those that cost the same.
        return min(found, key=self.cost, default=None)

    def _answers(
        self,
        family: set[frozenset[ModelId]],
        newcomer: ModelId,
        others: frozenset[ModelId],
        staying: frozenset[ModelId],
    ) -> Iterator[frozenset[ModelId]]:
        for company in family:
            if newcomer in company and not (others - company) & staying:
                yield others - company
