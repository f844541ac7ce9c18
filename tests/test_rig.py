"""What all tests rely on: examples that may take long, and packages that are imported only when they are used."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.later import Later


@given(st.just(0.3))
@settings(max_examples=1)
def test_an_example_may_take_long(took_s: float) -> None:
    """On a busy machine any does; by default Hypothesis calls it a failure."""
    time.sleep(took_s)


def test_a_package_is_imported_when_a_name_of_it_is_used() -> None:
    missing = Later("package_that_is_not_here")
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_here"):
        _ = missing.anything
    assert Later("json.decoder").JSONDecoder is sys.modules["json.decoder"].JSONDecoder


# A package of the standard library that nothing else imports.
unused = Later("poplib")


def test_a_package_that_no_test_uses_is_not_imported_to_collect_them() -> None:
    assert unused.__test__ is False
    assert "poplib" not in sys.modules
