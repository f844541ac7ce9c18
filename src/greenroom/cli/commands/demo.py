"""`greenroom demo`: two real, small models under a budget that holds one of them at a time. Owns the demo's
configuration, which exists in memory only, and the greeting for newcomers. `demo_models.py` makes the models."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from greenroom.cli import failures, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.commands.serve import Overrides, add_override_options
from greenroom.cli.failures import CommandFailed
from greenroom.errors import StateDirBusy

if TYPE_CHECKING:
    from greenroom.app import App
    from greenroom.cli.demo_models import DemoModel
    from greenroom.config.schema import Config, Model


PORT_MAX: Final = 65_535
THREADS_MAX: Final = 4
# What SmolLM2's makers recommend; it rambles otherwise.
SAMPLING: Final = ("--temp", "0.2", "--top-p", "0.9")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_override_options(parser)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    _need_llama_cpp()
    return serve_models(_prepared(), Overrides.of(args), began)


def serve_models(models: Sequence[DemoModel], said: Overrides, began: float) -> int:
    """Serve until told to stop. Raises CommandFailed if another demo serves this port, and what serving raises."""
    # Until the gateway handles signals itself.
    with failures.end_at_once():
        from greenroom.cli import serving

        plan = serving.ServePlan(configuration(models, said), lambda app: _greet(app, time.monotonic() - began))
        try:
            return serving.serve(plan)
        except StateDirBusy as busy:
            if said.state_dir is not None:
                raise
            raise CommandFailed(_served_already(plan.config), details=busy.message) from None


COMMAND = Subcommand(
    "demo",
    "Fetch two small models once (180 MB) and serve them: smollm2 (chat) and minilm (embeddings).",
    add_options,
    run,
)


def _served_already(config: Config) -> str:
    """The user did not choose the demo's state directory, so the message is about the port."""
    port = _port(config)
    other = port + 1 if port < PORT_MAX else port - 1
    return (
        f"a demo serves port {port} already; `{screen.program()} ps` shows it. Stop it, or choose another port: "
        f"--port {other}, or `make serve PORT={other}`"
    )


def _need_llama_cpp() -> None:
    """Raises CommandFailed if llama.cpp is missing, before anything is downloaded."""
    if shutil.which("llama-server") is None and importlib.util.find_spec("xllamacpp") is None:
        raise CommandFailed("the demo needs llama.cpp: pip install 'greenroom[demo]'")


def _prepared() -> list[DemoModel]:
    from greenroom.cli import demo_models

    with contextlib.ExitStack() as stack:
        bar: list[demo_models.ShowProgress] = []

        def say(step: str, done: int, total: int) -> None:
            # Loading the bar takes a moment, and it is not needed if both models are there.
            if not bar:
                bar.append(stack.enter_context(demo_models.progress_bar()))
            bar[0](step, done, total)

        return demo_models.prepare(demo_models.cache_dir(), say)


def configuration(models: Sequence[DemoModel], said: Overrides) -> Config:
    """Both models, and a simulated GPU that holds only the larger one."""
    from greenroom.cli.demo_models import cache_dir
    from greenroom.config import loader
    from greenroom.config.schema import Gpu, LibrarySection

    own = {
        "gpus": (Gpu(memory_mib=max(model.memory_mib for model in models), margin_mib=0),),
        "models": {model.id: _model(model) for model in models},
        "library": LibrarySection(),
    }
    config = said.applied(loader.load(None).config.model_copy(update=own))
    # One directory per port, so that several demos can run beside other gateways.
    state_dir = said.state_dir or str(cache_dir() / f"state-{_port(config)}")
    return config.model_copy(update={"state_dir": state_dir})


def _port(config: Config) -> int:
    from greenroom.config.schema import Server

    return config.server.port or Server().port


def _model(model: DemoModel) -> Model:
    from greenroom.config.schema import Model

    chats = model.kind == "chat"
    return Model(
        path=str(model.path),
        memory_mib=model.memory_mib,
        embedding=not chats,
        # A sentence encoder reads 512 tokens at most, for each of four requests at once.
        ctx_size=4096 if chats else 2048,
        threads=_threads(),
        preload=chats,
        # The first answer warms it up just as well, and the demo swaps often.
        args=("--no-warmup", *(SAMPLING if chats else ())),
        description="SmolLM2 135M Instruct, a chat model" if chats else "all-MiniLM-L6-v2, sentence embeddings",
    )


def _threads() -> int:
    """Half of the cores: llama.cpp's threads wait for each other at every step, so one without a core delays all.
    Models this small do not profit from more than four."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 2))


def _greet(app: App, took_s: float) -> None:
    from greenroom.cli.address import DEFAULT_URL
    from greenroom.cli.serving import shown_url

    url = shown_url(app)
    screen.say(f"greenroom serves smollm2 (chat) and minilm (embeddings) at {url} (in {screen.seconds(took_s)})")
    where = "" if url == DEFAULT_URL else f" --url {url}"
    screen.say(
        f"They do not fit into memory together. Watch them swap in a browser: {url}/ui/ or in another terminal:\n"
    )
    screen.say(f"  {screen.program()} ps --watch{where}")
    screen.say("\nAsk one:\n")
    screen.say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    screen.say("""    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'""")
    screen.say("\nor in Python, with `pip install openai`:\n")
    screen.say("  from openai import OpenAI")
    screen.say(f"  client = OpenAI(base_url='{url}/v1', api_key='none')")
    screen.say("  print(client.embeddings.create(model='minilm', input='Hello').data[0].embedding[:4])")
    screen.say("\nCtrl-C ends it.")
