"""What a set of the matrix means, and its best company for a newcomer, found without enumerating the set.

A company is a group of models that may be ready together. A set denotes a family of companies: a model is the family of
itself alone, `|` unites two families, `&` joins each company of one with each company of the other. Enumerated, ten
choices of six are sixty million companies. But only the few models that are ready or coming matter now. And of
companies that look the same to the rest of the set, only the heaviest can win. So each part of the set is reduced, from
the inside out, to the companies worth keeping.

Companies are bit masks, one bit per model. A model may occur in several parts that are joined by `&`; it counts once,
because masks are joined before they are weighed. The models that a part shares with parts it is joined to are its
`outer` models. Companies with the same outer models are compared by weight. A company is dropped if another one
contains all of its outer models and weighs no less without them. If parts share nothing, one company of each is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from greenroom.core.policy.coresidency.language import AllOf, AnyOf, Expression, Mistake, Name, Reference, leaves

# How many companies are kept for one part. The best one is hard to find when joined parts share many models that are
# all ready. Beyond this many only the heaviest are kept: the answer is still allowed and found in time, but a cheaper
# one may exist. Seven shared models always fit: they have 128 companies.
COMPANIES_MAX = 128
# Parts of all sets together, each set counted with the sets it refers to.
NODES_MAX = 100_000

_NOBODY = (0,)


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
    """The weight of each company: the sum over its models. The creator sets the weight of each single model."""

    def __missing__(self, mask: int) -> int:
        self[mask] = sum(self[bit] for bit in bits_of(mask))
        return self[mask]


@dataclass(frozen=True, slots=True)
class Family:
    """One set, compiled. The last node is the set itself."""

    nodes: tuple[Node, ...]
    companies_max: int = COMPANIES_MAX

    @property
    def support(self) -> int:
        return self.nodes[-1].support

    def heaviest(self, relevant: int, weights: Weights) -> int:
        """The heaviest company, restricted to the relevant models."""
        found: list[Sequence[int]] = []
        for node in self.nodes:
            if not node.support & relevant:
                found.append(_NOBODY)
            elif node.is_together:
                found.append(self._together(node, found, relevant, weights))
            else:
                found.append(self._one_of(node, found, relevant, weights))
        # Nothing is outside the set itself, so one company is left.
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
        """Drop masks that cannot be part of the heaviest company. `seen` are the models that the rest can see."""
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
                if len(kept) == self.companies_max:
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
    companies_max: int = COMPANIES_MAX,
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
        compiled[name] = Family(builder.with_outer(), companies_max)
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
        return tuple(
            Node(node.is_together, node.bits, node.parts, node.support, node.inner, seen)
            for node, seen in zip(self.nodes, outer, strict=True)
        )
