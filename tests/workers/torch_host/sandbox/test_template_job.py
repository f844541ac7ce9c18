"""What templates see, beside what Transformers shows them; and work that does not end in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.torch_host.sandbox.deadline import DeadlineExceeded, run_with_deadline
from greenroom.workers.torch_host.sandbox.pool import SandboxPool
from greenroom.workers.torch_host.text.templates import COMPLAINT_CHARS_MAX, ChatTemplate
from greenroom.workers.torch_host.text.tokens import TextCodec
from tests.waiting import until
from tests.workers.torch_host.samples.chat_templates import (
    CONVERSATIONS,
    DEEPER_MISTAKES,
    FAMILIES,
    MISTAKES,
    SWITCHES,
    TODAY,
    TOOLS,
)

CONTEXT = 2**20
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


def theirs(text: TextCodec, messages: Messages, tools: Tools, switches: Mapping[str, Any]) -> str:
    """What Transformers makes of it, or says about it."""
    apply = text.tokenizer.apply_chat_template
    try:
        return str(apply(list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **switches))
    except Exception as error:
        return f"refused these messages: {str(error)[:COMPLAINT_CHARS_MAX]}"


async def ours(template: ChatTemplate, messages: Messages, tools: Tools, switches: Mapping[str, Any]) -> str:
    try:
        return await template.render(messages, tools, switches, CONTEXT)
    except ApiError as refused:
        assert (refused.status, refused.code) == (400, "template_failed")
        return refused.message[refused.message.index("refused these") :]


@pytest.fixture
def text(byte_text: TextCodec, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextCodec]:
    """A test may give its tokenizer another template; other tests find its own again."""
    # The tokenizer has setters of its own, and keeps this where they put it.
    monkeypatch.setitem(byte_text.tokenizer._special_tokens_map, "bos_token", "<s>")
    before = byte_text.tokenizer.chat_template
    yield byte_text
    byte_text.tokenizer.chat_template = before


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_template_writes_as_in_transformers(text: TextCodec, templates: SandboxPool, family: str) -> None:
    text.tokenizer.chat_template = FAMILIES[family]
    template = ChatTemplate(text, templates)
    written = set()
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for switches in SWITCHES:
                wanted = theirs(text, messages, tools, switches)
                assert await ours(template, messages, tools, switches) == wanted
                written.add(wanted)
    # It has said something of its own to each of several conversations.
    assert len({prompt for prompt in written if "refused these" not in prompt}) > (family != "white space")


@pytest.mark.parametrize("source", MISTAKES)
async def test_a_failing_template_says_what_transformers_says(
    text: TextCodec, templates: SandboxPool, source: str
) -> None:
    text.tokenizer.chat_template = source
    wanted = theirs(text, CONVERSATIONS["long"], None, {})
    assert await ours(ChatTemplate(text, templates), CONVERSATIONS["long"], None, {}) == wanted


@pytest.mark.parametrize("source", DEEPER_MISTAKES)
async def test_a_template_fails_as_in_transformers(text: TextCodec, templates: SandboxPool, source: str) -> None:
    text.tokenizer.chat_template = source
    assert theirs(text, CONVERSATIONS["short"], None, {}).startswith("refused these")
    assert (await ours(ChatTemplate(text, templates), CONVERSATIONS["short"], None, {})).startswith("refused these")


async def test_the_date_is_todays(text: TextCodec, templates: SandboxPool) -> None:
    text.tokenizer.chat_template = TODAY
    messages = CONVERSATIONS["short"]
    before = theirs(text, messages, None, {})
    written = await ours(ChatTemplate(text, templates), messages, None, {})
    # Midnight may lie between.
    assert written in (before, theirs(text, messages, None, {}))


async def test_of_several_templates_the_one_for_tools_is_taken_with_tools(
    text: TextCodec, templates: SandboxPool
) -> None:
    named = {"default": "plain {{ tools is none }}", "tool_use": "with {{ tools | length }}", "rag": "never"}
    messages = CONVERSATIONS["short"]
    text.tokenizer.chat_template = named
    template = ChatTemplate(text, templates)
    assert await ours(template, messages, None, {}) == theirs(text, messages, None, {}) == "plain True"
    assert await ours(template, messages, TOOLS, {}) == theirs(text, messages, TOOLS, {}) == "with 2"
    text.tokenizer.chat_template = {"rag": "never"}
    refused = theirs(text, messages, None, {})
    assert "refused these" in refused and "rag" in refused
    assert await ours(template, messages, None, {}) == refused


WAIT_S = 30


def spin() -> None:
    while True:
        pass


async def gone(name: str) -> None:
    """Until no thread of this name is left."""
    await until(lambda: not any(thread.name == name for thread in threading.enumerate()))


async def test_what_the_work_returns_or_raises_comes_back() -> None:
    assert await run_with_deadline(lambda: 7, WAIT_S, "seven") == 7
    with pytest.raises(KeyError):
        await run_with_deadline(lambda: {}["x"], WAIT_S, "missing")
    with pytest.raises(TimeoutError):
        await run_with_deadline(raise_timeout, WAIT_S, "its own timeout")


def raise_timeout() -> None:
    raise TimeoutError


async def test_work_that_loops_is_ended_and_its_thread_is_gone() -> None:
    with pytest.raises(DeadlineExceeded):
        await run_with_deadline(spin, 0.05, "spinning")
    await gone("spinning")


async def test_work_that_catches_every_exception_is_ended_too() -> None:
    def stubborn() -> None:
        while True:
            try:
                spin()
            except Exception:
                continue

    with pytest.raises(DeadlineExceeded):
        await run_with_deadline(stubborn, 0.05, "stubborn")
    await gone("stubborn")


async def test_work_that_sleeps_is_ended_when_it_wakes() -> None:
    with pytest.raises(DeadlineExceeded):
        await run_with_deadline(lambda: [time.sleep(0.2) for _ in range(1000)], 0.05, "sleeping")
    await gone("sleeping")


async def test_work_ends_when_its_caller_is_cancelled() -> None:
    task = asyncio.create_task(run_with_deadline(spin, WAIT_S, "cancelled"))
    await until(lambda: any("cancelled" in thread.name for thread in threading.enumerate()), "it has begun")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone("cancelled")
