"""The options of `greenroom simulate` and how their values are written. Owns the bounds of each value: what no machine
has is refused here, before anything is read."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from greenroom.core.model import Need
from greenroom.errors import shown

WORKLOADS = ("poisson", "bursty", "agents")

# No machine or workload has more than this: refused, since figures of that size fill the screen and say nothing.
COUNT_MAX = 1_000_000
MIB_MAX = 1_000_000_000
SECONDS_MAX = 31_536_000
# Digits of a whole number.
DIGITS_MAX = 12
TOKENS_PER_S_MIN, TOKENS_PER_S_MAX = 0.001, 1_000_000_000


# Options that only drawn requests have, and options that only a trace has; with their defaults.
OF_DRAWN = {"workload": "poisson", "rate": 1.0, "agents": 8, "seconds": 3600.0}
OF_TRACES = {"stretch": 1.0, "time_unit": None, "skip_unknown": False, "spread": False}


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """The options that were given though nothing here depends on them, and why that is so."""
    others = OF_DRAWN if args.trace else OF_TRACES
    needless = [f"--{name.replace('_', '-')}" for name, usual in others.items() if getattr(args, name) != usual]
    found = {}
    if not args.trace:
        of_others = "rate" if args.workload == "agents" else "agents"
        if getattr(args, of_others) != OF_DRAWN[of_others]:
            found[f"--{of_others}"] = f"--workload is {args.workload}"
    if needless:
        found[", ".join(needless)] = "the requests are those of the trace" if args.trace else "there is no --trace"
    if args.asleep and args.green_room_mib is not None:
        found["--asleep"] = "with --green-room-mib every model can sleep, with all its memory on the host"
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    _add_trace_options(parser)
    parser.add_argument("--workload", choices=WORKLOADS, help="without a trace: how requests arrive")
    parser.add_argument("--rate", type=_above_zero, help="requests a second (poisson, bursty)")
    parser.add_argument("--agents", type=_agents, help="number of loops that alternate models (agents)")
    parser.add_argument("--seconds", type=_above_zero, help="how long requests arrive")
    parser.add_argument("--scheduler", metavar="NAME", help="default, plain or an installed one (default: the file's)")
    parser.add_argument("--policy", metavar="NAMES", help="one, or several such as default,fifo (default: the file's)")
    _add_case_options(parser)
    _add_timing_options(parser)
    parser.add_argument("--seed", type=_seed, default=0, help="seed of all random numbers")
    parser.add_argument("--jobs", type=_one_count, metavar="N", help="cases played at once (default: one per core)")
    parser.add_argument("--out", type=_report, metavar="HTML", help="write a report with plots")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    parser.set_defaults(**OF_DRAWN, **OF_TRACES)


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=_trace, metavar="FILE", help="requests to play, as CSV or lines of JSON")
    parser.add_argument("--stretch", type=_above_zero, help="multiply the trace's times by this")
    parser.add_argument(
        "--time-unit", choices=("s", "ms", "us", "ns"), help="of the trace's times (default: found from the trace)"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--skip-unknown", action="store_true", help="leave out rows for models that are not in the configuration"
    )
    others.add_argument(
        "--spread", action="store_true", help="draw each row's model from the configuration, whatever the trace says"
    )


def _add_case_options(parser: argparse.ArgumentParser) -> None:
    """What is compared: every combination of these. The first value of each is what the others are compared with."""
    parser.add_argument("--gpus", type=_gpus, metavar="COUNTS", help="such as 2, 1..4 or 1,2,4 (default: the file's)")
    parser.add_argument(
        "--gpu-mib",
        type=_mibs,
        metavar="SIZES",
        help="memory of each GPU, such as 24576,81920; 24576..98304 doubles (default: the file's)",
    )
    parser.add_argument(
        "--green-room-mib",
        type=_mibs_from_zero,
        metavar="SIZES",
        help="host memory where models may sleep, such as 0,65536",
    )
    parser.add_argument(
        "--concurrency",
        type=_counts,
        metavar="COUNTS",
        help="requests a model answers at once, such as 4,16; 1..16 doubles (default: the file's)",
    )


def _add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Options for what models take, where the estimate from their size is not good enough."""
    parser.add_argument("--load-s", type=_duration, help="seconds a load takes (default: by the model's size)")
    parser.add_argument("--wake-s", type=_duration, help="seconds a wake takes (default: by the model's size)")
    parser.add_argument(
        "--unload-s", type=_duration, default=1.0, help="seconds until an unloaded model has left (default: 1)"
    )
    parser.add_argument("--sleep-s", type=_duration, default=0.5, help="seconds to fall asleep (default: 0.5)")
    # The gateway gives this to its own simulations: it has measured what a configuration cannot say.
    parser.add_argument(
        "--asleep",
        type=_needs_asleep,
        metavar="FILE",
        default={},
        help='MiB of GPU and host that models hold asleep, as JSON: {"model": [0, 8000]} (default: estimated); '
        "without effect beside --green-room-mib",
    )
    parser.add_argument(
        "--tokens-per-s", type=_speed, help="decoding speed of an answer alone (default: as recorded, or 60)"
    )
    parser.add_argument(
        "--prefill-tokens-per-s", type=_speed, default=2_000.0, help="prefill speed of one prompt (default: 2000)"
    )
    parser.add_argument(
        "--constant-speed", action="store_true", help="answers on the same GPU do not slow each other down"
    )
    parser.add_argument("--loads-at-once", type=_one_count, help="loads that read from disk at once (default: all)")
    parser.add_argument(
        "--patience-s", type=_patience, help="seconds until callers give up (default: server.stream_wait_max_s)"
    )
    parser.add_argument(
        "--jitter", type=_share, default=0.1, help="how much move times vary, as a share (default: 0.1)"
    )


# --- values -----------------------------------------------------------------------------------------------------------


def _trace(text: str) -> str:
    return _path(text, "standard input is /dev/stdin")


def _report(text: str) -> str:
    return _path(text, "figures are printed to standard output; name a file for the report")


def _path(text: str, instead: str) -> str:
    """`-` is not taken as the name of a file: other programs mean standard input or output by it."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give the name of a file, or leave the option out")
    if text == "-":
        raise argparse.ArgumentTypeError(f"{instead} (a file of this name is ./-)")
    return text


def _needs_asleep(path: str) -> dict[str, Need]:
    """What models that can sleep need meanwhile: a JSON object with MiB of GPU and of host for each."""
    found: dict[str, Need] = {}
    for name, mibs in _pairs(path):
        if not (isinstance(mibs, list) and len(mibs) == 2 and all(_is_mib(mib) for mib in mibs)):
            wanted = f"[MiB of GPU, MiB of host] is wanted, whole numbers from 0 to {MIB_MAX:,}"
            raise argparse.ArgumentTypeError(f"{path}: {shown(name)}: {wanted}")
        if name in found:
            raise argparse.ArgumentTypeError(f"{path}: {shown(name)} is there twice")
        found[name] = Need(*mibs)
    return found


def _pairs(path: str) -> _Pairs:
    """The names and values of the JSON object in this file. Raises ArgumentTypeError."""
    where = ""
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_Pairs)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: it is not UTF-8") from error
    except json.JSONDecodeError as error:
        said, where = None, f": it is wrong at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        # A number of thousands of digits, or thousands of brackets.
        said = None
    if not isinstance(said, _Pairs):
        raise argparse.ArgumentTypeError(f'{path} is no JSON object such as {{"model": [0, 8000]}}{where}')
    return said


class _Pairs(tuple[tuple[str, object], ...]):
    """A JSON object as it is written: a name may be there twice."""


def _is_mib(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MIB_MAX


def _from_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _above_zero(text: str) -> float:
    value = _from_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too little")
    return value


def _share(text: str) -> float:
    value = _from_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share below 1")
    return value


def _duration(text: str) -> float:
    value = _from_zero(text)
    if value > SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} s is more than a year ({SECONDS_MAX:,} s)")
    return value


def _patience(text: str) -> float:
    _above_zero(text)
    return _duration(text)


def _speed(text: str) -> float:
    value = _above_zero(text)
    if not TOKENS_PER_S_MIN <= value <= TOKENS_PER_S_MAX:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {TOKENS_PER_S_MIN} and {TOKENS_PER_S_MAX:,} tokens a second"
        )
    return value


def _whole(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    # Digits are counted first: converting very many of them takes long.
    if len(text) > DIGITS_MAX or int(text) > high:
        raise argparse.ArgumentTypeError(f"{_shortened(text)} is more than {high:,}")
    if int(text) < low:
        raise argparse.ArgumentTypeError(f"{text} is too few: {low} at least")
    return int(text)


def _shortened(text: str) -> str:
    return text if len(text) <= DIGITS_MAX else f"{text[:DIGITS_MAX]}…"


def _one_count(text: str) -> int:
    return _whole(text, 1, COUNT_MAX)


def _agents(text: str) -> int:
    from greenroom.sim.workloads import AGENTS_MAX

    return _whole(text, 1, AGENTS_MAX)


def _seed(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX):
        raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is not a whole number of at most {DIGITS_MAX} digits")
    return int(text)


def _gpus(text: str) -> list[int]:
    """`2`, `1,2,4` or `1..4`."""
    from greenroom.sim.cases import GPUS_MAX

    ends = _items(text, 1, GPUS_MAX)
    return list(range(ends[0], ends[1] + 1)) if ".." in text else ends


def _counts(text: str) -> list[int]:
    """`16`, `4,16`, or `1..16`, which doubles: 1, 2, 4, 8, 16."""
    return _doubled(text, 1, COUNT_MAX)


def _mibs(text: str) -> list[int]:
    return _doubled(text, 1, MIB_MAX)


def _mibs_from_zero(text: str) -> list[int]:
    """As `_mibs`; a list may hold 0."""
    first, *others = _items(text, 0, MIB_MAX)
    if ".." in text and first == 0:
        wanted = f"a list such as 0,{others[0]}" if others[0] else "0"
        raise argparse.ArgumentTypeError(f"{text} cannot begin with 0, since it doubles: write {wanted}")
    return _doubled(text, 0, MIB_MAX)


def _doubled(text: str, low: int, high: int) -> list[int]:
    items = _items(text, low, high)
    if ".." not in text:
        return items
    value, end = items
    found = []
    while value < end:
        found.append(value)
        value *= 2
    return [*found, end]


def _items(text: str, low: int, high: int) -> list[int]:
    """The values of a list in the order given, each once; or the two ends of a range, which does not go down."""
    is_range = ".." in text
    words = text.split("..", 1) if is_range else text.split(",")
    if not all(word.strip() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} lacks a number: write one, a list (1,2,4) or a range (1..4)")
    values = [_whole(word.strip(), low, high) for word in words]
    if is_range and values[0] > values[1]:
        raise argparse.ArgumentTypeError(f"{text} goes down: write it as a list")
    return values if is_range else list(dict.fromkeys(values))
