from __future__ import annotations

import threading
from pathlib import Path

import pytest

from greenroom.workers.torch_host.refusals import Refused
from greenroom.workers.torch_host.templates import Template
from greenroom.workers.torch_host.text import Text
from tests.workers.torch_host import tokenizer_folders
from tests.workers.torch_host.waiting import until

HI = [{"role": "user", "content": "hi"}]


def template(folder: Path, source: str | None, deadline_s: float = 30.0) -> Template:
    return Template(Text.load(tokenizer_folders.byte_level(folder / "odd-model", source)), deadline_s)


async def test_a_conversation_is_rendered_with_its_tools_and_switches(byte_text: Text) -> None:
    made = Template(byte_text)
    assert await made.render(HI, None, {}) == "<|user|>hi\n<|assistant|>"
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert await made.render(HI, tools, {"shouts": True}) == "<|user|>hi\nTOOLS look\n!<|assistant|>"


async def test_a_caller_cannot_bring_its_own_program(byte_text: Text) -> None:
    switches = {"chat_template": "mine", "tokenize": True, "add_generation_prompt": False, "conversation": []}
    assert await Template(byte_text).render(HI, None, switches) == "<|user|>hi\n<|assistant|>"


async def test_a_template_that_loops_is_stopped_and_named(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        await template(tmp_path, tokenizer_folders.LOOPING, deadline_s=0.2).render(HI, None, {})
    assert (refused.value.code, refused.value.status) == ("template_failed", 422)
    assert "odd-model" in refused.value.message and "chat_template.jinja" in refused.value.message
    await until(lambda: not any("odd-model" in thread.name for thread in threading.enumerate()))


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages[9].x.y }}", "{% if %}", "{{ 1 / 0 }}"]
)
async def test_a_template_that_fails_is_a_refusal(tmp_path: Path, source: str) -> None:
    with pytest.raises(Refused) as refused:
        await template(tmp_path, source).render(HI, None, {})
    assert (refused.value.code, refused.value.status) == ("template_failed", 400)


async def test_what_a_template_complains_about_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="roles must alternate"):
        await template(tmp_path, "{{ raise_exception('roles must alternate') }}").render(HI, None, {})


async def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="template"):
        await template(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}").render(HI, None, {})


async def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="/v1/completions") as refused:
        await template(tmp_path, None).render(HI, None, {})
    assert refused.value.code == "no_chat_template"
