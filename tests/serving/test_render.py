"""Errors as callers see them."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom import errors
from greenroom.errors import (
    BadRequest,
    GatewayBug,
    GreenroomError,
    InvalidKey,
    LoadFailed,
    ModelLoading,
    QueueFull,
    TooLarge,
)
from greenroom.serving.render import error_body, error_event, response, words

# Another process may hold the machine for a while: that says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ALL_ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, GreenroomError)]


def said(error: BaseException) -> dict[str, Any]:
    body = json.loads(error_body(error, "r-1", to_operator=True))
    assert list(body) == ["error"]
    return dict(body["error"])


def headers_of(error: BaseException, request_id: str = "r-1") -> dict[bytes, bytes]:
    _, headers, _ = response(error, request_id, to_operator=True)
    assert len(dict(headers)) == len(headers)
    return dict(headers)


def event_of(error: BaseException, *, to_operator: bool = True) -> dict[str, Any]:
    event = error_event(error, "r-1", to_operator=to_operator)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return dict(json.loads(event[6:])["error"])


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_has_a_complete_body_and_its_status(kind: type[GreenroomError]) -> None:
    status, headers, body = response(kind("What happened.", param="p"), "r-1", to_operator=True)
    error = json.loads(body)["error"]
    assert list(error)[:5] == ["message", "type", "code", "param", "details"]
    assert status == kind.status
    assert (error["type"], error["code"]) == (kind.type, kind.code)
    assert dict(headers)[b"content-type"] == b"application/json"
    assert dict(headers)[b"x-request-id"] == b"r-1"
    assert dict(headers).get(b"x-should-retry") == (b"false" if kind.final else None)


def test_body_says_what_the_error_says() -> None:
    error = said(BadRequest("model is missing.", param="model", details="more"))
    assert error == {
        "message": "model is missing.",
        "type": "invalid_request_error",
        "code": "invalid_request",
        "param": "model",
        "details": "more",
    }


def test_numbers_stand_beside_the_code_but_never_in_its_place() -> None:
    error = said(QueueFull("Full.", beside={"queueDepth": 12, "avgWaitMs": 340.5, "code": "mine", "message": "mine"}))
    assert (error["queueDepth"], error["avgWaitMs"]) == (12, 340.5)
    assert (error["code"], error["message"]) == ("queue_full", "Full.")


@pytest.mark.parametrize(
    "odd", [{"a": {1, 2}}, {"a": object()}, {"a": "\ud800"}, {"a": {(1, 2): 3}}, {"a": float("nan")}]
)
def test_odd_value_beside_does_not_cost_the_message(odd: dict[str, Any]) -> None:
    assert said(QueueFull("Full.", beside=odd))["message"] == "Full."


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (QueueFull("x"), None),
        (QueueFull("x", retry_after_s=0.0), b"1"),
        (QueueFull("x", retry_after_s=0.2), b"1"),
        (QueueFull("x", retry_after_s=1.01), b"2"),
        (QueueFull("x", retry_after_s=500), b"500"),
        (QueueFull("x", retry_after_s=float("inf")), None),
        (QueueFull("x", retry_after_s=float("nan")), None),
        (ModelLoading("x", retry_after_s=7.5), b"8"),
        (ModelLoading("x", retry_after_s=500), b"120"),
        (LoadFailed("x", retry_after_s=300), b"300"),
    ],
)
def test_retry_after_is_whole_seconds(error: GreenroomError, retry_after: bytes | None) -> None:
    assert headers_of(error).get(b"retry-after") == retry_after
    assert event_of(error)["retry_after_s"] == (None if retry_after is None else int(retry_after))


def test_missing_key_names_the_scheme() -> None:
    assert headers_of(InvalidKey("x"))[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize("request_id", ["", "r 1", "r\r\nx: y", "ü", "r" * 129])
def test_request_id_that_cannot_stand_in_a_header_is_left_out(request_id: str) -> None:
    assert b"x-request-id" not in headers_of(QueueFull("x"), request_id)


@pytest.mark.parametrize(
    "bug", [KeyError("secret"), GatewayBug("secret"), RuntimeError("secret"), GatewayBug("secret", details="secret")]
)
def test_bug_is_not_explained_to_callers(bug: Exception) -> None:
    status, _, body = response(bug, "r-77", to_operator=True)
    assert status == 500
    assert b"secret" not in body + error_event(bug, "r-77", to_operator=True)
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "r-77" in error["message"]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_details_and_figures_of_memory_are_told_to_operators_only(kind: type[GreenroomError]) -> None:
    error = kind("What happened.", details="SECRET", beside={"memory": {"GPU-SECRET": 1}, "queueDepth": 3})
    _, _, body = response(error, "r-1", to_operator=False)
    event = error_event(error, "r-1", to_operator=False)
    assert b"SECRET" not in body + event
    if not issubclass(kind, GatewayBug) and kind is not GatewayBug:
        told = "An operator finds more under request r-1." in json.loads(body)["error"]["message"]
        assert b"queueDepth" in body and told is kind.is_recorded
        assert b"GPU-SECRET" in error_body(error, "r-1", to_operator=True)


@pytest.mark.parametrize("kind", [kind for kind in ALL_ERRORS if issubclass(kind, LoadFailed) or kind is TooLarge])
def test_what_an_engine_may_have_said_is_told_in_our_words(kind: type[GreenroomError]) -> None:
    """Where nothing else is given, nothing of such a message is passed on."""
    error = kind("alpha: /srv/SECRET/alpha.gguf cannot be read: SECRET.")
    for told in (json.loads(error_body(error, "r-1", to_operator=False))["error"], event_of(error, to_operator=False)):
        assert "SECRET" not in str(told) and told["message"].startswith("The model ")
    error = kind("SECRET", public="alpha could not be loaded: it took too long.")
    told = words(error, "r-9", to_operator=False)
    assert told.message == "alpha could not be loaded: it took too long. An operator finds more under request r-9."


def test_a_message_that_hides_nothing_has_no_pointer_to_more() -> None:
    assert words(BadRequest("model is missing."), "r-1", to_operator=False) == ("model is missing.", None)


def test_engine_text_is_cleaned_and_its_end_kept() -> None:
    text = "early\n" * 2_000 + "\x1b[31mCUDA error:\x1b[0m out of memory\x00\x07\x9b\n\tat load\r\n\x1b]0;title\x07end"
    details = said(LoadFailed("x", details=text))["details"]
    assert details.endswith("CUDA error: out of memory\n\tat load\nend")
    assert 4_000 < len(details.encode()) <= 4_096


def test_event_has_status_and_retry_beside_the_body() -> None:
    error = event_of(ModelLoading("Loading.", retry_after_s=3, beside={"progress": 0.5}))
    assert list(error) == ["message", "type", "code", "param", "details", "status", "retry_after_s", "progress"]
    assert (error["status"], error["retry_after_s"], error["progress"]) == (503, 3, 0.5)


@patient
@given(st.text(), st.text(), st.text())
def test_any_text_becomes_one_bounded_clean_body_and_event(message: str, details: str, param: str) -> None:
    error = LoadFailed(message * 300, details=details * 300, param=param)
    for shown in (said(error), event_of(error)):
        for text in (shown["message"], shown["details"], shown["param"]):
            assert len(text.encode()) <= 4_096
            assert all(letter in "\n\t" or letter >= " " for letter in text)
