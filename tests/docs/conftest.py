"""Gateways that serve what a page shows run on uvloop, as those of `tests/integration` do."""

from tests.integration.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
