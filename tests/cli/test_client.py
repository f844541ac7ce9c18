"""The way to a gateway: its address, calls and their answers, streams of events."""

from __future__ import annotations

import io
import socket
import threading
from argparse import Namespace

import pytest

from greenroom.cli.address import DEFAULT_URL, address_of, parse
from greenroom.cli.client import Client, ServerEvent, model_path, server_events
from greenroom.cli.failures import CommandFailed, GatewayRefused, NoGateway, WrongUsage
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error, events
from tests.standins.dripping import DRIPS, dripping_server


def test_json_goes_there_and_back_with_the_key(gateway: FakeGateway) -> None:
    gateway.on("POST", "/x", answer({"b": [1, "ü"]}))
    assert Client(parse(gateway.url, "secret")).post("/x", {"a": "ä"}) == {"b": [1, "ü"]}
    (asked,) = gateway.asked
    assert asked.json == {"a": "ä"}
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.headers["content-type"] == "application/json"


def test_without_a_key_none_is_sent(gateway: FakeGateway) -> None:
    gateway.on("GET", "/x", answer({}))
    Client(parse(gateway.url)).get("/x", {"lines": 3})
    assert gateway.asked[0].target == "/x?lines=3"
    assert "authorization" not in gateway.asked[0].headers


def test_a_prefix_in_the_address_stands_before_every_path(gateway: FakeGateway) -> None:
    gateway.on("GET", "/llm/x", answer({"found": True}))
    assert Client(parse(gateway.url + "/llm")).get("/x") == {"found": True}


@pytest.mark.parametrize(
    ("model", "path"),
    [("qwen", "qwen"), ("org/name:q4", "org%2Fname%3Aq4"), ("a b?#%", "a%20b%3F%23%25"), ("ü", "%C3%BC"), ("..", "..")],
)
def test_a_model_id_is_one_segment_of_the_path(model: str, path: str) -> None:
    assert model_path(model, "load") == f"/api/v1/models/{path}/load"


def test_an_error_of_the_gateway_keeps_its_message_code_and_details(gateway: FakeGateway) -> None:
    gateway.on("POST", "/x", error(503, "model_load_failed", "It broke.", "line 1\nline 2"))
    with pytest.raises(GatewayRefused) as refused:
        Client(parse(gateway.url)).post("/x")
    told = refused.value
    assert (told.message, told.details, told.status, told.code) == (
        "It broke.",
        "line 1\nline 2",
        503,
        "model_load_failed",
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            error(431, "headers_too_large", "The request line has more than 8192 bytes."),
            r"8192 bytes\. The name, the key or the address that was given is too long\.",
        ),
        (error(401, "invalid_api_key", "No API key was given."), "GREENROOM_API_KEY"),
    ],
)
def test_a_refusal_says_what_to_change(gateway: FakeGateway, told: Answer, said: str) -> None:
    gateway.on("GET", "/x", told)
    with pytest.raises(GatewayRefused, match=said):
        Client(parse(gateway.url)).get("/x")


@pytest.mark.parametrize(
    "strange",
    [
        Answer(b"<html>hi</html>", content_type="text/html"),
        Answer(b"", status=404),
        Answer(b'["error"]', status=500),
        Answer(b'{"error": "no"}', status=500),
        *(Answer(body) for body in (b"[" * 100_000, b'{"a": ' * 100_000, b"\xff", b"1" * 5000)),
    ],
)
def test_another_program_at_the_address_is_recognised(gateway: FakeGateway, strange: Answer) -> None:
    gateway.on("GET", "/x", strange)
    with pytest.raises(CommandFailed, match="is not Greenroom"):
        Client(parse(gateway.url)).get("/x")


def test_a_redirect_is_not_followed(gateway: FakeGateway) -> None:
    gateway.on("GET", "/x", Answer(b"", 302, headers=(("Location", "/elsewhere"),)))
    with pytest.raises(CommandFailed, match="302"):
        Client(parse(gateway.url, "secret")).get("/x")
    assert [asked.target for asked in gateway.asked] == ["/x"]


def test_no_gateway_at_an_address_names_it_and_the_command_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(NoGateway) as none:
        Client(parse(url)).get("/x")
    assert none.value.message == (
        f"no gateway answers at {url}; start one with `greenroom serve`, or say where it is with --url or GREENROOM_URL"
    )


def test_a_name_that_is_none_is_said_to_be_the_reason() -> None:
    with pytest.raises(NoGateway, match=r"a\.\.b:1 \(.+\)"):
        Client(parse("http://a..b:1")).get("/x")


def test_an_answer_has_a_limit(gateway: FakeGateway) -> None:
    let_go = threading.Event()
    gateway.on("GET", "/x", Answer(b"{}", before=lambda: (let_go.wait(30), None)[1]))
    with pytest.raises(CommandFailed, match="has not answered within"):
        Client(parse(gateway.url)).get("/x", answer_max_s=0.2)
    let_go.set()


@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_that_comes_bit_by_bit_ends_at_the_same_limit(kind: str) -> None:
    with dripping_server(kind) as address, pytest.raises(CommandFailed, match="has not answered within"):
        Client(parse(address)).get("/x", answer_max_s=0.3)


def test_a_stream_may_come_bit_by_bit(gateway: FakeGateway) -> None:
    gateway.on("GET", "/s", events(*("data: x" for _ in range(50))))
    with Client(parse(gateway.url)).stream("GET", "/s") as stream:
        assert len(list(stream)) == 50


@pytest.mark.parametrize(
    ("told", "said"),
    [(Answer(b'{"a": 1}', cut=True), "went away"), (answer({"long": "x" * 100}), "larger than 10 bytes")],
)
def test_an_answer_that_is_cut_or_without_end_is_a_failure(gateway: FakeGateway, told: Answer, said: str) -> None:
    gateway.on("GET", "/x", told)
    with pytest.raises(CommandFailed, match=said):
        Client(parse(gateway.url), answer_bytes_max=10).get("/x")


def test_a_stream_gives_its_events(gateway: FakeGateway) -> None:
    gateway.on("POST", "/s", events(": waiting model=m", "data: one", "data: two"))
    with Client(parse(gateway.url)).stream("POST", "/s", {"a": 1}, {"X-Heartbeat": "comment"}) as stream:
        seen = [event.comment or event.data for event in stream]
    assert seen == ["waiting model=m", "one", "two"]
    assert gateway.asked[0].headers["x-heartbeat"] == "comment"


def test_a_stream_that_is_none_is_not_ours(gateway: FakeGateway) -> None:
    gateway.on("GET", "/s", answer({}))
    with pytest.raises(CommandFailed, match="is not Greenroom"), Client(parse(gateway.url)).stream("GET", "/s"):
        pass


def test_loopback_is_never_reached_through_a_proxy(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    gateway.on("GET", "/x", answer({"direct": True}))
    assert Client(parse(gateway.url)).get("/x") == {"direct": True}


def test_another_host_is_reached_through_the_proxy(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", gateway.url)
    monkeypatch.setenv("no_proxy", "")
    gateway.on("GET", "http://models.example.org:80/x", answer({"through": "proxy"}))
    assert Client(parse("http://models.example.org")).get("/x") == {"through": "proxy"}
    assert gateway.asked[0].headers["host"].startswith("models.example.org")


def test_a_host_excepted_from_the_proxy_is_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "a..b")
    # The proxy would refuse the connection, which needs no reason in the message; the name that is none has one.
    with pytest.raises(NoGateway, match=r"a\.\.b:1 \(.+\)"):
        Client(parse("http://a..b:1")).get("/x")


@pytest.mark.parametrize(
    ("url", "shown", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8210", "http://127.0.0.1:8210", "127.0.0.1", 8210, ""),
        ("http://127.0.0.1:8210/", "http://127.0.0.1:8210", "127.0.0.1", 8210, ""),
        ("http://127.0.0.1:8210/v1", "http://127.0.0.1:8210", "127.0.0.1", 8210, ""),
        ("box:9000", "http://box:9000", "box", 9000, ""),
        ("http://[::1]:8210", "http://[::1]:8210", "::1", 8210, ""),
        ("https://models.example.org", "https://models.example.org", "models.example.org", 443, ""),
        ("https://example.org/llm/", "https://example.org/llm", "example.org", 443, "/llm"),
    ],
)
def test_an_address_is_read_as_people_write_it(url: str, shown: str, host: str, port: int, prefix: str) -> None:
    address = parse(url)
    assert (address.url, address.host, address.port, address.prefix) == (shown, host, port, prefix)


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://a b", "http://x\n.y"]
)
def test_what_is_no_address_is_wrong_usage(url: str) -> None:
    with pytest.raises(WrongUsage):
        parse(url or "http://")


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(WrongUsage) as refused:
        parse("http://me:hunter2@box:8210")
    assert "hunter2" not in refused.value.message


def test_the_option_wins_over_the_environment_and_that_over_the_default() -> None:
    plain = Namespace(url=None, api_key_env=None)
    assert address_of(plain, {}).url == DEFAULT_URL
    assert address_of(plain, {"GREENROOM_URL": "http://a:1"}).url == "http://a:1"
    assert (
        address_of(Namespace(url="http://b:2", api_key_env=None), {"GREENROOM_URL": "http://a:1"}).url == "http://b:2"
    )


def test_the_key_comes_from_the_environment_only() -> None:
    environ = {"GREENROOM_API_KEY": "one", "OTHER": " two \n"}
    assert address_of(Namespace(url=None, api_key_env=None), environ).key == "one"
    assert address_of(Namespace(url=None, api_key_env="OTHER"), environ).key == "two"
    assert address_of(Namespace(url=None, api_key_env=None), {}).key is None


def test_a_named_variable_that_is_not_set_is_wrong_usage() -> None:
    with pytest.raises(WrongUsage, match="MISSING is not set"):
        address_of(Namespace(url=None, api_key_env="MISSING"), {})


@pytest.mark.parametrize("key", ["a\r\nHost: evil", "schlüssel", "two words"])
def test_a_key_that_could_not_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(WrongUsage) as refused:
        address_of(Namespace(url=None, api_key_env=None), {"GREENROOM_API_KEY": key})
    assert key not in refused.value.message


def test_the_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(parse("http://x:1", "secret"))


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (
            b": hello\n\nevent: swap\nid: 7\ndata: {}\n\ndata: x\n\n",
            [ServerEvent(comment="hello"), ServerEvent("swap", "{}"), ServerEvent("message", "x")],
        ),
        (b"data: a\ndata:b\ndata:  c\n\n", [ServerEvent(data="a\nb\n c")]),
        (b"data: a\r\n\r\n", [ServerEvent(data="a")]),
        (b"data: a\n\ndata: half", [ServerEvent(data="a")]),
        (b"data: \xff\n\n", [ServerEvent(data="\N{REPLACEMENT CHARACTER}")]),
    ],
    ids=["comments, names and data", "several lines", "either line end", "no blank line", "no text"],
)
def test_events_are_read_whatever_they_look_like(stream: bytes, events: list[ServerEvent]) -> None:
    assert list(server_events(io.BytesIO(stream))) == events


@pytest.mark.parametrize("endless", ["data: " + "x" * 200, "data: x\n" * 50])
def test_an_event_without_end_is_an_error(endless: str) -> None:
    with pytest.raises(CommandFailed, match="more than 100 bytes"):
        list(server_events(io.BytesIO(endless.encode()), 100))
