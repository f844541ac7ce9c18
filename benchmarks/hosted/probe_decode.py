"""How fast the torch worker's bare decode loop is on a GPU, and what keeps it from the memory's speed.

    PYTHONPATH=src PYTHON -m benchmarks.hosted.probe_decode --layers 32 --hidden 4096

Builds a Llama of random weights straight on the GPU (no files), checks that paged decoding chooses as Transformers
does, then times batches with captured steps, beside Transformers' own `generate`, and the same through the model's
thread; times prompts; lists the kernels of a step. Every section stands alone: one that fails prints why, and the next
goes on. PYTHON is an interpreter with torch and Transformers. Runs on the CPU too, to be tested.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.rig.result import Run, options_of
from greenroom.workers.torch_host.engine import runner as runner_module
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop, EngineSizes
from greenroom.workers.torch_host.engine.model_shape import BLOCK_TOKENS, blocks_for, kv_bytes
from greenroom.workers.torch_host.engine.requests import End, GenerationRequest, Sampling, Token
from greenroom.workers.torch_host.engine.runner import DecodeRow, ModelRunner, PrefillChunk
from greenroom.workers.torch_host.kernels.attention import IMPLEMENTATION, AttentionKernels, register

WARM_STEPS = 5
ALIGN = 512
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
}


@dataclass
class Flat:
    tensor: torch.Tensor


@dataclass
class FlatWeights:
    """A model whose weights lie in one flat buffer in the order of its layers, as in the worker."""

    module: torch.nn.Module
    config: Any
    device: torch.device
    dtype: torch.dtype
    kv: Flat

    def wait_for_weights(self) -> None:
        """Nothing to wait for: the weights were made on the device."""


def build(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, cache_tokens: int) -> FlatWeights:
    register()
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=8192,
        attn_implementation=IMPLEMENTATION,
    )
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    places, total = [], 0
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                places.append((module, name, total, weight.shape))
                total += -(-weight.numel() * dtype.itemsize // ALIGN) * ALIGN
    arena = torch.empty(total, dtype=torch.uint8, device=device)
    random = torch.Generator(device=device).manual_seed(1)
    for module, name, offset, shape in places:
        weight = arena[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        # Spread wide enough that the likeliest token leads by more than rounding.
        weight.normal_(0, 0.04, generator=random) if len(shape) > 1 else weight.fill_(1)
        module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    kv = torch.empty(kv_bytes(config, dtype.itemsize, cache_tokens), dtype=torch.uint8, device=device)
    print(f"weights {total / 1e9:.2f} GB, KV {kv.numel() / 1e9:.2f} GB for {cache_tokens} tokens")
    return FlatWeights(model, config, device, dtype, Flat(kv))


@contextmanager
def section(title: str) -> Iterator[None]:
    print(f"\n## {title}", flush=True)
    began = time.perf_counter()
    try:
        yield
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print(f"({time.perf_counter() - began:.1f} s)", flush=True)


def reserved(device: torch.device) -> int:
    """Bytes of the device that torch keeps reserved."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Seconds of one call, averaged over so many in a row."""
    settle(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    settle(device)
    return (time.perf_counter() - began) / times


def tables(count: int, tokens: int) -> list[list[int]]:
    width = blocks_for(tokens)
    return [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(count)]


def prompt(tokens: int, vocabulary: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (tokens,), generator=random).tolist()


class Loop:
    """The bare decode loop: prompts are computed, then the likeliest token again and again."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], steps: int) -> None:
        self.runner = runner
        self.longest = max(len(one) for one in prompts)
        table = tables(len(prompts), self.longest + steps + BLOCK_TOKENS)
        first = [
            int(runner.prefill([PrefillChunk(one, 0, table[row], True)]).argmax(-1)) for row, one in enumerate(prompts)
        ]
        self.chosen = [[token] for token in first]
        self.count = len(prompts)
        runner.inputs.set_rows([DecodeRow(first[row], len(one), table[row]) for row, one in enumerate(prompts)])

    def step(self) -> torch.Tensor:
        self.longest += 1
        tokens = self.runner.decode(self.count, self.longest).argmax(-1)
        self.runner.inputs.set_tokens(tokens)
        return tokens

    def note(self) -> None:
        for row, token in zip(self.chosen, self.step().tolist(), strict=True):
            row.append(token)


def check(runner: ModelRunner, model: FlatWeights, vocabulary: int, batch_max: int, steps: int = 24) -> None:
    """Print how often paged decoding chooses as Transformers does."""
    prompts = [prompt(tokens, vocabulary, tokens) for tokens in (9, 64, 200)[:batch_max]]
    loop = Loop(runner, prompts, steps)
    for _ in range(steps):
        loop.note()
    model.module.set_attn_implementation("sdpa")
    try:
        for one, chosen in zip(prompts, loop.chosen, strict=True):
            ids = torch.tensor([one + chosen], device=model.device)
            with torch.no_grad():
                logits = model.module(ids, use_cache=False).logits[0, len(one) - 1 : -1].float()
            # Compared along the same text: how far the chosen token is below the likeliest, in standard deviations.
            picked = logits.gather(1, torch.tensor(chosen, device=model.device)[:, None])[:, 0]
            behind = (logits.max(-1).values - picked) / logits.std(-1)
            same = int((behind == 0).sum())
            print(
                f"prompt {len(one)}: {same}/{len(chosen)} the same choice, at most {float(behind.max()):.3f} sd behind"
            )
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)


def speeds(runner: ModelRunner, device: torch.device, args: argparse.Namespace) -> dict[int, float]:
    """Tokens a second by batch size."""
    rates: dict[int, float] = {}
    for count in args.batches:
        prompts = [prompt(args.prompt, args.vocabulary, row) for row in range(count)]
        loop = Loop(runner, prompts, args.steps + WARM_STEPS)
        began = time.perf_counter()
        loop.step()
        settle(device)
        captured_s = time.perf_counter() - began
        for _ in range(WARM_STEPS - 1):
            loop.step()
        each = timed(device, loop.step, args.steps)
        rates[count] = count / each
        print(
            f"batch {count:4d}: {each * 1e3:7.3f} ms/step, {count / each:9.1f} tokens/s, "
            f"{rates[count] / rates[args.batches[0]]:6.2f} x the first, first step {captured_s:.3f} s",
            flush=True,
        )
    return rates


def prompts_speed(runner: ModelRunner, device: torch.device, vocabulary: int) -> None:
    for count, tokens, past in ((1, 64, 0), (1, 512, 0), (1, 2048, 0), (32, 64, 0), (1, 512, 1024), (8, 128, 512)):
        table = tables(count, tokens + past)
        pieces = [PrefillChunk(prompt(tokens, vocabulary, row), past, table[row], True) for row in range(count)]
        runner.prefill(pieces)
        each = timed(device, lambda pieces=pieces: runner.prefill(pieces), 5)  # type: ignore[misc]
        print(f"{count} x {tokens} tokens after {past}: {each * 1e3:.1f} ms", flush=True)


def generated(model: FlatWeights, count: int, prompt_tokens: int, steps: int, vocabulary: int) -> float:
    """Tokens a second of plain `generate`."""
    model.module.set_attn_implementation("sdpa")
    try:
        ids = torch.tensor([prompt(prompt_tokens, vocabulary, row) for row in range(count)], device=model.device)

        def generate() -> None:
            model.module.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

        generate()
        each = timed(model.device, generate, 1)
        print(f"Transformers generate, batch {count}: {count * steps / each:.1f} tokens/s", flush=True)
        return count * steps / each
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)


class Listener:
    """Notes when the tokens of one sequence came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.over = threading.Event()
        self.end: End | None = None

    def on_token(self, token: Token) -> None:
        self.times.append(time.perf_counter())

    def on_end(self, end: End) -> None:
        self.end = end
        self.over.set()


def threaded(batching: EngineLoop, args: argparse.Namespace, name: str, sampling: Sampling) -> dict[int, float]:
    """All sequences at once, through the model's thread: what the API sees. Gives tokens a second by how many."""
    rates: dict[int, float] = {}
    for count in args.batches:
        for _ in range(2):
            asked = [_asked(args, number, sampling) for number in range(count)]
            began = time.perf_counter()
            for one, _ in asked:
                batching.submit(one)
            for _, listener in asked:
                listener.over.wait()
        ends = {listener.end.reason if listener.end else "?" for _, listener in asked}
        firsts = sorted(listener.times[0] - began for _, listener in asked if listener.times)
        last = max(listener.times[-1] for _, listener in asked if listener.times)
        tokens = sum(len(listener.times) for _, listener in asked)
        decoding = (tokens - count) / (last - firsts[-1] - began)
        rates[count] = tokens / (last - began)
        print(
            f"{name}, {count:4d} at once: {rates[count]:9.1f} tokens/s, {decoding:9.1f} once all decode, "
            f"first token {firsts[0] * 1e3:.0f} to {firsts[-1] * 1e3:.0f} ms, ends {ends}",
            flush=True,
        )
    return rates


def _asked(args: argparse.Namespace, number: int, sampling: Sampling) -> tuple[GenerationRequest, Listener]:
    listener = Listener()
    tokens = prompt(args.prompt, args.vocabulary, number)
    made = GenerationRequest(str(number), tokens, args.steps, sampling, frozenset(), listener, uses_cache=False)
    return made, listener


def kernels(runner: ModelRunner, device: torch.device, count: int, prompt_tokens: int, vocabulary: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    loop = Loop(runner, [prompt(prompt_tokens, vocabulary, row) for row in range(count)], 64)
    for _ in range(WARM_STEPS):
        loop.step()
    settle(device)
    steps = 4
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            loop.step()
        settle(device)
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            number, spent = found.get(event.name, (0, 0.0))
            found[event.name] = (number + 1, spent + event.device_time)
    total = sum(spent for _, spent in found.values()) / steps
    print(
        f"batch {count}: {sum(number for number, _ in found.values()) / steps:.0f} kernels, {total / 1e3:.3f} ms a step"
    )
    for name, (number, spent) in sorted(found.items(), key=lambda item: -item[1][1])[:22]:
        print(f"  {spent / steps:9.1f} us {number / steps:6.1f} x {spent / number:7.2f} us  {name[:110]}")


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    run, figures = Run("probe_decode", args, name, f"torch {torch.__version__}"), dict[str, Any]()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache_tokens = max(max(args.batches) * (args.prompt + args.steps + 64), 8192)
    model = build(args, device, dtype, cache_tokens)
    batch_max, context = max(args.batches), min(8192, cache_tokens)
    plain_fuse = runner_module.fuse_modules
    runner_module.fuse_modules = lambda model: None

    def made(kernels: AttentionKernels | None) -> ModelRunner:
        runner = ModelRunner(model, cache_tokens, batch_max, context)
        if kernels is not None:
            runner = _with(runner, kernels)
        runner.on_wake()
        return runner

    with section("before any module is changed"):
        first = made(None)
        print(f"kernels that work here: {first.kernels}")
        check(first, model, args.vocabulary, batch_max)
        figures["unchanged_per_s"] = speeds(first, device, args)
        del first
    with section("the same without the paged kernel (keys gathered first)"):
        gathered = made(AttentionKernels(packs=device.type == "cuda"))
        check(gathered, model, args.vocabulary, batch_max)
        figures["gathered_per_s"] = speeds(gathered, device, args)
        del gathered
    few_and_many = sorted({1, args.batches[-2] if len(args.batches) > 1 else 1})
    for count in few_and_many:
        with section("Transformers' own generate"):
            rate = generated(model, count, args.prompt, min(args.steps, 64), args.vocabulary)
            figures.setdefault("generate_per_s", {})[count] = rate
    runner_module.fuse_modules = plain_fuse
    with section("as the worker runs it"):
        before = reserved(device)
        whole = made(None)
        check(whole, model, args.vocabulary, batch_max)
        figures["worker_per_s"] = speeds(whole, device, args)
        print(f"graphs keep {(reserved(device) - before) / 2**20:.0f} MiB on the device")
    with section("prompts"):
        prompts_speed(whole, device, args.vocabulary)
    for count in few_and_many:
        with section(f"kernels of a step, batch {count}"):
            kernels(whole, device, count, args.prompt, args.vocabulary)
    del whole
    with section("through the model's thread"):
        batching = EngineLoop(model, EngineSizes(cache_tokens, batch_max, context), on_fatal=print)
        batching.on_wake()
        for title, sampling in SAMPLINGS.items():
            figures.setdefault("thread_per_s", {})[title] = threaded(batching, args, title, sampling)
        batching.close()
    if device.type == "cuda":
        figures["allocated_max_gb"] = torch.cuda.max_memory_allocated() / 1e9
    # A section that failed has left no figures.
    sections = ("unchanged_per_s", "gathered_per_s", "generate_per_s", "worker_per_s", "thread_per_s")
    run.report(figures, {"sections": sections}, all(one in figures for one in sections))


def _with(runner: ModelRunner, kernels: AttentionKernels) -> ModelRunner:
    """The same runner with other kernels; lengths are bucketed finely where keys are gathered."""
    runner.kernels = kernels
    runner._lengths = runner_module.token_sizes(runner.context + BLOCK_TOKENS)
    return runner


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
