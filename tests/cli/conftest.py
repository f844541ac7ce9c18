from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.fake_gateway import FakeGateway

ENVIRONMENT = ("GREENROOM_API_KEY", "GREENROOM_CONFIG", "LOG_LEVEL", "LOG_FORMAT", "http_proxy", "HTTP_PROXY")


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """A fake gateway that commands find by themselves."""
    fake = FakeGateway()
    monkeypatch.setenv("GREENROOM_URL", fake.url)
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
