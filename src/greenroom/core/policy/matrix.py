"""The matrix: sets of models that may be ready together, and what evicting each model costs.

A combination is a group of models that are ready together. It is allowed if some set has a combination that contains
it. For a newcomer the matrix chooses the allowed combination that contains it and every model that cannot leave, at the
lowest cost of evictions. Between sets of equal cost the first one written wins; within a set the models written first
stay. A model in no set comes alone.

The best combination is found without enumerating the set. A set denotes a family of combinations: a model is the family
of itself alone, `|` unites two families, `&` joins each combination of one with each of the other. Enumerated, ten
choices of six are sixty million. But only the few models that are ready or coming matter now. And of combinations that
look the same to the rest of the set, only the heaviest can win. So each part of the set is reduced, from the inside
out, to the combinations worth keeping.

Combinations are bit masks, one bit per model. A model may occur in several parts that are joined by `&`; it counts
once, because masks are joined before they are weighed. The models that a part shares with parts it is joined to are its
`outer` models. Combinations with the same outer models are compared by weight. One is dropped if another contains all
of its outer models and weighs no less without them. If parts share nothing, one combination of each is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from greenroom.core.model import Matrix as Matrix
from greenroom.core.model import ModelId
from greenroom.core.policy.language import AllOf, AnyOf, Expression, Mistake, Name, Reference, in_order, leaves, parse

COST_DEFAULT: Final = 1
# The same few questions recur while requests wait. The cache is cleared when it holds this many.
REMEMBERED_MAX: Final = 1_024
# How many combinations are kept for one part. The best one is hard to find when joined parts share many models that are
# all ready. Beyond this many only the heaviest are kept: the answer is still allowed and found in time, but a cheaper
# one may exist. Seven shared models always fit: they have 128 combinations.
COMBINATIONS_MAX: Final = 128
# Parts of all sets together, each set counted with the sets it refers to.
NODES_MAX: Final = 100_000

_NO_MODELS: Final = (0,)


class ByMatrix:
    def __init__(self, spec: Matrix, combinations_max: int = COMBINATIONS_MAX) -> None:
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
        self._families = tuple(families_of(definitions, order, bit_of_name, combinations_max).values())
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
        combination = self._best_combination(newcomer, others, held)
        if combination is None:
            return None
        return frozenset(model for model in others if not self._bit_of.get(model, 0) & combination)

    def _best_combination(self, newcomer: ModelId, others: frozenset[ModelId], held: frozenset[ModelId]) -> int | None:
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

        The low bits of each weight break ties: they halve from model to model in the order written. So no two
        combinations weigh the same, and the result depends on no other order.
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


# --- families of combinations ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a set: all of its parts together, or one of them."""

    is_together: bool
    bits: int  # Models named directly in this part.
    parts: tuple[int, ...]  # Nested parts, by index; all come before this one.
    support: int  # Every model in it, at any depth.
    inner: int  # Models in more than one of its parts, if those are joined by &.
    outer: int  # Its models that also occur in something it is joined to by &, at any level above.


class Weights(dict[int, int]):
    """The weight of each combination: the sum over its models. The creator sets the weight of each single model."""

    def __missing__(self, mask: int) -> int:
        self[mask] = sum(self[bit] for bit in bits_of(mask))
        return self[mask]


@dataclass(frozen=True, slots=True)
class Family:
    """One set, compiled. The last node is the set itself."""

    nodes: tuple[Node, ...]
    combinations_max: int = COMBINATIONS_MAX

    @property
    def support(self) -> int:
        return self.nodes[-1].support

    def heaviest(self, relevant: int, weights: Weights) -> int:
        """The heaviest combination, restricted to the relevant models."""
        found: list[Sequence[int]] = []
        for node in self.nodes:
            if not node.support & relevant:
                found.append(_NO_MODELS)
            elif node.is_together:
                found.append(self._together(node, found, relevant, weights))
            else:
                found.append(self._one_of(node, found, relevant, weights))
        # Nothing is outside the set itself, so one combination is left.
        return found[-1][0]

    def _one_of(self, node: Node, found: list[Sequence[int]], relevant: int, weights: Weights) -> Sequence[int]:
        masks = [*bits_of(node.bits & relevant), *(mask for part in node.parts for mask in found[part])]
        return self._worth_keeping(masks, node.outer & relevant, weights)

    def _together(self, node: Node, found: list[Sequence[int]], relevant: int, weights: Weights) -> Sequence[int]:
        masks: Sequence[int] = (node.bits & relevant,)
        for part in node.parts:
            joined = [one | other for one in masks for other in found[part]]
            masks = self._worth_keeping(joined, (node.inner | node.outer) & relevant, weights)
        return self._worth_keeping(masks, node.outer & relevant, weights)

    def _worth_keeping(self, masks: Sequence[int], seen: int, weights: Weights) -> Sequence[int]:
        """Drop masks that cannot be part of the heaviest combination. `seen` are the models that the rest can see."""
        if len(masks) == 1:
            return masks
        if not seen:
            return (max(masks, key=weights.__getitem__),)
        kept: list[tuple[int, int, int]] = []
        # A mask that makes another redundant weighs no less, so it comes first.
        for mask in sorted(set(masks), key=weights.__getitem__, reverse=True):
            shared = mask & seen
            alone = weights[mask ^ shared]
            if not any(shared | other == other and alone <= weight for _, other, weight in kept):
                kept.append((mask, shared, alone))
                if len(kept) == self.combinations_max:
                    break
        return [mask for mask, _, _ in kept]


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def families_of(
    definitions: Mapping[str, Expression],
    order: Sequence[str],
    bit_of: Mapping[str, int],
    combinations_max: int = COMBINATIONS_MAX,
) -> dict[str, Family]:
    """Each set compiled, with the sets it refers to, which `order` lists first. Raises Mistake beyond NODES_MAX."""
    place_of = {name: place for place, name in enumerate(order)}
    needed: dict[str, frozenset[str]] = {}
    left = NODES_MAX
    compiled: dict[str, Family] = {}
    for name in order:
        named = [leaf.text for leaf in leaves(definitions[name]) if isinstance(leaf, Reference)]
        needed[name] = frozenset({name}).union(*(needed[other] for other in named))
        builder = _Builder(bit_of)
        for other in sorted(needed[name], key=place_of.__getitem__):
            builder.add_set(other, definitions[other])
        left -= len(builder.nodes)
        if left < 0:
            raise Mistake(name, 1, f"the sets have more than {NODES_MAX:,} parts together")
        compiled[name] = Family(builder.with_outer(), combinations_max)
    return {name: compiled[name] for name in definitions}


class _Builder:
    def __init__(self, bit_of: Mapping[str, int]) -> None:
        self.nodes: list[Node] = []
        self._bit_of = bit_of
        self._place_of: dict[str, int] = {}

    def add_set(self, name: str, expression: Expression) -> None:
        self._place_of[name] = self._add(expression)

    def _add(self, expression: Expression) -> int:
        direct = expression.parts if isinstance(expression, AnyOf | AllOf) else (expression,)
        bits = 0
        places: list[int] = []
        for part in direct:
            if isinstance(part, Name):
                bits |= self._bit_of[part.text]
            else:
                places.append(self._place_of[part.text] if isinstance(part, Reference) else self._add(part))
        self.nodes.append(self._node(not isinstance(expression, AnyOf), bits, tuple(places)))
        return len(self.nodes) - 1

    def _node(self, is_together: bool, bits: int, parts: tuple[int, ...]) -> Node:
        support, inner = bits, 0
        for part in parts:
            inner |= support & self.nodes[part].support
            support |= self.nodes[part].support
        return Node(is_together, bits, parts, support, inner if is_together else 0, outer=0)

    def with_outer(self) -> tuple[Node, ...]:
        """The nodes with `outer` filled in. A set that is used in several places gets the union of all of them."""
        outer = [0] * len(self.nodes)
        for place in reversed(range(len(self.nodes))):
            node = self.nodes[place]
            for part in node.parts:
                outer[part] |= (outer[place] | node.inner) & self.nodes[part].support
        return tuple(replace(node, outer=seen) for node, seen in zip(self.nodes, outer, strict=True))
