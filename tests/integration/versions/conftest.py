from __future__ import annotations

import pytest

from tests.models import tiny
from tests.standins.standin_hub import StandinHub


@pytest.fixture
def hub(hub: StandinHub) -> StandinHub:
    for name in ("alpha", "bravo", "charlie"):
        hub.repos[f"org/{name}"] = {"model.gguf": tiny(name).read_bytes()}
    return hub
