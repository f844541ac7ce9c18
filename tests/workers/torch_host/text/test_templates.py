from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.torch_host.sandbox.pool import SandboxPool
from greenroom.workers.torch_host.text.templates import PROGRAM_CHARS_MAX, TEMPLATES, ChatTemplate
from greenroom.workers.torch_host.text.tokens import TextCodec
from tests.waiting import PATIENCE_S, until
from tests.workers.torch_host.samples import tokenizer_folders
from tests.workers.torch_host.text.test_template_runner import running

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CONTEXT = 2048

Maker = Callable[..., ChatTemplate]


@pytest.fixture
def template(tmp_path: Path, templates: SandboxPool) -> Maker:
    """That of a model with this program."""

    def made(source: str | None, deadline_s: float = PATIENCE_S) -> ChatTemplate:
        text = TextCodec.load(tokenizer_folders.byte_level(tmp_path / "odd-model", source))
        return ChatTemplate(text, templates, deadline_s)

    return made


async def test_a_conversation_is_rendered_with_tools_and_switches(byte_text: TextCodec, templates: SandboxPool) -> None:
    made = ChatTemplate(byte_text, templates)
    assert await made.render(HI, None, {}, CONTEXT) == "<|user|>hi\n<|assistant|>"
    assert await made.render(HI, TOOLS, {"shouts": True}, CONTEXT) == "<|user|>hi\nTOOLS look\n!<|assistant|>"


async def test_a_caller_cannot_bring_its_own_program(byte_text: TextCodec, templates: SandboxPool) -> None:
    switches = {"chat_template": "mine", "tokenize": True, "add_generation_prompt": False, "conversation": []}
    switches |= {"messages": [], "tools": TOOLS, "template": "mine"}
    assert await ChatTemplate(byte_text, templates).render(HI, None, switches, CONTEXT) == "<|user|>hi\n<|assistant|>"


async def test_a_template_that_loops_is_stopped_and_named(template: Maker) -> None:
    with pytest.raises(ApiError) as refused:
        await template(tokenizer_folders.LOOPING, deadline_s=0.2).render(HI, None, {}, CONTEXT)
    assert (refused.value.code, refused.value.status) == ("template_failed", 422)
    assert "odd-model" in refused.value.message and "chat_template.jinja" in refused.value.message
    assert "0.2 s" in refused.value.message
    await until(lambda: running() == [])


@pytest.mark.parametrize(
    ("source", "said", "status"),
    [
        ('{{ "a" * 3000000000 }}', "memory", 422),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate", 400),
        ("{{ raise_exception('x' * 10000) }}", r"x{500}$", 400),
        ("{{ messages[9].x.y }}", "refused these messages", 400),
        ("{% if %}", "refused these messages", 400),
        ("{{ 1 / 0 }}", "refused these messages", 400),
        # It cannot reach out of its sandbox.
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "template", 400),
    ],
)
async def test_a_template_that_fails_is_a_refusal(template: Maker, source: str, said: str, status: int) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        await template(source).render(HI, None, {}, CONTEXT)
    assert (refused.value.code, refused.value.status) == ("template_failed", status)


async def test_a_template_of_many_million_characters_is_not_run(template: Maker) -> None:
    with pytest.raises(ApiError, match="1,048,576 characters"):
        await template("x" * (PROGRAM_CHARS_MAX + 1)).render(HI, None, {}, CONTEXT)
    assert running() == []


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_brought(template: Maker) -> None:
    with pytest.raises(ApiError, match="3,000,000 characters") as refused:
        await template("{{ 'x y' * 1000000 }}").render(HI, None, {}, CONTEXT)
    assert (refused.value.code, refused.value.status) == ("context_length_exceeded", 400)


async def test_a_model_without_a_template_says_what_to_do(template: Maker) -> None:
    with pytest.raises(ApiError, match="/v1/completions") as refused:
        await template(None).render(HI, None, {}, CONTEXT)
    assert refused.value.code == "no_chat_template"


async def test_without_a_free_template_process_a_request_is_answered_503(byte_text: TextCodec) -> None:
    with pytest.raises(ApiError) as refused:
        none = SandboxPool(replace(TEMPLATES, processes_max=0, wait_s=0.01))
        await ChatTemplate(byte_text, none).render(HI, None, {}, CONTEXT)
    assert (refused.value.code, refused.value.status) == ("unavailable", 503)


# --- tokenizers with Python of their own ----------------------------------------------------------------------------


@pytest.fixture
def odd_text(tmp_path: Path) -> Callable[[Callable[..., Any]], TextCodec]:
    """A tokenizer whose class renders like this."""

    def made(render: Callable[..., Any]) -> TextCodec:
        text = TextCodec.load(tokenizer_folders.byte_level(tmp_path / "odd-model"))
        text.tokenizer.__class__ = type("OddTokenizer", (type(text.tokenizer),), {"apply_chat_template": render})
        return text

    return made


async def test_a_tokenizer_that_renders_itself_is_asked(odd_text: Any, templates: SandboxPool) -> None:
    def render(self: Any, conversation: Any, tools: Any = None, **rest: Any) -> Any:
        return "MINE " + super(type(self), self).apply_chat_template(conversation, tools=tools, **rest)

    made = ChatTemplate(odd_text(render), templates)
    assert await made.render(HI, TOOLS, {"shouts": True}, CONTEXT) == "MINE <|user|>hi\nTOOLS look\n!<|assistant|>"
    assert running() == []


async def test_a_tokenizer_that_renders_itself_has_the_same_limits(odd_text: Any, templates: SandboxPool) -> None:
    def render(self: Any, conversation: Any, **rest: Any) -> Any:
        if conversation[0]["content"] == "long":
            return "x y" * 1_000_000
        if conversation[0]["content"] == "wrong":
            raise KeyError("no such role")
        while True:
            pass

    made = ChatTemplate(odd_text(render), templates, deadline_s=0.2)
    for content, said, status in (("hi", "0.2 s", 422), ("wrong", "no such role", 400), ("long", "3,000,000", 400)):
        with pytest.raises(ApiError, match=said) as refused:
            await made.render([{"role": "user", "content": content}], None, {}, CONTEXT)
        assert refused.value.status == status
    await until(lambda: not any("OddTokenizer" in thread.name for thread in threading.enumerate()))
