"""llama.cpp's own HTTP server from the xllamacpp wheel, as a program with llama-server's options.

Owns the table that turns a `llama-server` command line into xllamacpp's parameters, so that engines build one argument
list for the binary and for this. Run by path in a child process: imports the standard library and xllamacpp only. Never
handles a request itself, and only resets signals to their defaults.

Exit codes: 1 the model could not be loaded or the address not taken, 2 an option was not understood, 3 no xllamacpp.
Read `OPTIONS` first, then `main`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LOAD_FAILED, BAD_OPTION, NOT_INSTALLED = 1, 2, 3

# By default llama.cpp caches prompts in up to 8 GiB of RAM, which no plan accounts for.
CACHE_RAM_MIB = 64
# The number llama.cpp itself takes for `--parallel -1`.
PARALLEL_AUTO = 4
# llama.cpp logs from its own thread: time for its lines about a failure to appear before ours.
LOG_DRAIN_S = 0.1
# llama.cpp's own: tokens computed at once.
UBATCH = 512
GPU_LAYERS = {"auto": -1, "all": -2}
REASONING = {"auto": -1, "off": 0, "on": 1}

# Where the library's defaults differ from the program's, or from what a gateway needs.
DEFAULTS: dict[str, Any] = {
    # The gateway has planned the memory: the engine must not change its size.
    "fit_params": False,
    "cache_ram_mib": CACHE_RAM_MIB,
    # Slots share the whole context instead of dividing it.
    "kv_unified": True,
    "ui": False,
    # Only the gateway talks to this address; pages from other origins may not.
    "cors_origins": "localhost",
    "n_parallel": PARALLEL_AUTO,
}

Read = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class ServerOption:
    """One option of llama-server: its spellings, the parameters it sets, and how its value is read. A switch takes no
    value: it has `always`."""

    names: tuple[str, ...]
    targets: tuple[str, ...]
    read: Read
    always: str | None = None


def option(names: str, targets: str, read: Read) -> ServerOption:
    return ServerOption(tuple(names.split()), tuple(targets.split()), read)


def switch(names: str, target: str, always: str = "on", read: Read | None = None) -> ServerOption:
    return ServerOption(tuple(names.split()), (target,), read or on_off, always)


def either(on: str, off: str, target: str, *, inverted: bool = False) -> tuple[ServerOption, ServerOption]:
    """The two switches of a yes-or-no parameter; inverted where the parameter says what is *not* done."""
    return switch(on, target, "off" if inverted else "on"), switch(off, target, "on" if inverted else "off")


def constant(kind: str, prefix: str, **renamed: str) -> Read:
    """Reads the name of an xllamacpp constant as llama-server spells it: `q8_0` is `ggml_type.GGML_TYPE_Q8_0`."""

    def read(text: str) -> Any:
        import xllamacpp

        name = prefix + renamed.get(text, text).upper().replace("-", "_").replace("+", "_")
        value = getattr(getattr(xllamacpp, kind), name, None)
        if value is None:
            raise ValueError("no such choice")
        return value

    return read


def gpu_layers(text: str) -> int:
    return GPU_LAYERS[text] if text in GPU_LAYERS else int(text)


def on_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("on or off")
    return text == "on"


def parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def fractions(text: str) -> list[float]:
    """A share for each GPU, padded with zeros to the length the library expects."""
    import xllamacpp

    shares, room = [float(part) for part in text.split(",")], len(xllamacpp.CommonParams().tensor_split)
    if len(shares) > room:
        raise ValueError(f"more than {room} shares")
    return shares + [0.0] * (room - len(shares))


def template_arguments(text: str) -> dict[str, str]:
    # llama.cpp keeps each value as the JSON it was written in.
    return {key: json.dumps(value) for key, value in dict(json.loads(text)).items()}


def scaled_adapters(text: str) -> list[Any]:
    """FILE:SCALE, with commas between several."""
    pairs = [part.rpartition(":") for part in parts(text)]
    return [adapter(path, float(scale)) for path, _, scale in pairs]


def adapter(path: str, scale: float) -> Any:
    import xllamacpp

    made = xllamacpp.CommonAdapterLoraInfo()
    made.path, made.scale = path, scale
    return made


flash_attention = constant("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", on="enabled", off="disabled")
pooling = constant("llama_pooling_type", "LLAMA_POOLING_TYPE_")
cache_type = constant("ggml_type", "GGML_TYPE_")
load_mode = constant("llama_load_mode", "LLAMA_LOAD_MODE_", dio="direct_io")
split_mode = constant("llama_split_mode", "LLAMA_SPLIT_MODE_")
rope_scaling = constant("llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_")
reasoning_format = constant("common_reasoning_format", "COMMON_REASONING_FORMAT_")
speculative_type = constant("common_speculative_type", "COMMON_SPECULATIVE_TYPE_")
numa = constant("ggml_numa_strategy", "GGML_NUMA_STRATEGY_")

# fmt: off
OPTIONS: tuple[ServerOption, ...] = (
    # What is served, and where.
    option("--model -m", "model.path", str),
    option("--alias -a", "model_alias", lambda text: set(parts(text))),
    option("--lora", "lora_adapters", lambda text: [adapter(path, 1.0) for path in parts(text)]),
    option("--lora-scaled", "lora_adapters", scaled_adapters),
    option("--model-draft -md --spec-draft-model", "speculative.draft.mparams.path", str),
    option("--spec-type", "speculative.types", lambda text: [speculative_type(part) for part in parts(text)]),
    option("--n-gpu-layers-draft --gpu-layers-draft -ngld", "speculative.draft.n_gpu_layers", gpu_layers),
    option("--mmproj -mm", "mmproj.path", str),
    option("--host", "hostnames", parts),
    option("--port", "port", int),
    option("--api-key", "api_keys", parts),
    option("--api-prefix", "api_prefix", str),
    option("--timeout -to", "timeout_read timeout_write", int),
    option("--threads-http", "n_threads_http", int),
    option("--sse-ping-interval", "sse_ping_interval", int),
    option("--cors-origins", "cors_origins", str),
    # What it does.
    switch("--embedding --embeddings", "embedding"),
    option("--pooling", "pooling_type", pooling),
    option("--embd-normalize", "embd_normalize", int),
    *either("--jinja", "--no-jinja", "use_jinja"),
    option("--chat-template", "chat_template", str),
    option("--chat-template-file", "chat_template", lambda path: Path(path).read_text(encoding="utf-8")),
    option("--chat-template-kwargs", "default_template_kwargs", template_arguments),
    option("--reasoning -rea", "enable_reasoning", REASONING.__getitem__),
    option("--reasoning-format", "reasoning_format", reasoning_format),
    option("--reasoning-budget", "sampling.reasoning_budget_tokens", int),
    option("--n-predict --predict -n", "n_predict", int),
    option("--seed -s", "sampling.seed", int),
    option("--temp --temperature", "sampling.temp", float),
    option("--top-k", "sampling.top_k", int),
    option("--top-p", "sampling.top_p", float),
    option("--min-p", "sampling.min_p", float),
    option("--typical --typical-p", "sampling.typ_p", float),
    option("--repeat-last-n", "sampling.penalty_last_n", int),
    option("--repeat-penalty", "sampling.penalty_repeat", float),
    option("--presence-penalty", "sampling.penalty_present", float),
    option("--frequency-penalty", "sampling.penalty_freq", float),
    switch("--special -sp", "special"),
    # Context and batches.
    option("--ctx-size -c", "n_ctx", int),
    option("--parallel -np", "n_parallel", int),
    option("--batch-size -b", "n_batch", int),
    option("--ubatch-size -ub", "n_ubatch", int),
    option("--keep", "n_keep", int),
    *either("--kv-unified -kvu", "--no-kv-unified -no-kvu", "kv_unified"),
    *either("--cont-batching -cb", "--no-cont-batching -nocb", "cont_batching"),
    *either("--context-shift", "--no-context-shift", "ctx_shift"),
    *either("--cache-prompt", "--no-cache-prompt", "cache_prompt"),
    option("--cache-reuse", "n_cache_reuse", int),
    option("--cache-ram -cram", "cache_ram_mib", int),
    option("--cache-type-k -ctk", "cache_type_k", cache_type),
    option("--cache-type-v -ctv", "cache_type_v", cache_type),
    option("--ctx-checkpoints --swa-checkpoints -ctxcp", "n_ctx_checkpoints", int),
    option("--slot-save-path", "slot_save_path", str),
    option("--slot-prompt-similarity -sps", "slot_prompt_similarity", float),
    option("--rope-scaling", "rope_scaling_type", rope_scaling),
    option("--rope-freq-base", "rope_freq_base", float),
    option("--rope-freq-scale", "rope_freq_scale", float),
    option("--yarn-orig-ctx", "yarn_orig_ctx", int),
    switch("--swa-full", "swa_full"),
    # Devices and memory.
    option("--n-gpu-layers --gpu-layers -ngl", "n_gpu_layers", gpu_layers),
    option("--split-mode -sm", "split_mode", split_mode),
    option("--tensor-split -ts", "tensor_split", fractions),
    option("--override-tensor -ot", "tensor_buft_overrides", str),
    option("--main-gpu -mg", "main_gpu", int),
    option("--flash-attn -fa", "flash_attn_type", flash_attention),
    option("--fit -fit", "fit_params", on_off),
    option("--load-mode -lm", "load_mode", load_mode),
    # Old spellings of --load-mode, still what most command lines say.
    switch("--mmap", "load_mode", "mmap", load_mode),
    switch("--no-mmap", "load_mode", "none", load_mode),
    switch("--mlock", "load_mode", "mmap+mlock", load_mode),
    option("--numa", "numa", numa),
    *either("--kv-offload -kvo", "--no-kv-offload -nkvo", "no_kv_offload", inverted=True),
    *either("--op-offload", "--no-op-offload", "no_op_offload", inverted=True),
    *either("--repack", "--no-repack -nr", "no_extra_bufts", inverted=True),
    *either("--mmproj-offload", "--no-mmproj-offload", "mmproj_use_gpu"),
    *either("--warmup", "--no-warmup", "warmup"),
    switch("--check-tensors", "check_tensors"),
    switch("--offline", "offline"),
    option("--threads -t", "cpuparams.n_threads", int),
    option("--threads-batch -tb", "cpuparams_batch.n_threads", int),
    option("--poll", "cpuparams.poll", int),
    # What it shows.
    *either("--ui --webui", "--no-ui --no-webui", "ui"),
    *either("--slots", "--no-slots", "endpoint_slots"),
    switch("--metrics", "endpoint_metrics"),
    switch("--props", "endpoint_props"),
    option("--verbosity --log-verbosity -lv", "verbosity", int),
)
# fmt: on


class BadOption(Exception):
    """The command line asks for something that cannot be had."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of two screens of usage: this ends in a log ring, and its last line in an error message."""
        if message.startswith("unrecognized"):
            message += "; the embedded llama.cpp does not know them, a llama-server on PATH may"
        raise BadOption(message)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options as {parameter: value} in `given`, plus the switches that mean more than one parameter."""
    parser = Parser(prog="llama.cpp", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    parser.set_defaults(given={}, rerank=False)
    for entry in OPTIONS:
        parser.add_argument(*entry.names, action=Given, entry=entry, nargs=None if entry.always is None else 0)
    parser.add_argument("--reranking", "--rerank", dest="rerank", action="store_true")
    return parser.parse_args(list(argv))


class Given(argparse.Action):
    """Notes what an option says under each parameter it sets; the last one wins, as in llama-server."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, entry: ServerOption, **rest: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, **rest)
        self.entry = entry

    def __call__(self, parser: argparse.ArgumentParser, into: argparse.Namespace, text: Any, name: Any = None) -> None:
        said = text if self.entry.always is None else self.entry.always
        try:
            value = self.entry.read(said)
        except (LookupError, ValueError, TypeError, OSError) as reason:
            raise argparse.ArgumentError(self, f"{said!r} cannot be used ({reason})") from None
        for target in self.entry.targets:
            into.given[target] = value


def parameters(options: argparse.Namespace) -> Any:
    """xllamacpp's parameters: our defaults, then what was given, then what follows from it. Raises BadOption."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    for target, value in (DEFAULTS | options.given | implied(options)).items():
        *owners, name = target.split(".")
        holder = params
        for owner in owners:
            holder = getattr(holder, owner)
        try:
            setattr(holder, name, value)
        except (TypeError, ValueError, OverflowError, AssertionError) as reason:
            raise BadOption(f"{target} cannot be {value!r}: {reason}") from None
    return params


def implied(options: argparse.Namespace) -> dict[str, Any]:
    """What llama-server makes of its options beyond setting one parameter each."""
    given, follows = options.given, {}
    if "cpuparams.n_threads" in given and "cpuparams_batch.n_threads" not in given:
        follows["cpuparams_batch.n_threads"] = given["cpuparams.n_threads"]
    if given.get("n_parallel", 1) < 0:
        follows["n_parallel"] = PARALLEL_AUTO
    if (thinks := given.get("enable_reasoning", -1)) >= 0:
        told = given.get("default_template_kwargs", {})
        follows["default_template_kwargs"] = {"enable_thinking": json.dumps(bool(thinks)), **told}
    if options.rerank:
        follows |= {"embedding": True, "pooling_type": pooling("rank")}
    if options.rerank or given.get("embedding"):
        # An embedding is computed in one piece, so a batch may not hold more than is computed at once.
        follows["n_batch"] = given.get("n_ubatch", UBATCH)
    return follows


def fail(code: int, message: str) -> NoReturn:
    """End with one clear last line. Not sys.exit: threads that llama.cpp left behind could hold up an ordinary exit."""
    if code == LOAD_FAILED:
        time.sleep(LOG_DRAIN_S)
    say(message)
    os._exit(code)


def say(message: str) -> None:
    sys.stderr.write(f"llama.cpp: {message}\n")
    sys.stderr.flush()


def main(argv: Sequence[str]) -> NoReturn:
    # A parent may have left these ignored or Python may turn them into exceptions; the default action ends us in 3 ms.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import xllamacpp
    except ImportError as reason:
        if isinstance(reason, ModuleNotFoundError) and reason.name == "xllamacpp":
            fail(
                NOT_INSTALLED,
                "xllamacpp is not installed; pip install 'greenroom[llamacpp]' or put llama-server on PATH",
            )
        fail(NOT_INSTALLED, f"xllamacpp cannot be imported: {reason}")
    try:
        options = parse(argv)
        params = parameters(options)
    except BadOption as reason:
        fail(BAD_OPTION, str(reason))
    model = options.given.get("model.path")
    if not model:
        fail(BAD_OPTION, "--model is missing")
    if not os.path.isfile(model):
        fail(LOAD_FAILED, f"there is no file {model}")
    try:
        # Answers 503 on its address at once, and returns when the model is loaded.
        server = xllamacpp.Server(params)
    except Exception as reason:
        # The library's own reason is always the same sentence; what happened stands in its log, just above.
        fail(LOAD_FAILED, f"cannot serve {model}, for the reason logged above ({reason})")
    say(f"serving {model} on {server.listening_address}")
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
