"""The lease store without Redis: the very scripts, run by Lua in this process, on tables that any clock may drive.

Owns as much of Redis as the scripts use. Nothing is modelled twice, so that simulation and store cannot drift apart;
the contract suite runs against this one too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from lupa import lua51

from greenroom.leases.shared import stored
from greenroom.leases.shared.redis_store import RedisStore

_US = 1_000_000
# JSON as the scripts know it. In Lua, because there tables need not cross over; what was encoded is known when it is
# decoded again. As everywhere in Lua, what is empty is a map; numbers keep 14 digits.
_JSON = """
local known, count = {}, 0
local function copy(value)
  if type(value) ~= 'table' then return value end
  local made = {}
  for key, one in pairs(value) do made[key] = copy(one) end
  return made
end
local function quoted(text)
  return '"' .. text:gsub('[%c"\\\\]', function(c) return string.format('\\\\u%04x', c:byte()) end) .. '"'
end
local function encode(value)
  local kind = type(value)
  if kind == 'string' then return quoted(value) end
  if kind == 'number' then return string.format(value == math.floor(value) and '%.0f' or '%.14g', value) end
  if kind ~= 'table' then return tostring(value) end
  local parts, size = {}, #value
  for place = 1, size do parts[place] = encode(value[place]) end
  if size > 0 then return '[' .. table.concat(parts, ',') .. ']' end
  for key, one in pairs(value) do parts[#parts + 1] = quoted(tostring(key)) .. ':' .. encode(one) end
  return '{' .. table.concat(parts, ',') .. '}'
end
return function(decoded)
  return {
    encode = function(value)
      local text = encode(value)
      if count > 4096 then known, count = {}, 0 end
      known[text], count = copy(value), count + 1
      return text
    end,
    decode = function(text)
      return known[text] and copy(known[text]) or decoded(text)
    end,
  }
end
"""


class Book:
    """One host's leases. `wall_s` is the clock of the server."""

    def __init__(self, wall_s: Callable[[], float], host: str = "box") -> None:
        self._wall_s = wall_s
        self._keys = stored.keys(host)
        self.hashes: dict[str, dict[str, str]] = {}
        self._sorted: dict[str, dict[str, float]] = {}

    def run(self, operation: str, arguments: bytes) -> bytes:
        return _lua().run(self, operation, self._keys, arguments.decode()).encode()

    def records(self) -> list[dict[str, Any]]:
        """Every lease as it is written down."""
        return [json.loads(text) for text in self.hashes.get(self._keys[1], {}).values()]

    def call(self, command: str, *words: Any) -> Any:
        """One command of Redis. What is not there is False, as scripts see it."""
        return getattr(self, f"_{command.lower()}")(*(_text(word) for word in words))

    # --- commands ---------------------------------------------------------------------------------------------------

    def _time(self) -> list[str]:
        whole_us = int(self._wall_s() * _US)
        return [str(whole_us // _US), str(whole_us % _US)]

    def _hget(self, key: str, name: str) -> str | bool:
        return self.hashes.get(key, {}).get(name, False)

    def _hmget(self, key: str, *names: str) -> list[str | bool]:
        return [self._hget(key, name) for name in names]

    def _hgetall(self, key: str) -> list[str]:
        return [word for pair in self.hashes.get(key, {}).items() for word in pair]

    def _hkeys(self, key: str) -> list[str]:
        return list(self.hashes.get(key, {}))

    def _hvals(self, key: str) -> list[str]:
        return list(self.hashes.get(key, {}).values())

    def _hlen(self, key: str) -> int:
        return len(self.hashes.get(key, {}))

    def _hset(self, key: str, *pairs: str) -> int:
        there = self.hashes.setdefault(key, {})
        new = dict(zip(pairs[::2], pairs[1::2], strict=True))
        added = len(new.keys() - there.keys())
        there.update(new)
        return added

    def _hsetnx(self, key: str, name: str, value: str) -> int:
        return 0 if name in self.hashes.get(key, {}) else self._hset(key, name, value)

    def _hdel(self, key: str, *names: str) -> int:
        return sum(self.hashes.get(key, {}).pop(name, None) is not None for name in names)

    def _hincrby(self, key: str, name: str, more: str) -> int:
        there = self.hashes.setdefault(key, {})
        there[name] = str(int(there.get(name, "0")) + int(more))
        return int(there[name])

    def _zadd(self, key: str, score: str, member: str) -> int:
        there = self._sorted.setdefault(key, {})
        is_new = member not in there
        there[member] = float(score)
        return int(is_new)

    def _zrem(self, key: str, *members: str) -> int:
        return sum(self._sorted.get(key, {}).pop(member, None) is not None for member in members)

    def _zcard(self, key: str) -> int:
        return len(self._sorted.get(key, {}))

    def _zrange(self, key: str, first: str, last: str) -> list[str]:
        assert (first, last) == ("0", "-1"), "only the whole of it is asked for"
        return self._in_order(key)

    def _zrangebyscore(self, key: str, low: str, high: str, limit: str, first: str, most: str) -> list[str]:
        assert (low, limit, first) == ("-inf", "LIMIT", "0"), "only the first few are asked for"
        there = self._sorted.get(key, {})
        return [member for member in self._in_order(key) if there[member] <= float(high)][: int(most)]

    def _in_order(self, key: str) -> list[str]:
        return [member for member, _ in sorted(self._sorted.get(key, {}).items(), key=lambda pair: (pair[1], pair[0]))]


class BookStore(RedisStore):
    """A client of such a book, with all that a client of Redis does. `asks` makes each question take its time."""

    def __init__(self, book: Callable[[], Book], asks: Callable[[Callable[[], bytes]], Any], **more: Any) -> None:
        super().__init__("redis://nowhere", "box", **more)
        self._book = book
        self._asks = asks

    async def _answer(self, operation: str, arguments: bytes) -> bytes:
        said: bytes = await self._asks(lambda: self._book().run(operation, arguments))
        return said


async def at_once(question: Callable[[], bytes]) -> bytes:
    return question()


class _Lua:
    """One interpreter for all books: compiling the scripts takes longer than most simulations."""

    def __init__(self) -> None:
        self._runtime = lua51.LuaRuntime(encoding="utf-8", unpack_returned_tuples=True)
        self._scripts = {name: self._runtime.compile(stored.source(name)) for name in stored.OPERATIONS}
        self._globals = self._runtime.globals()
        self._globals.redis = self._runtime.table_from({"call": self._call})
        self._globals.cjson = self._runtime.execute(_JSON)(self._decode)
        self._book: Book | None = None

    def run(self, book: Book, operation: str, keys: list[str], arguments: str) -> str:
        self._book = book
        self._globals.KEYS = self._runtime.table_from(keys)
        self._globals.ARGV = self._runtime.table_from([arguments])
        said: str = self._scripts[operation]()
        return said

    def _call(self, command: str, *words: Any) -> Any:
        assert self._book is not None
        said = self._book.call(command, *words)
        return self._runtime.table_from(said) if isinstance(said, list) else said

    def _decode(self, text: str) -> Any:
        return self._table(json.loads(text))

    def _table(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._runtime.table_from({name: self._table(one) for name, one in value.items() if one is not None})
        if isinstance(value, list):
            return self._runtime.table_from([self._table(one) for one in value])
        return value


@functools.cache
def _lua() -> _Lua:
    return _Lua()


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def _text(word: Any) -> str:
    return str(_number(word)) if isinstance(word, float) else str(word)
