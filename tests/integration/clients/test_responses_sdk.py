"""The official OpenAI package's Responses against a real model on llama.cpp, and an engine that calls tools as told."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from tests.harness import url
from tests.integration.clients.conftest import EDIT, SCHEMA
from tests.integration.facts import Journal
from tests.integration.raw import http
from tests.later import Later
from tests.waiting import PATIENCE_S

openai = Later("openai")

WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_response(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="alpha", input="hi", instructions="Be brief.", max_output_tokens=20)
    assert (answer.output_text, answer.status, answer.model) == (" alpha says hello", "completed", "alpha")
    assert answer.usage is not None and answer.usage.output_tokens == 4 and answer.usage.input_tokens > 4
    assert (answer.instructions, answer.max_output_tokens) == ("Be brief.", 20)


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="alpha", input=[{"role": "user", "content": "hi"}]) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        answer = await stream.get_final_response()
    assert len(texts) > 1 and "".join(texts) == answer.output_text == " alpha says hello"


async def test_an_answer_that_is_cut_says_so(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="alpha", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_sent_back(
    client: openai.AsyncOpenAI, journal: Journal, stream: bool
) -> None:
    said: list[Any] = [{"role": "user", "content": "tool:weather:Ulm"}]
    [call] = (await final(client, stream, model="told", input=said, tools=[WEATHER])).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"town": "Ulm"})
    said += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = await final(client, stream, model="told", input=said, tools=[WEATHER])
    assert answer.output_text.startswith("told")
    sent = json.loads(journal.lines("request")[-1]["body"])
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][2]["tool_call_id"] == call.call_id


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_thought_is_an_item_of_its_own(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await final(client, stream, model="told", input="think:hard")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hard"


async def final(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()


async def test_what_would_be_stored_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store"):
        await client.responses.create(model="alpha", input="hi", store=True)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="alpha", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nobody", input="hi")


async def test_an_engine_that_is_lost_ends_a_stream_with_an_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIError, match="engine"):
        async for _ in await client.responses.create(model="dies", input="hi", stream=True):
            pass


# --- Codex: its first request, and the real program, which edits a file by a tool of its own --------------------------


CODEX = "@openai/codex@0.169.0"
INSTALLED = Path(__file__).parents[3] / "build" / "codex" / CODEX.rpartition("@")[2]
OBJECT = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
# The kinds of tools and fields that it offers to a model that it does not know.
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec_command", "description": "Run it.", "strict": False, "parameters": OBJECT},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "stop", "strict": False, "parameters": OBJECT}],
    },
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "web_search", "external_web_access": True},
]


def turn(text: str) -> dict[str, Any]:
    return {
        "model": "told",
        "stream": True,
        "input": [
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Edit."}],
            },
            {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": text}]},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"thread_id": "t"},
    }


def sent(journal: Journal) -> dict[str, Any]:
    """What the engine got last."""
    found: dict[str, Any] = json.loads(journal.lines("request")[-1]["body"])
    return found


@pytest.mark.parametrize(
    ("tool", "called"),
    [("exec_command", {"name": "exec_command"}), ("agents__stop", {"namespace": "agents", "name": "stop"})],
)
async def test_its_functions_are_called_by_their_names(
    app: App, journal: Journal, tool: str, called: dict[str, str]
) -> None:
    asked = turn(f'tool:{tool}:{{"cmd": "ls"}}')
    answer = await http(app, "POST", "/v1/responses", asked)
    assert answer.status == 200, answer.body
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    (call,) = events[-1]["response"]["output"]
    assert events[-1]["type"] == "response.completed" and call.items() >= called.items()
    assert [one["function"]["name"] for one in sent(journal)["tools"]] == ["exec_command", "agents__stop"]
    # Its next request has the call as it came, and the result.
    asked["input"] += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}]
    assert (await http(app, "POST", "/v1/responses", asked)).status == 200
    _, _, said, result = sent(journal)["messages"]
    assert said["tool_calls"][0]["function"] == {"name": tool, "arguments": '{"cmd": "ls"}'}
    assert result == {"role": "tool", "tool_call_id": call["call_id"], "content": "a.py"}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "last"), [("told", "told 1 2 3"), ("llama", "llama says hello")])
async def test_the_real_codex_edits_a_file(app: App, tmp_path: Path, model: str, last: str) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    said = await codex(app, model, tmp_path, f"tool:exec_command:{json.dumps(EDIT)}")
    assert (tmp_path / "a.py").read_text() == "x = 2\n", said
    assert last in said


@pytest.mark.slow
async def test_the_real_codex_knows_a_tool_in_a_namespace_again(app: App, journal: Journal, tmp_path: Path) -> None:
    # Of an agent that is not there.
    await codex(app, "told", tmp_path, 'tool:multi_agent_v1__close_agent:{"target": "nobody"}')
    result = sent(journal)["messages"][-1]
    assert result["role"] == "tool" and "nobody" in result["content"]


async def codex(app: App, model: str, work: Path, prompt: str) -> str:
    """Run one prompt to its end, with nothing to ask for. The sandbox needs rights that tests may not have."""
    home = work / ".home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "greenroom"\n[analytics]\nenabled = false\n[model_providers.greenroom]\n'
        f'name = "Greenroom"\nbase_url = "{url(app)}/v1"\nwire_api = "responses"\n'
    )
    unguarded = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    program = str(INSTALLED / "node_modules" / ".bin" / "codex")
    if not Path(program).exists():
        npm = shutil.which("npm")
        assert npm is not None, "Codex is installed by npm; as root: apt-get install nodejs npm"
        await run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(INSTALLED), CODEX], work, {})
    # It may ask only the gateway: all else goes to a proxy that is not there.
    alone = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    env = {"CODEX_HOME": str(home), "HOME": str(home), **alone}
    return await run([program, "exec", *unguarded, prompt], work, env)


async def run(argv: Sequence[str], folder: Path, env: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env={**os.environ, **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 2 * PATIENCE_S)
    assert process.returncode == 0, said
    return said.decode()
