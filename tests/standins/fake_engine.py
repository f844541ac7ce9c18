"""A program that behaves like an engine, well or badly, as its switches say. Standard library only, quick to start.

    python -I -S fake_engine.py --port 9000 --name alpha --load-s 0.2 --tokens 8 --token-s 0.01 --journal FILE

Answers `GET /health`, `POST /v1/chat/completions` and `/v1/completions` (JSON, and SSE with `"stream": true`),
`/v1/embeddings`, `/v1/rerank`, `/v1/images/…` and `/v1/audio/…`, anything under `/echo/`, and an upgrade on `/ws` that
sends every byte back. `tokens`, `token_s`, `stall_after` and `crash_at` in a request override the switches of that
name. Every answer contains `--name`. A chat whose last message is `tool:NAME:TOWN` is answered with a call of that
tool, one that is `think:WORDS` with these thoughts first.

The journal gets one JSON line per event (start, ready, request, done, cancelled, term, forked, doubled, deaf, listens,
end), so that a test can see from outside that nothing was answered twice and nothing stopped while it answered. `done`
is noted just after the last byte was written, so a client may have its answer a moment before: wait for the line.
"""

from __future__ import annotations

import gc
import os
import sys

if __name__ == "__main__":
    # Run as a program, however isolated: the folder that holds `tests` must be found.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from tests.standins.lean_imports import put_off

    put_off()
    # In a file of its own, because the bytecode of a program itself is never kept.
    from tests.standins.fake_engine_acts import main

    gc.enable()
    main()
