"""Calls to a running gateway: JSON in and out, and streams of server-sent events.

Owns one connection per call, how long it may take, and the translation of all that can go wrong into CommandFailed.
Never follows redirects (they could carry the key elsewhere) and never uses a proxy for loopback.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode, urlsplit

from greenroom.base.json_client import (
    NO_ANSWER,
    TOKEN_HEADER,
    AnswerTooLarge,
    Deadline,
    connection_to,
    json_of,
    reason,
    whole_body,
)
from greenroom.cli.address import KEY_NAME, URL_NAME, GatewayAddress
from greenroom.cli.failures import CommandFailed, GatewayRefused, NoGateway, NotAStream, WrongUsage

ANSWER_MAX_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
PIECE_BYTES: Final = 1024 * 1024
# The gateway sends something every 15 s on its own streams and every 10 s while a request waits for a model; an engine
# may be silent for ten minutes.
SILENCE_MAX_S: Final = 900.0
# The gateway's hint for callers of its API; at a terminal a command does that.
LISTED_BY_API: Final = " GET /v1/models lists those there are."
# The request ids of a gateway. An answer without one did not come through a gateway.
_OUR_ID: Final = re.compile(r"r-[0-9a-f]+-[0-9]+")
# Shown before and after a character that cannot be sent.
NEAR_CHARS: Final = 40
NOT_OURS: Final = "what answers at {url} is not Greenroom"


def model_path(model: str, order: str) -> str:
    """The path of an order to one model. Raises WrongUsage if no model can have this name."""
    return f"/api/v1/models/{segment(model_name(model))}/{order}"


def model_name(name: str) -> str:
    """The name itself. Raises WrongUsage if no model can have it."""
    in_utf8(name)
    if not name or not name.isprintable():
        why = "it has control or invisible characters" if name else "it is empty"
        raise WrongUsage(f"{name!r} is no name of a model: {why}")
    return name


def segment(name: str) -> str:
    """A name as one segment of a path: a slash in it is encoded. Raises WrongUsage if it is not UTF-8."""
    return quote(in_utf8(name), safe="")


def query_of(values: Mapping[str, object]) -> str:
    """The query with these values. Raises WrongUsage if one is not UTF-8."""
    return urlencode({name: in_utf8(str(value)) for name, value in values.items()})


def in_utf8(text: str) -> bytes:
    """The text as it is sent. Raises WrongUsage for surrogates: bytes of an argument or of input that are not UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - NEAR_CHARS) : error.end + NEAR_CHARS]
        raise WrongUsage(f"{near!r} is not UTF-8, and cannot be sent") from None


def in_json(body: object) -> bytes:
    """The body as it is sent. Raises WrongUsage if a text in it is not UTF-8."""
    for text in _texts(body):
        in_utf8(text)
    return json.dumps(body, ensure_ascii=False).encode()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


class Client:
    def __init__(self, address: GatewayAddress, *, answer_bytes_max: int = ANSWER_BYTES_MAX) -> None:
        self.address = address
        self._answer_bytes_max = answer_bytes_max

    def get(self, path: str, query: Mapping[str, object] | None = None, *, answer_max_s: float = ANSWER_MAX_S) -> Any:
        """The JSON at this path. Raises NoGateway, GatewayRefused or CommandFailed."""
        return self._call("GET", path + (f"?{query_of(query)}" if query else ""), None, answer_max_s)

    def post(
        self, path: str, body: object | None = None, *, answer_max_s: float = ANSWER_MAX_S, token: str | None = None
    ) -> Any:
        """Send `body` as JSON and return the JSON answer. Raises NoGateway, GatewayRefused or CommandFailed. `token`
        permits the operation, where operations are signed."""
        return self._call("POST", path, body, answer_max_s, token)

    def delete(self, path: str, *, answer_max_s: float = ANSWER_MAX_S, token: str | None = None) -> Any:
        """The JSON answer. Raises NoGateway, GatewayRefused or CommandFailed."""
        return self._call("DELETE", path, None, answer_max_s, token)

    def download(self, path: str, *, answer_max_s: float = ANSWER_MAX_S) -> Iterator[bytes]:
        """What is at this path, whatever it is, piece by piece. Raises as `get` does, at its end if it is cut."""
        deadline = Deadline(answer_max_s)
        with self._response("GET", path, None, deadline) as response, self._explaining_failures(deadline):
            deadline.bound_silence()
            while piece := response.read(PIECE_BYTES):
                yield piece
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)

    @contextlib.contextmanager
    def stream(
        self, method: str, path: str, body: object | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Iterator[ServerEvent]]:
        """The events at this path, as they come. Leaving the block closes the connection. Raises as `get` does, and
        NotAStream with the answer that came instead."""
        deadline = Deadline(SILENCE_MAX_S)
        with self._response(method, path, body, deadline, headers) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                with self._explaining_failures(deadline):
                    raise NotAStream(self._foreign_answer(response, body), self._json(response, body))
            deadline.bound_silence()
            yield self._events(response, deadline)

    def _events(self, response: http.client.HTTPResponse, deadline: Deadline) -> Iterator[ServerEvent]:
        with self._explaining_failures(deadline):
            yield from server_events(response)

    def _call(self, method: str, path: str, body: object | None, answer_max_s: float, token: str | None = None) -> Any:
        headers, deadline = None if token is None else {TOKEN_HEADER: token}, Deadline(answer_max_s)
        with (
            self._response(method, path, body, deadline, headers) as response,
            self._explaining_failures(deadline),
        ):
            return self._json(response, body)

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: object | None,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, with its body not yet read. Raises if its status is not a success."""
        content = None if body is None else in_json(body)
        with contextlib.closing(self._connected(deadline)) as connection:
            with self._explaining_failures(deadline):
                assert connection.sock is not None
                connection.sock.settimeout(deadline.left_s())
                connection.request(method, self._target(path), content, self._headers(body, headers))
                response = connection.getresponse()
                if response.status >= 300:
                    raise self._refusal(response, body)
            yield response

    # --- the connection ---------------------------------------------------------------------------------------------

    def _connected(self, deadline: Deadline) -> http.client.HTTPConnection:
        connection = self._connection(deadline)
        try:
            connection.connect()
        except NO_ANSWER as error:
            # A refused connection needs no explanation; any other failure (a name, a certificate) does.
            why = "" if isinstance(error, ConnectionRefusedError) else f" ({reason(error)})"
            raise NoGateway(
                f"no gateway answers at {self.address.url}{why}; start one with `greenroom serve`, "
                f"or say where it is with --url or {URL_NAME}"
            ) from None
        return connection

    def _connection(self, deadline: Deadline) -> http.client.HTTPConnection:
        address, proxy = self.address, self._proxy()
        is_tls, (host, port) = address.scheme == "https", proxy or (address.host, address.port)
        connection = connection_to(host, port, deadline, is_tls=is_tls)
        if proxy is not None and is_tls:
            connection.set_tunnel(address.host, address.port)
        return connection

    def _proxy(self) -> tuple[str, int] | None:
        address = self.address
        if address.is_loopback or urllib.request.proxy_bypass(address.authority):
            return None
        proxy = urllib.request.getproxies().get(address.scheme)
        parts = urlsplit(proxy if proxy and "://" in proxy else f"http://{proxy}") if proxy else None
        return (parts.hostname, parts.port or 80) if parts and parts.hostname else None

    def _target(self, path: str) -> str:
        """The target of the request line: a proxy needs the whole address, unless it only tunnels."""
        whole = self.address.prefix + path
        through_proxy = self.address.scheme == "http" and self._proxy() is not None
        return f"http://{self.address.authority}{whole}" if through_proxy else whole

    def _headers(self, body: object | None, more: Mapping[str, str] | None) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream", "Connection": "close", **(more or {})}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.address.key is not None:
            headers["Authorization"] = f"Bearer {self.address.key}"
        return headers

    # --- the answer -------------------------------------------------------------------------------------------------

    def _json(self, response: http.client.HTTPResponse, body: object | None) -> Any:
        content = whole_body(response, self._answer_bytes_max)
        try:
            return json_of(content)
        except ValueError:
            raise CommandFailed(self._foreign_answer(response, body)) from None

    def _foreign_answer(self, response: http.client.HTTPResponse, body: object | None) -> str:
        """The message for an answer that the gateway did not write: by an engine, or by another server altogether."""
        is_refusal = response.status >= 300
        if _OUR_ID.fullmatch(response.headers.get("x-request-id", "")) is None:
            return NOT_OURS.format(url=self.address.url) + (f" (it answers {response.status})" if is_refusal else "")
        model = body.get("model", "the model") if isinstance(body, Mapping) else "the model"
        said = f"answered {response.status}" if is_refusal else "answered with something that is no chat"
        return f"the engine of {model} {said}; see `greenroom logs {model}`"

    def _refusal(self, response: http.client.HTTPResponse, body: object | None) -> CommandFailed:
        try:
            error = self._json(response, body)["error"]
            message, details, code = str(error["message"]), error.get("details"), str(error.get("code"))
        except (CommandFailed, LookupError, TypeError, AttributeError):
            return CommandFailed(self._foreign_answer(response, body))
        message = message.replace("Ask with force=true", "Say --force")
        if code == "model_not_found":
            message = message.removesuffix(LISTED_BY_API) + " `greenroom ps` lists those there are."
        if code == "headers_too_large":
            # Nothing else that commands send there has any length.
            message += " The name, the key or the address that was given is too long."
        if code == "token_missing":
            message += " Give it with --token FILE, or --token - for standard input."
        elif response.status == 401 and not code.startswith("token_"):
            message += f" Set {KEY_NAME}, or name another variable with --api-key-env."
        if code == "not_allowed":
            message += f" `greenroom key new` makes one (--admin, --leases); it is read from {KEY_NAME}."
        return GatewayRefused(message, str(details) if details else None, status=response.status, code=code)

    @contextlib.contextmanager
    def _explaining_failures(self, deadline: Deadline) -> Iterator[None]:
        """Turn failures between the request and the end of the answer into CommandFailed."""
        try:
            yield
        except TimeoutError:
            raise CommandFailed(f"{self.address.url} {deadline.missed}") from None
        except AnswerTooLarge as error:
            raise CommandFailed(f"{self.address.url} is not understood: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise CommandFailed(f"{self.address.url} went away before it had answered ({reason(error)})") from None


LINE_BYTES_MAX: Final = 4 * 1024 * 1024


class Lines(Protocol):
    def readline(self, limit: int = ..., /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event, or a comment, which has no data."""

    name: str = "message"
    data: str = ""
    comment: str | None = None


def server_events(lines: Lines, event_bytes_max: int = LINE_BYTES_MAX) -> Iterator[ServerEvent]:
    """Every event and comment until the end of the stream. An event without its blank line is dropped as incomplete."""
    name, data, size = "message", list[str](), 0
    while line := lines.readline(event_bytes_max):
        size += len(line)
        if size >= event_bytes_max:
            raise CommandFailed(f"the stream holds an event of more than {event_bytes_max:,} bytes")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        key, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if text.startswith(":"):
            yield ServerEvent(comment=value)
        elif key == "event":
            name = value
        elif key == "data":
            data.append(value)
        elif not text:
            if data:
                yield ServerEvent(name, "\n".join(data))
            name, data, size = "message", [], 0
