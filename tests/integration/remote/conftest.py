from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.standins.standin_provider import KEY, Provider, provider


@pytest_asyncio.fixture
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    monkeypatch.delenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", raising=False)
    async with provider(tmp_path) as one:
        yield one
