"""The matrix: sets of models that may be ready together, and what evicting each model costs.

A company is a group of models that are ready together. It is allowed if some set has a company that contains it. For a
newcomer the matrix chooses the allowed company that contains it and every model that cannot leave, at the lowest cost
of evictions. Between sets of equal cost the first one written wins; within a set the models written first stay. A model
in no set comes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from greenroom.core.model import Matrix as Matrix
from greenroom.core.model import ModelId
from greenroom.core.policy.coresidency.families import COMPANIES_MAX, Weights, families_of
from greenroom.core.policy.coresidency.language import Mistake, Name, in_order, leaves, parse

COST_DEFAULT = 1
# The same few questions recur while requests wait. The cache is cleared when it holds this many.
REMEMBERED_MAX = 1_024


class ByMatrix:
    def __init__(self, spec: Matrix, companies_max: int = COMPANIES_MAX) -> None:
        """Raises Mistake if a set cannot be read, is defined twice, or refers to a missing set or to itself."""
        definitions = {}
        for name, text in spec.sets:
            if name in definitions:
                raise Mistake(name, 1, "is defined twice")
            definitions[name] = parse(name, text)
        order = in_order(definitions)
        names = [leaf.text for each in definitions.values() for leaf in leaves(each) if isinstance(leaf, Name)]
        models = dict.fromkeys(spec.model(name) for name in names)
        # Models written earlier have lower bits.
        self._bit_of = {model: 1 << place for place, model in enumerate(models)}
        self._cost_of = {spec.model(name): cost for name, cost in spec.costs.items()}
        bit_of_name = {name: self._bit_of[spec.model(name)] for name in names}
        self._families = tuple(families_of(definitions, order, bit_of_name, companies_max).values())
        self._remembered: dict[tuple[ModelId, frozenset[ModelId], frozenset[ModelId]], frozenset[ModelId] | None] = {}

    def leavers(
        self, newcomer: ModelId, present: Sequence[ModelId], staying: frozenset[ModelId]
    ) -> frozenset[ModelId] | None:
        others = frozenset(present) - {newcomer}
        question = (newcomer, others, others & staying)
        if question not in self._remembered:
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            self._remembered[question] = self._found(*question)
        return self._remembered[question]

    def _found(
        self, newcomer: ModelId, others: frozenset[ModelId], held: frozenset[ModelId]
    ) -> frozenset[ModelId] | None:
        if newcomer not in self._bit_of:
            return None if held else others
        if not held <= self._bit_of.keys():
            return None
        company = self._best_company(newcomer, others, held)
        if company is None:
            return None
        return frozenset(model for model in others if not self._bit_of.get(model, 0) & company)

    def _best_company(self, newcomer: ModelId, others: frozenset[ModelId], held: frozenset[ModelId]) -> int | None:
        relevant, needed = self._mask({newcomer, *others}), self._mask({newcomer, *held})
        weights = self._weights({newcomer, *others}, needed)
        # The low bits of a weight only encode which model was written first. They do not count between sets.
        order_bits = relevant.bit_count()
        best: int | None = None
        for family in self._families:
            if needed & ~family.support:
                continue
            found = family.heaviest(relevant, weights)
            is_better = best is None or weights[found] >> order_bits > weights[best] >> order_bits
            if found & needed == needed and is_better:
                best = found
        return best

    def _mask(self, models: Iterable[ModelId]) -> int:
        mask = 0
        for model in models:
            mask |= self._bit_of.get(model, 0)
        return mask

    def _weights(self, models: Iterable[ModelId], needed: int) -> Weights:
        """Each model weighs what its eviction costs; a needed model outweighs all that are not needed.

        The low bits of each weight break ties: they halve from model to model in the order written. So no two companies
        weigh the same, and the result depends on no other order.
        """
        costs = {
            self._bit_of[model]: self._cost_of.get(model, COST_DEFAULT) for model in models if model in self._bit_of
        }
        above_all = sum(costs.values()) + 1
        weights = Weights()
        for place, bit in enumerate(sorted(costs)):
            cost = above_all if bit & needed else costs[bit]
            weights[bit] = cost << len(costs) | 1 << (len(costs) - 1 - place)
        return weights
