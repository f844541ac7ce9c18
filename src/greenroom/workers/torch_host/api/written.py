"""JSON as it goes out, and the parts of it that chat and completions share."""

from __future__ import annotations

import json
import secrets
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
