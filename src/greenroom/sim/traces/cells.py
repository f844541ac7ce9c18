"""The cells of a trace: times of one unit, numbers of tokens, names and priorities. A wrong one is reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite

from greenroom.config.schema import PRIORITY_NAMES
from greenroom.sim.records import Arrivals
from greenroom.sim.traces.columns import SHOWN_CHARS_MAX, plain

TOKENS_MAX = 100_000_000
# A number of more digits is wrong in every column, and is never converted.
DIGITS_MAX = 12
# Older gateways allowed priorities below 0, and their recordings are still around.
PRIORITY_MIN, PRIORITY_MAX = -100, 100
NAME_CHARS_MAX = 256
# Marks an unknown length while reading; and the length used if the file has none at all.
UNKNOWN_LEN = -1
USUAL_LEN = 200
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# Times since 1970 that are in this range are dates from 2000 to 2100.
DATES_S = (946_684_800.0, 4_102_444_800.0)
# Whole numbers without a name for their unit: in JSON they usually are milliseconds, which is believed up to 100
# requests a second; in CSV seconds, which is believed from one request a minute on.
MS_GAP_MIN = 10.0
S_GAP_MAX = 60.0
# Begins the reason for a unit that neither a title nor an option says.
GUESSED = "guessed: "


class WrongCell(ValueError):
    """What is wrong with a row."""


class Times:
    """Times of one file: all of them dates, or all of them numbers of one unit."""

    def __init__(self, title: str, unit: str | None) -> None:
        self._title = title
        self._unit = unit
        self._are_dates: bool | None = None
        self._are_whole = True

    def read(self, text: str) -> float:
        if self._are_dates is None:
            self._are_dates = self._begin(text)
        if self._are_dates:
            return self._date(text)
        value = self._number(text)
        if self._are_whole and not value.is_integer():
            self._are_whole = False
        return value

    def _begin(self, text: str) -> bool:
        try:
            float(text)
        except ValueError:
            # A title `t` promises numbers.
            if plain(self._title) == "t" and not text[:1].isdigit():
                self._number(text)
            if self._unit is not None:
                raise WrongCell(f"{self._title} is {shown(text)}, a date and no number of {self._unit}") from None
            return True
        return False

    def _date(self, text: str) -> float:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise WrongCell(f"{self._title} is {shown(text)}, not a time like 2023-11-16 18:15:46.680") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def _number(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise WrongCell(f"{self._title} is {shown(text)}, not a number") from None
        if not isfinite(value):
            raise WrongCell(f"{self._title} is {shown(text)}, not a finite number")
        if value < 0:
            raise WrongCell(f"{self._title} is {shown(text)}, which is negative")
        return value

    def origin(self, unit: str, why: str) -> str:
        if self._are_dates:
            return f"time from {self._title} ({why})"
        otherwise = "; --time-unit says otherwise" if why.startswith(GUESSED) else ""
        return f"time from {self._title} in {UNIT_NAMES[unit]} ({why}{otherwise})"

    def doubt(self, unit: str, why: str) -> str:
        """Empty unless the unit of whole numbers was guessed."""
        if not (why.startswith(GUESSED) and self._are_whole):
            return ""
        *others, last = (other for other in UNITS_S if other != unit)
        meant = f"--time-unit {unit} confirms it, {', '.join(others)} or {last} says otherwise"
        return f"{self._title} is taken to be in {UNIT_NAMES[unit]} ({why}); {meant}"

    def unit(self, rows: Arrivals, is_json: bool) -> tuple[str, str]:
        """The unit, and why it is that one."""
        if self._are_dates:
            return "s", "dates"
        if self._unit is not None:
            return self._unit, "as given"
        title, named = self._title.lower(), _last_word(self._title)
        if title == "t" or named in UNITS_S:
            return ("s" if title == "t" else named), "by its title"
        for unit, size_s in UNITS_S.items():
            if DATES_S[0] <= rows.first * size_s <= DATES_S[1]:
                return unit, "since 1970"
        if not rows.span:
            return "s", "all at the same time"
        gap = rows.span / max(1, len(rows) - 1)
        if not self._are_whole:
            return "s", f"{GUESSED}they have fractions"
        is_ms = gap >= (MS_GAP_MIN if is_json else S_GAP_MAX)
        one = f"one request every {gap:,.0f}" if gap >= 10 else f"one request every {gap:.2g}"
        if is_ms:
            return "ms", f"{GUESSED}whole numbers, {one} ms rather than s"
        return "s", f"{GUESSED}whole numbers, {one} s rather than ms"


def _last_word(title: str) -> str:
    """`ms` of `timestamp_ms`, `Timestamp ms` and `TimestampMs`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", title)
    return words[-1].lower() if words else ""


class Lengths:
    """Numbers of tokens of one column; the mean is for rows without one."""

    def __init__(self, meaning: str, titles: Mapping[str, str]) -> None:
        self._title = titles.get(meaning, meaning)
        self._known = 0
        self._sum = 0
        self._unknown = 0

    def read(self, text: str) -> int:
        if not text:
            self._unknown += 1
            return UNKNOWN_LEN
        # Tables with gaps are often written with all their numbers as fractions.
        whole = text.removesuffix(".0")
        if not (is_whole(whole) and (tokens := int(whole)) <= TOKENS_MAX):
            raise WrongCell(f"{self._title} is {shown(text)}, not a number of tokens")
        self._known += 1
        self._sum += tokens
        return tokens

    def usual(self) -> tuple[int, str]:
        """The length for rows without one, and a remark on it; the remark is empty if all lengths are known."""
        if not self._unknown:
            return USUAL_LEN, ""
        known = self._known
        usual, why = (round(self._sum / known), "the mean of the others") if known else (USUAL_LEN, "as none is known")
        return usual, f"{self._unknown:,} without {self._title} taken as {usual:,} tokens, {why}"


def shown(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]!r} … ({len(text):,} characters)"


def is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX


def tenant_of(text: str) -> str:
    if len(text) > NAME_CHARS_MAX or not text.isprintable():
        raise WrongCell(f"tenant is not a name of at most {NAME_CHARS_MAX} printable characters")
    return text


def priority_of(text: str, usual: int) -> int:
    if not text:
        return usual
    if text in PRIORITY_NAMES:
        return PRIORITY_NAMES[text]
    if not (is_whole(text.removeprefix("-")) and PRIORITY_MIN <= int(text) <= PRIORITY_MAX):
        words = ", ".join(PRIORITY_NAMES)
        raise WrongCell(f"priority is {shown(text)}, not {words} or {PRIORITY_MIN} to {PRIORITY_MAX}")
    return int(text)
