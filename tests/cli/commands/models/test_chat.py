from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from greenroom.cli.commands import chat
from greenroom.cli.main import main
from tests.cli.command import Cli, in_terminal
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error, events

PATH = "/v1/chat/completions"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def piece(text: str | None = None, **more: object) -> str:
    delta = {} if text is None else {"content": text}
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta | more}]})


def spoken(*texts: str) -> Answer:
    last = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": len(texts)}})
    return events(piece(role="assistant"), *map(piece, texts), last, "data: [DONE]")


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A user at a terminal types these, then Ctrl-D."""
    waiting: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)


def test_one_question_is_answered_as_it_comes(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("POST", PATH, spoken("Par", "is."))
    assert cli("chat", "m", "Capital", "of", "France?", "--system", "Be brief.", "--max-tokens", "9") == (
        "Paris.\n",
        "",
    )
    asked = gateway.asked[-1].json
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
    ]
    assert (asked["model"], asked["stream"], asked["max_tokens"], "temperature" in asked) == ("m", True, 9, False)


def test_the_question_may_come_on_standard_input(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a long text\n"))
    gateway.on("POST", PATH, spoken("ok"))
    assert main(["chat", "m"]) == 0
    assert gateway.asked[-1].json["messages"][-1]["content"] == "a long text\n"


def test_a_dash_puts_standard_input_into_the_question(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("text"))
    gateway.on("POST", PATH, spoken("ok"))
    assert main(["chat", "m", "Summarise this:", "-"]) == 0
    assert gateway.asked[-1].json["messages"][-1]["content"] == "Summarise this:\n\ntext"


def test_standard_input_is_left_alone_when_the_question_is_given(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverEnds(io.StringIO):
        def read(self, size: int | None = -1, /) -> str:
            raise AssertionError("it would wait for ever")

    monkeypatch.setattr("sys.stdin", NeverEnds())
    gateway.on("POST", PATH, spoken("ok"))
    assert main(["chat", "m", "hello"]) == 0


def test_nothing_to_ask_is_wrong_usage(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["chat", "m"]) == 2
    assert gateway.asked == []


def test_json_is_one_whole_answer_without_a_stream(gateway: FakeGateway, cli: Cli) -> None:
    whole = {"choices": [{"message": {"content": "Paris."}}]}
    gateway.on("POST", PATH, answer(whole))
    assert cli("chat", "m", "hello", "--json", "--temperature", "0").json == whole
    assert gateway.asked[-1].json == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
    }


def test_json_without_a_question_is_wrong_usage(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch)
    assert main(["chat", "m", "--json"]) == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("status", "said"), [(501, "the engine of m answered 501;"), (200, "the engine of m answered with something")]
)
def test_an_engine_that_answers_with_a_page_is_told_from_a_stranger_at_the_address(
    status: int, said: str, options: list[str], gateway: FakeGateway, cli: Cli
) -> None:
    page = Answer(b"<html>no</html>", status, "text/html", headers=(("X-Request-Id", "r-0c309207-2"),))
    gateway.on("POST", PATH, page)
    err = cli("chat", "m", "hello", *options, status=1).err
    assert said in err and "greenroom logs m" in err and "not Greenroom" not in err
    gateway.on("POST", PATH, replace(page, headers=(("X-Request-Id", "of another program"),)))
    assert "is not Greenroom" in cli("chat", "m", "hello", *options, status=1).err


LOST = "data: " + json.dumps({"error": {"message": "The engine was lost.", "code": "engine_lost", "status": 502}})
WHOLE = answer({"choices": [{"message": {"role": "assistant", "content": "Paris."}}]})
DONE = "data: [DONE]"


@pytest.mark.parametrize(
    ("told", "status", "out", "err"),
    [
        pytest.param(
            events(": waiting model=m position=2 eta_s=4", ": waiting model=m", piece("hi"), DONE),
            0,
            "hi\n",
            "waiting for m, position 2, about 4 s to go\nwaiting for m\n",
            id="waiting is told on standard error",
        ),
        pytest.param(
            events(piece(reasoning_content="hmm"), piece("hi"), DONE), 0, "hi\n", "", id="no thoughts in a pipe"
        ),
        pytest.param(WHOLE, 0, "Paris.\n", "", id="an engine that does not stream"),
        pytest.param(events(piece("Par"), LOST), 1, "Par\n", "greenroom: The engine was lost.\n", id="an error"),
        pytest.param(events(piece("Par")), 1, "Par\n", "cut off", id="cut off"),
        pytest.param(answer({"choices": []}), 1, "", "is not Greenroom", id="nothing in it"),
        *(
            pytest.param(events(strange), 1, "", "no chat", id=strange)
            for strange in ("data: nonsense", "data: 7", 'data: {"choices": [7]}', 'data: {"error": 7}')
        ),
    ],
)
def test_an_answer_is_shown_as_it_comes_and_taken_for_what_it_is(
    told: Answer, status: int, out: str, err: str, gateway: FakeGateway, cli: Cli
) -> None:
    gateway.on("POST", PATH, told)
    said = cli("chat", "m", "hello", status=status)
    assert said.out == out and (err in said.err if err else said.err == "")
    assert gateway.asked[-1].headers["x-heartbeat"] == "comment"


def test_a_terminal_sees_thoughts_time_and_nothing_dangerous(gateway: FakeGateway) -> None:
    gateway.on("POST", PATH, events(piece(reasoning_content="hmm "), piece("hi\x1b[2J"), DONE))
    shown = in_terminal(["chat", "m", "hello", "--url", gateway.url])
    assert "hmm" in shown and "hi\N{REPLACEMENT CHARACTER}[2J" in shown
    assert "\x1b[2J" not in shown
    assert "s)" in shown


# --- a conversation -------------------------------------------------------------------------------------------------


def test_a_conversation_remembers_what_was_said(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "one", "", "  two ")
    gateway.on("POST", PATH, spoken("yes"))
    assert main(["chat", "m", "--system", "s"]) == 0
    first, second = (asked.json["messages"] for asked in gateway.asked)
    assert [message["content"] for message in first] == ["s", "one"]
    assert [(message["role"], message["content"]) for message in second] == [
        ("system", "s"),
        ("user", "one"),
        ("assistant", "yes"),
        ("user", "two"),
    ]


def test_new_forgets_all_but_the_first_instruction(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "one", "/new", "two", "/exit", "never asked")
    gateway.on("POST", PATH, spoken("yes"))
    assert main(["chat", "m", "--system", "s"]) == 0
    assert [message["content"] for message in gateway.asked[-1].json["messages"]] == ["s", "two"]


def test_a_question_that_failed_is_forgotten_and_the_conversation_goes_on(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    typed(monkeypatch, "one", "two")
    gateway.on("POST", PATH, error(503, "queue_full", "Too many wait."))
    said = cli("chat", "m")
    assert [len(asked.json["messages"]) for asked in gateway.asked] == [1, 1]
    assert said.err.count("Too many wait.") == 2


def test_a_long_conversation_drops_its_oldest_messages(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"prompt {number}" for number in range(chat.MESSAGES_MAX // 2 + 2)]
    typed(monkeypatch, *prompts)
    gateway.on("POST", PATH, spoken("yes"))
    assert main(["chat", "m"]) == 0
    sent = [message["content"] for message in gateway.asked[-1].json["messages"]]
    assert sent[:2] == ["prompt 1", "yes"] and sent[-1] == prompts[-1]
    assert len(sent) == chat.MESSAGES_MAX + 1
