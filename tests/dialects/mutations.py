"""Bodies that are almost right: values replaced, dropped and doubled at random places, and bytes that were cut."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 1.5, 1e308, "", "x", "\x00", "\ud83d\ude00", "5m"),
    *(
        [],
        [[]],
        [None],
        {},
        {"type": "text"},
        {"type": "nothing"},
        {"": {}},
        [{"type": "text", "text": 7}],
        "a" * 5_000,
    ),
)


def mutations(seeds: list[dict[str, Any]], count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` bodies, the same ones for the same seed. The model stays named more often than not."""
    source = random.Random(seed)
    for _ in range(count):
        body = copy.deepcopy(source.choice(seeds))
        for _ in range(source.randint(1, 3)):
            _change(source, body)
        if source.random() < 0.8:
            body["model"] = seeds[0]["model"]
        data = json.dumps(body).encode()
        if source.random() < 0.1:
            at = source.randrange(len(data))
            data = data[:at] + bytes([source.randrange(256)]) + data[at + 1 :] if source.random() < 0.5 else data[:at]
        yield data


def _change(source: random.Random, body: Any) -> None:
    places = list(_places(body))
    if not places:
        return
    holder, key = source.choice(places)
    way = source.random()
    if way < 0.6:
        holder[key] = copy.deepcopy(source.choice(ODD))
    elif way < 0.8:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}x"] = copy.deepcopy(holder[key])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield value, key
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield value, index
            yield from _places(inner)
