from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cli.command import Cli, command_line
from tests.cli.fake_gateway import FakeGateway

ENVIRONMENT = (
    "GREENROOM_API_KEY",
    "GREENROOM_CONFIG",
    "LOG_LEVEL",
    "LOG_FORMAT",
    "HOST",
    "PORT",
    "http_proxy",
    "HTTP_PROXY",
)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """A fake gateway that commands find by themselves."""
    fake = FakeGateway()
    monkeypatch.setenv("GREENROOM_URL", fake.url)
    yield fake
    fake.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return command_line(capsys)


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The test may set handlers; those that were there come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
