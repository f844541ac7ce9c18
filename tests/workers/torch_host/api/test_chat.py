"""Chat through the OpenAI client, over a Unix socket, against a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from greenroom.workers.torch_host.engine.requests import GenerationRequest
from greenroom.workers.torch_host.text.tokens import TextCodec
from tests.waiting import until
from tests.workers.torch_host.conftest import Opener, Rig
from tests.workers.torch_host.samples import tokenizer_folders

HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


async def ask(rig: Rig, **body: Any) -> Any:
    return await rig.openai.chat.completions.create(model="tiny", messages=body.pop("messages", HI), **body)


async def streamed(rig: Rig, **body: Any) -> list[Any]:
    return [chunk async for chunk in await ask(rig, stream=True, **body)]


async def test_a_whole_answer_has_text_reason_and_usage(open_api: Opener) -> None:
    async with open_api("hello world") as rig:
        rig.engine.cached_tokens = 3
        answer = await ask(rig)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    asked = rig.engine.asks[0]
    assert rig.text.decode(asked.tokens) == "<|user|>hi\n<|assistant|>"
    assert answer.usage.prompt_tokens == len(asked.tokens)
    assert answer.usage.completion_tokens == len(rig.text.tokens_of("hello world", False))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_stream_says_token_by_token_and_then_done(open_api: Opener) -> None:
    async with open_api("hello world") as rig:
        response = await rig.http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
        chunks = await streamed(rig)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.endswith("data: [DONE]\n\n")
    assert "usage" not in response.text
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == "hello world"
    assert choices[0].delta.role == "assistant"
    assert choices[-1].finish_reason == "stop"
    assert len(choices) == 2 + len(rig.text.tokens_of("hello world", False))


async def test_a_token_is_sent_before_the_next_is_there(open_api: Opener) -> None:
    async with open_api("hello world") as rig:
        rig.engine.holds_after = 1
        async with asyncio.timeout(30):
            stream = await ask(rig, stream=True)
            first = await anext(stream)
            second = await anext(stream)
            assert (first.choices[0].delta.role, bool(second.choices[0].delta.content)) == ("assistant", True)
            rig.engine.go.set()
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"


async def test_usage_comes_last_in_a_stream_that_asks_for_it(open_api: Opener) -> None:
    async with open_api("hello") as rig:
        rig.engine.cached_tokens = 2
        chunks = await streamed(rig, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_letters_of_several_tokens_are_never_broken(open_api: Opener) -> None:
    async with open_api("Grüße 你好 🙂🙃") as rig:
        chunks = await streamed(rig)
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(contents) == "Grüße 你好 🙂🙃"
    assert "\ufffd" not in "".join(contents)


@pytest.mark.parametrize("stop", ["lazy", ["zzz", "y d"], ["the lazy dog"], "the"])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_stop_sequence_ends_the_answer_and_is_not_said(open_api: Opener, stop: Any, streams: bool) -> None:
    said = "fox jumps over the lazy dog and goes on and on"
    async with open_api(said) as rig:
        if streams:
            chunks = await streamed(rig, stop=stop)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = await ask(rig, stop=stop)
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    words = [stop] if isinstance(stop, str) else stop
    assert text == said[: min(said.find(word) for word in words if word in said)]
    assert reason == "stop"


async def test_the_model_stops_working_when_a_stop_sequence_is_found(open_api: Opener) -> None:
    async with open_api("one two three four five six seven") as rig:
        rig.engine.holds_after = 8
        answer = await asyncio.wait_for(ask(rig, stop="two"), 30)
    assert answer.choices[0].message.content == "one "
    assert [end.reason for end in rig.engine.wait_for_ends(1)] == ["cancelled"]


async def test_an_answer_is_as_long_as_it_may_be(open_api: Opener) -> None:
    async with open_api(lambda ask: [70] * 10_000, context=64) as rig:
        few = await ask(rig, max_tokens=5)
        newer = await ask(rig, max_tokens=5, max_completion_tokens=3)
        rest = await ask(rig)
        more_than_fits = await ask(rig, max_tokens=1000)
    lengths = [answer.usage.completion_tokens for answer in (few, newer, rest, more_than_fits)]
    left = 64 - few.usage.prompt_tokens
    assert lengths == [5, 3, left, left]
    assert {answer.choices[0].finish_reason for answer in (few, newer, rest)} == {"length"}


async def test_sampling_parameters_and_headers_reach_the_engine(open_api: Opener) -> None:
    async with open_api("x") as rig:
        extra = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True}
        await ask(
            rig,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=-1,
            frequency_penalty=1,
            seed=7,
            n=2,
            logit_bias={"5": -100},
            extra_body=extra,
            extra_headers={"X-Tenant-ID": "t", "X-Cache-Tag": "g", "X-Cache-Mode": "none"},
        )
        await ask(rig)
    first, second, plain = rig.engine.asks
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 40)
    assert (first.sampling.min_p, first.sampling.repetition_penalty) == (0.1, 1.5)
    assert (first.sampling.presence_penalty, first.sampling.frequency_penalty) == (-1, 1)
    assert first.sampling.logit_bias == {5: -100}
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert (first.tenant, first.tag, first.uses_cache) == ("t", "g", False)
    assert first.stop_tokens == frozenset()
    assert (plain.tenant, plain.uses_cache, plain.sampling.logprobs) == ("", True, None)
    assert plain.stop_tokens == rig.text.stop_tokens


@pytest.mark.parametrize("streams", [True, False])
async def test_several_choices_are_told_apart(open_api: Opener, streams: bool) -> None:
    def script(ask: GenerationRequest) -> Sequence[int]:
        return own.tokens_of(f"answer {ask.sampling.seed}", False)

    async with open_api(script) as rig:
        own = rig.text
        if streams:
            texts = {0: "", 1: "", 2: ""}
            for chunk in await streamed(rig, n=3, seed=10):
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            answer = await ask(rig, n=3, seed=10)
            texts = {choice.index: choice.message.content for choice in answer.choices}
            assert answer.usage.prompt_tokens == len(rig.engine.asks[0].tokens)
    assert texts == {0: "answer 10", 1: "answer 11", 2: "answer 12"}


@pytest.mark.parametrize("streams", [True, False])
async def test_log_probabilities_name_each_token_of_the_text(open_api: Opener, streams: bool) -> None:
    async with open_api("hello 🙂 STOP more") as rig:
        params = {"logprobs": True, "top_logprobs": 2, "stop": "STOP"}
        if streams:
            chunks = await streamed(rig, **params)
            tokens = [one for chunk in chunks if (had := chunk.choices[0].logprobs) for one in had.content]
        else:
            tokens = (await ask(rig, **params)).choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in tokens).decode() == "hello 🙂 "
    assert [len(one.top_logprobs) for one in tokens] == [2] * len(tokens)
    assert tokens[0].logprob == -0.5 and tokens[0].top_logprobs[1].logprob == -1.5


async def test_content_in_parts_and_old_calls_reach_the_template(open_api: Opener) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    async with open_api("x") as rig:
        await ask(rig, messages=messages, extra_body={"chat_template_kwargs": {"shouts": True}})
    prompt = rig.text.decode(rig.engine.asks[0].tokens)
    assert prompt == '<|system|>be brief\n<|assistant|>\nCALL {"a": 1}\n<|tool|>42\n!<|assistant|>'


@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_of_a_tool_is_taken_out_of_the_text(open_api: Opener, streams: bool) -> None:
    async with open_api(f"I look.\n{CALL}") as rig:
        if streams:
            choices = [chunk.choices[0] for chunk in await streamed(rig, tools=[WEATHER])]
            text = "".join(choice.delta.content or "" for choice in choices)
            calls = [call for choice in choices for call in choice.delta.tool_calls or []]
            assert [call.index for call in calls] == [0]
            reason = choices[-1].finish_reason
        else:
            choice = (await ask(rig, tools=[WEATHER])).choices[0]
            text, calls, reason = choice.message.content, choice.message.tool_calls, choice.finish_reason
    assert (text, reason) == ("I look.\n", "tool_calls")
    assert [call.function.name for call in calls] == ["get_weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Paris", "days": 3}
    assert calls[0].id.startswith("call_")
    assert "TOOLS get_weather" in rig.text.decode(rig.engine.asks[0].tokens)


async def test_without_tools_nothing_is_a_call(open_api: Opener) -> None:
    async with open_api(CALL) as rig:
        plain = await ask(rig)
        forbidden = await ask(rig, tools=[WEATHER], tool_choice="none")
    assert [answer.choices[0].message.content for answer in (plain, forbidden)] == [CALL, CALL]
    assert "TOOLS" not in rig.text.decode(rig.engine.asks[1].tokens)


async def test_calls_marked_by_special_tokens_are_found(open_api: Opener, tmp_path: Any) -> None:
    template = tokenizer_folders.TEMPLATE + "{# [TOOL_CALLS] #}"
    folder = tokenizer_folders.byte_level(tmp_path / "mistral", template, special=("[TOOL_CALLS]",))
    text = TextCodec.load(folder)
    said = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]'
    async with open_api(said, text=text) as rig:
        message = (await ask(rig, tools=[WEATHER])).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.name == "get_weather"
    assert len(message.tool_calls[0].id) == 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("seed", range(4))
async def test_a_tool_that_must_be_called_is(open_api: Opener, choice: Any, seed: int) -> None:
    """The fake model says anything the constraint lets it: so what comes out is the constraint's doing."""
    async with open_api() as rig:
        tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
        answer = (await ask(rig, tools=tools, tool_choice=choice, seed=seed)).choices[0]
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, answer.finish_reason) == ("get_weather", "tool_calls")
    assert arguments["city"] in ("Paris", "Rome") and arguments["days"] in (1, 2, 3)


@pytest.mark.parametrize("seed", range(4))
async def test_an_answer_is_held_to_its_schema(open_api: Opener, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with open_api() as rig:
        answer = await ask(rig, response_format=wanted, seed=seed, n=2)
    for choice in answer.choices:
        said = json.loads(choice.message.content)
        assert set(said) == {"ok", "size"} and said["size"] in ("small", "large")


@pytest.mark.parametrize("streams", [True, False])
async def test_a_schema_that_fails_in_the_middle_is_the_callers_to_change(
    open_api: Opener, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []

    def out_of_turn(ask: Any, script: object, place: int) -> int:
        """An opening brace, and then one that cannot be: the library gives up."""
        ask.constraint.accept(brace)
        said.append(brace)
        return brace

    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": True}}
    body = {"messages": HI, "response_format": wanted, "stream": streams}
    async with open_api() as rig:
        (brace,) = rig.text.tokens_of("{", False)
        monkeypatch.setattr(rig.engine, "_next", out_of_turn)
        response = await rig.http.post("/v1/chat/completions", json=body)
    last = response.text.strip().splitlines()[-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert response.status_code == (200 if streams else 422)
    assert (error["code"], error["param"]) == ("schema_too_complex", "response_format")
    assert len(said) == 2 and "could not be held to it" in error["message"]


async def test_json_mode_makes_an_object(open_api: Opener) -> None:
    async with open_api() as rig:
        answer = await ask(rig, response_format={"type": "json_object"}, seed=3, max_tokens=1500)
    assert answer.choices[0].message.content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize("when", ["before the first token", "in the middle of a stream", "before a whole answer"])
async def test_a_client_that_leaves_ends_its_asks(open_api: Opener, when: str) -> None:
    async with open_api("one two three four five six seven") as rig:
        rig.engine.holds_after = 2 if "middle" in when else 0
        body = {"messages": HI, "n": 2, "stream": "whole" not in when}
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_unix_connection(str(rig.socket))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw))
        await until(lambda: len(rig.engine.asks) == 2)
        if "middle" in when:
            await asyncio.wait_for(reader.readuntil(b"data: "), 30)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.2)
        writer.close()
        ends = await asyncio.to_thread(rig.engine.wait_for_ends, 2)
        assert [end.reason for end in ends] == ["cancelled", "cancelled"]
        rig.engine.holds_after = None
        assert (await ask(rig)).choices[0].message.content == "one two three four five six seven"


async def test_a_model_that_fails_is_500_before_a_stream_and_an_event_in_it(open_api: Opener) -> None:
    async with open_api("one two three four") as rig:
        rig.engine.fails_with = "out of luck"
        early = await rig.http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
        rig.engine.fails_with = None
        rig.engine.holds_after = 2
        async with rig.http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as response:
            rig.engine.fails_with = "out of luck"
            rig.engine.go.set()
            late = (await response.aread()).decode()
    assert early.status_code == 500 and early.json()["error"]["message"] == "out of luck"
    assert response.status_code == 200
    assert '"out of luck"' in late.splitlines()[-2] and "[DONE]" not in late


async def test_too_little_memory_is_told_apart(open_api: Opener) -> None:
    async with open_api() as rig:
        rig.engine.fails_with, rig.engine.lacks_memory = "2 GiB are missing", True
        response = await rig.http.post("/v1/chat/completions", json={"messages": HI})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "out_of_memory")
    assert "2 GiB are missing" in error["message"]


async def test_a_model_that_is_gone_is_503(open_api: Opener) -> None:
    async with open_api() as rig:
        rig.engine.is_gone = True
        response = await rig.http.post("/v1/chat/completions", json={"messages": HI, "n": 2})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert response.json()["error"]["type"] == "server_error"


async def test_a_slow_reader_gets_everything_in_fewer_events(open_api: Opener) -> None:
    tokens = 60_000
    async with open_api(lambda ask: [70] * tokens, context=100_000) as rig:
        raw = json.dumps({"messages": HI, "stream": True}).encode()
        reader, writer = await asyncio.open_unix_connection(str(rig.socket), limit=4096)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw))
        await asyncio.to_thread(rig.engine.wait_for_ends, 1)
        async with asyncio.timeout(60):
            said = b""
            while not said.endswith(b"0\r\n\r\n"):
                said += await reader.read(1 << 20)
        writer.close()
    events = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == rig.text.decode([70]) * tokens
    assert len(events) < tokens / 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": [1]}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"tools": 5}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "parameters of a tool"),
        ({"tools": [TIME], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
async def test_what_is_wrong_is_400_and_named(open_api: Opener, body: dict[str, Any], param: str) -> None:
    async with open_api() as rig:
        full = body if "messages" in body or not body else {"messages": HI, **body}
        response = await rig.http.post("/v1/chat/completions", content=json.dumps(full))
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert not rig.engine.asks


async def test_unknown_fields_and_nulls_are_ignored(open_api: Opener) -> None:
    async with open_api("fine") as rig:
        nulls = dict.fromkeys(
            ("temperature", "stop", "n", "tools", "tool_choice", "response_format", "logprobs", "seed")
        )
        response = await rig.http.post("/v1/chat/completions", json={"messages": HI, "wishes": [1], **nulls})
    assert response.json()["choices"][0]["message"]["content"] == "fine"


async def test_a_prompt_that_leaves_no_room_is_refused(open_api: Opener) -> None:
    async with open_api(context=64) as rig:
        for length in (200, 2_000, 2_000_000):
            body = {"messages": [{"role": "user", "content": "x y" * length}]}
            response = await rig.http.post("/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
