"""Addresses of gateways as programs give them."""

from __future__ import annotations

import pytest

from greenroom.base.json_client import origin_of


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://box:8210/v1", ("box", 8210, "")),
        ("https://box/llm/v1/", ("box", 443, "/llm")),
        ("http://v1", ("v1", 80, "")),
        ("ftp://box", None),
        ("http://name:secret@box", None),
    ],
)
def test_where_a_gateway_answers(url: str, found: tuple[str, int, str] | None) -> None:
    origin = origin_of(url, None)
    assert found == (None if origin is None else (origin.host, origin.port, origin.prefix))
