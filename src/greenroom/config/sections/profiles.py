"""What callers get without asking, and what they may ask at most: profiles by key, tenant and client, and cooldown.

Owns these keys. A client's id is chosen by its caller, so what a client gets can only be less than its key gets.
`access/profiles.py` finds the profile of a request, `access/client_stats.py` counts and cools down.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from greenroom.config.kinds import NO_CONTROLS, SECONDS_MAX, ModelId, Name, NotBool, SecondsAboveZero, Section
from greenroom.config.marks import Example
from greenroom.config.reader import Problem, break_on
from greenroom.config.sections.keys import PATTERNS_MAX, ModelPattern
from greenroom.config.sections.model import PARAMS_NOT_OURS_TO_CHANGE

TEMPLATE_SWITCHES: Final = "chat_template_kwargs"
THINKING: Final = "enable_thinking"

# Callers may put spaces around the id of a client.
ClientPattern = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=NO_CONTROLS)]
NamePatterns = Annotated[tuple[Name, ...], Field(max_length=PATTERNS_MAX)]
ErrorCount = Annotated[int, Field(ge=1, le=1_000), NotBool]
KeepAliveSeconds = Annotated[float, Field(ge=-1, le=SECONDS_MAX), NotBool]


class ClientProfile(Section):
    """What requests of a client get without asking, and what they may ask at most."""

    default_model: ModelId | None = None
    """The model or task of JSON requests that name none."""
    models: Annotated[tuple[ModelPattern, ...], Field(max_length=PATTERNS_MAX)] | None = None
    """The ids of models they may ask, `*` for any characters, of those that their key may. Others look as if they did
    not exist."""
    priority: Literal["high", "normal", "low"] | None = None
    """The priority of requests that name none, and the best that others get; never better than their key allows."""
    keep_alive_s: KeepAliveSeconds | None = None
    """How long a model stays after requests that do not say it, and the longest that others may ask for: 0 leaves when
    idle, -1 stays. scheduler.keep_alive_max_s bounds it."""
    set_params: dict[str, JsonValue] = {}
    """Top-level fields of requests for text, set to these values whatever the caller sent. What the model itself sets
    or strips goes first."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Switches of chat templates, set one by one in the field chat_template_kwargs of chats; the caller's others stay.
    Those that the model itself sets go first."""
    thinking: bool | None = None
    """Whether models that can think do so: the switch enable_thinking of chat templates."""

    def _problems(self) -> Iterator[Problem]:
        for name in sorted(PARAMS_NOT_OURS_TO_CHANGE & set(self.set_params)):
            yield Problem(("set_params", name), f"{name} cannot be set; it has been acted on already")
        if TEMPLATE_SWITCHES in self.set_params:
            yield Problem(("set_params", TEMPLATE_SWITCHES), "is a key of its own beside set_params")
        if THINKING in self.chat_template_kwargs and self.thinking is not None:
            yield Problem(("thinking",), f"is the same as {THINKING} in chat_template_kwargs; give one of them")
        if self.keep_alive_s is not None and -1 < self.keep_alive_s < 0:
            yield Problem(("keep_alive_s",), "is a number of seconds, 0 or -1")

    @property
    def template_switches(self) -> dict[str, JsonValue]:
        """The switches of chat templates, `thinking` among them."""
        return self.chat_template_kwargs | ({} if self.thinking is None else {THINKING: self.thinking})


class Profile(ClientProfile):
    """Of the profiles that name the key or the tenant of a request, the first one in the file counts."""

    keys: NamePatterns = ()
    """Names of API keys, `*` for any characters; "*" is for callers without a key too."""
    tenants: NamePatterns = ()
    """Names of tenants, `*` for any characters."""
    clients: dict[ClientPattern, ClientProfile] = {}
    """What clients get, by patterns of the id that they give (X-Client-ID, x_client_id); the first that fits counts.
    They can only narrow the profile: models that both allow, the worse priority, the shorter stay, and only such
    fields and switches as the profile does not set."""

    @model_validator(mode="after")
    def _names_callers(self) -> Self:
        if not self.keys and not self.tenants:
            break_on([Problem((), 'names no caller: give keys or tenants, such as keys: ["*"]')])
        return self


class Clients(Section):
    """What is kept of callers' programs (/api/v1/clients), and cooldown of those that only make mistakes."""

    errors_max: Annotated[ErrorCount | None, Example(50)] = None
    """Mistakes (400, 403, 404, 405, 413, 415, 422 and the like) that a client of a key may make within window_s. One
    more, and its requests are answered 429 cooling_down for cooldown_s. Failures of ours never count. No cooldown when
    not given."""
    window_s: SecondsAboveZero = 60
    """The time within which mistakes are counted."""
    cooldown_s: SecondsAboveZero = 10
    """How long the first cooldown lasts. Each that follows soon lasts twice as long as the one before."""
    cooldown_max_s: SecondsAboveZero = 3_600
    """The longest cooldown."""
