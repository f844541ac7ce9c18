"""The switches of the fake engine."""

from __future__ import annotations

import argparse
import functools

HUGE_LINE_BYTES = 2 * 1024 * 1024
ERRORS = ("error-429", "error-500", "error-503")
SSE_WEIRD = ("no-done", "no-end", "broken-event", "error-event", "huge-line", "non-sse-200", *ERRORS)


def parse_switches(words: list[str] | None = None) -> argparse.Namespace:
    # With a width that is given, argparse does not ask the terminal for it at each switch.
    width = functools.partial(argparse.HelpFormatter, width=100)
    parser = argparse.ArgumentParser(description="An engine that behaves as its switches say.", formatter_class=width)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--port", type=int)
    place.add_argument("--uds", metavar="PATH")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--name", default="fake", help="every answer contains it")
    parser.add_argument("--journal", metavar="FILE")
    parser.add_argument("--record", action="store_true", help="the journal gets whole requests")
    parser.add_argument("--split-bytes", type=int, default=0, help="events are sent in pieces of this size")
    parser.add_argument("--load-s", type=float, default=0.0, help="/health answers 503 until then")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--say", metavar="TEXT", help="the answer, word by word, instead of its name and numbers")
    parser.add_argument("--token-s", type=float, default=0.0, help="pause before each token")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--memory-file", metavar="FILE", help="accepted and ignored, as engines take a model file")
    parser.add_argument("--crash-at", metavar="load|request|token:N")
    parser.add_argument("--crash-while", metavar="FILE", help="crash at load as long as this file exists")
    parser.add_argument("--exit-code", type=int, default=1, help="of a crash, and of --exit-before-bind")
    parser.add_argument("--exit-before-bind", action="store_true")
    parser.add_argument("--exit-zero-without-listening", action="store_true")
    parser.add_argument("--talkative", action="store_true", help="print the command line and every request's body")
    parser.add_argument("--hang", choices=("load", "serve"), help="accept, never answer")
    parser.add_argument("--hang-at", action="append", default=[], metavar="sleep|wake")
    parser.add_argument("--fail-at", action="append", default=[], metavar="sleep|wake")
    parser.add_argument("--stall-after", type=int, metavar="TOKENS")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--fork-setsid", action="store_true")
    parser.add_argument("--sse-weird", choices=SSE_WEIRD)
    parser.add_argument("--huge-line-bytes", type=int, default=HUGE_LINE_BYTES)
    parser.add_argument("--half-body", action="store_true", help="a JSON answer stops in its middle and never goes on")
    parser.add_argument("--gpu-file", metavar="FILE", help="GPUs to take memory of, as a file probe describes them")
    parser.add_argument("--gpu-mib", type=int, default=0, help="taken at load, shared evenly by the visible GPUs")
    parser.add_argument("--gpu-grow-mib", type=int, default=0, help="taken besides at the first request")
    parser.add_argument("--lock", metavar="FILE", help="one engine at a time may hold it; `doubled` is noted otherwise")
    return parser.parse_args(words)
