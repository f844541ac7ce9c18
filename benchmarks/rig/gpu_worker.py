"""A small Transformers server for benchmarks: a folder of weights, a cache for the whole context, one caller at a time.

    python benchmarks/rig/gpu_worker.py --model FOLDER --ctx-size 8192 --port 9000

Loads with `from_pretrained` in the folder's own dtype, allocates a `StaticCache` for the context, runs one piece of a
prompt and one token before it is ready, and reads prompts in pieces of --ubatch-size tokens: after that its memory does
not grow. A letter is a token. Every answer names its process and what torch holds by part, which splits a figure that
was measured from outside. Never samples, never streams, never checks keys.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

MIB = 1 << 20
BODY_BYTES_MAX = 4 * MIB
NEW_TOKENS_MAX = 256


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Model:
    """The model, its cache and the lock that lets one caller in at a time."""

    def __init__(self, folder: str, context: int, piece: int, spare_mib: int) -> None:
        self._context, self._piece = context, piece
        self._spare = torch.empty(spare_mib * MIB, dtype=torch.uint8, device=device())
        self._lock = threading.Lock()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device()).eval()
        # Scratch memory of the load goes back to the device.
        _empty_cache()
        self._weights = _allocated()
        self._cache = StaticCache(config=self._model.config, max_cache_len=context)
        self.complete([0] * min(piece, context - 1), 1)
        self._kept = _allocated()

    def complete(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The likeliest tokens after this prompt, which is cut to the context."""
        with self._lock, torch.inference_mode():
            self._cache.reset()
            tokens, answer = prompt[-(self._context - new_tokens) :] or [0], list[int]()
            for start in range(0, len(tokens), self._piece):
                token = self._step(tokens[start : start + self._piece])
            while len(answer) < new_tokens:
                answer.append(token)
                token = self._step([token])
            return answer

    def _step(self, tokens: list[int]) -> int:
        ids = torch.tensor([tokens], device=self._model.device)
        # Only the last place is asked for: logits of a whole prompt would be the largest thing in memory.
        logits = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    def memory(self) -> dict[str, float]:
        """What torch holds, in MiB: weights, cache, and what it keeps for work."""
        reserved = torch.cuda.memory_reserved() if device() == "cuda" else 0
        parts = {"weights": self._weights, "cache": self._kept - self._weights, "work": reserved - self._kept}
        return {name: round(size / MIB, 1) for name, size in parts.items()}


def _allocated() -> int:
    return torch.cuda.memory_allocated() if device() == "cuda" else 0


def _empty_cache() -> None:
    if device() == "cuda":
        torch.cuda.empty_cache()


def handler(model: Model) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, {"status": "ok"})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            if length > BODY_BYTES_MAX:
                self.close_connection = True
                return self._answer(413, {"error": {"message": "too long", "code": "too_long"}})
            asked = json.loads(self.rfile.read(length))
            prompt = [letter % 256 for letter in str(asked.get("prompt", "")).encode()]
            answer = model.complete(prompt, min(int(asked.get("max_tokens", 16)), NEW_TOKENS_MAX))
            return self._answer(200, _completion(asked.get("model"), prompt, answer, model.memory()))

        def _answer(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Silent: a health check a second would fill the log."""

    return Handler


def _completion(name: object, prompt: list[int], answer: list[int], memory: dict[str, float]) -> dict[str, Any]:
    choice = {"index": 0, "text": " ".join(map(str, answer)), "finish_reason": "length"}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "total_tokens": len(prompt) + len(answer)}
    worker = {"pid": os.getpid(), "memory_mib": memory}
    return {"object": "text_completion", "model": name, "choices": [choice], "usage": usage, "worker": worker}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--ubatch-size", type=int, default=512)
    parser.add_argument("--spare-mib", type=int, default=0, help="held besides, to stand for a larger model")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    # Several threads would load and merge experts in an order that differs from load to load, and so would the memory
    # that the allocator keeps. Transformers reads this when it loads.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    model = Model(options.model, options.ctx_size, options.ubatch_size, options.spare_mib)
    print(f"ready {json.dumps(model.memory())}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(model)).serve_forever()


if __name__ == "__main__":
    main()
