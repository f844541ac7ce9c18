"""Providers of models that run elsewhere: their address, the account that pays, and what is waited for.

Owns the keys of `remotes` and the rules between them. Never reads a key: the gateway does when a model of the provider
is made ready, so that no configuration that is shown, compared or logged holds one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from greenroom.config.kinds import NotBool, SecondsAboveZero, Section
from greenroom.config.reader import Problem, break_on

# Where each provider is reached if `base_url` does not say it.
_ADDRESSES: Final = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com/v1"}

# It is a prefix of names of models, as in claude:sonnet.
RemoteName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


def _address(said: str) -> str:
    """Refuse an address that is not one, without repeating it: a misplaced part may be a password."""
    problem = PydanticCustomError("address", "https://HOST[:PORT][/PATH] is wanted, without a user, query or fragment")
    try:
        parts = urlsplit(said)
        is_odd = bool(parts.username or parts.password or parts.query or parts.fragment or "@" in parts.netloc)
        is_odd = is_odd or parts.port == 0
    except ValueError:
        raise problem from None
    if is_odd or parts.scheme not in ("http", "https") or not parts.hostname:
        raise problem
    if not said.isascii() or any(letter <= " " or letter in '"<>\\^`{|}\x7f' for letter in said):
        raise problem
    return said


Address = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_address)]


Money = Annotated[float, Field(ge=0, le=1e9), NotBool]


class TokenCost(Section):
    """What a million tokens cost, in the currency of budget_per_day."""

    input: Money
    """A million tokens of prompts."""
    output: Money
    """A million tokens of answers."""
    cached_input: Money | None = None
    """A million tokens of prompts that the provider had in its cache; as input when not given."""

    def of(self, prompt: int, answer: int, cached: int = 0) -> float:
        """The cost of one request. `cached` tokens are a part of the prompt."""
        cached = min(cached, prompt)
        cheap = self.input if self.cached_input is None else self.cached_input
        return ((prompt - cached) * self.input + cached * cheap + answer * self.output) / 1e6


class Remote(Section):
    """One account at a provider of models that run elsewhere."""

    provider: Literal["openai", "anthropic", "compatible"] = "compatible"
    """openai, anthropic, or any other that answers as OpenAI does."""
    base_url: Address | None = None
    """Where its API is, up to /v1 or what stands in its place; the provider's own when not given."""
    api_key_env: VariableName | None = None
    """The environment variable of the gateway that has the key. Give this or api_key_file; none for a server without
    keys."""
    api_key_file: str | None = None
    """A file that has the key and nothing else, which other users may not read."""
    ca_file: str | None = None
    """Certificates (PEM) of the authority that signs for the server, instead of the system's."""
    connect_timeout_s: SecondsAboveZero = 10
    """How long a connection may take, with its TLS handshake."""
    first_byte_timeout_s: SecondsAboveZero = 600
    """How long the first byte of an answer may take; the next ones as server.answer_idle_max_s says."""
    retries_max: Annotated[int, Field(ge=0, le=10), NotBool] = 2
    """How often a request is sent again that was answered 429 or 5xx, or could not be sent."""

    cost: TokenCost | None = None
    """What tokens of its models cost, for those that `costs` does not name."""
    costs: dict[str, TokenCost] = {}
    """The same by a model's name at the provider."""
    budget_per_day: Money | None = None
    """What may be spent in a day (UTC); then its models answer 429 until the next one. Needs cost."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(_problems(self))
        return self

    @property
    def address(self) -> SplitResult:
        return urlsplit(self.base_url or _ADDRESSES[self.provider])

    @property
    def has_key(self) -> bool:
        return self.api_key_env is not None or self.api_key_file is not None


def _problems(remote: Remote) -> Iterator[Problem]:
    if remote.base_url is None and remote.provider not in _ADDRESSES:
        yield Problem(("base_url",), f"is needed: provider {remote.provider} has no address of its own")
        return
    if remote.api_key_env is not None and remote.api_key_file is not None:
        yield Problem(("api_key_file",), "give api_key_env or api_key_file, not both")
    if not remote.has_key and remote.provider in _ADDRESSES:
        yield Problem((), f"provider {remote.provider} needs api_key_env or api_key_file")
    if remote.budget_per_day is not None and remote.cost is None:
        yield Problem(("cost",), "is needed for budget_per_day: a model without a cost would never use it up")
    if remote.address.scheme == "http":
        if remote.has_key and not _is_loopback(remote.address.hostname or ""):
            yield Problem(("base_url",), "would send the key without encryption; use https")
        if remote.ca_file is not None:
            yield Problem(("ca_file",), "goes with https only")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
