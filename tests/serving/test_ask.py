"""What a request asks for."""

from __future__ import annotations

import inspect

import pytest

from greenroom.api.reports.snapshot import BUILD
from greenroom.serving.ask import _OF_MODEL, _OF_REQUEST, Ask


@pytest.mark.skipif(BUILD == "compiled", reason="machine code does not tell its parameters")
def test_a_copy_has_all_of_a_request() -> None:
    given = {"_body" if name == "body" else name for name in inspect.signature(Ask.__init__).parameters}
    assert set(Ask.__slots__) == (given - {"self"}) | {*_OF_MODEL, *_OF_REQUEST}
