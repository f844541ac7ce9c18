"""What holds for every test of the core: its coverage is no matter of luck."""

from __future__ import annotations

import pytest
from hypothesis import is_hypothesis_test


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test whose coverage is measured.

    Tests that draw their examples reach other branches each time, and tracing makes them three times as long.
    """
    draws = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
    if not draws and item.get_closest_marker("untraced") is None:
        item.add_marker(pytest.mark.traced)
