"""A route of the management API says which permission it requires and how it is signed, or there is no gateway."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from greenroom.access.keys import Permission
from greenroom.api.declared import NEVER, DeclaredRoute, Routes, declared_routes, delete, get, of_all, post, put


class Two(Routes):
    @get("/seen", needs=Permission.READ)
    async def show(self) -> str:
        return "seen"

    @post("/one", needs=Permission.LOAD, signed=of_all("model-unload"))
    @post("/other", needs=Permission.ASK, signed=NEVER)
    async def change(self) -> str:
        return "changed"


def _app() -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.router.route_class = DeclaredRoute
    Two().add_to(app)
    return app


def test_a_handler_has_the_routes_that_are_declared_above_it() -> None:
    declared = [(one.method, one.path, one.needs) for one in (route.declared for route in declared_routes(_app()))]
    changes = [("POST", "/other", Permission.ASK), ("POST", "/one", Permission.LOAD)]
    assert declared == [("GET", "/seen", Permission.READ), *changes]


@pytest.mark.parametrize("method", [post, put, delete])
def test_a_route_that_changes_something_must_say_whether_it_is_signed(method: Any) -> None:
    with pytest.raises(TypeError, match="signed"):
        method("/path", needs=Permission.LOAD)


def test_a_route_without_a_declaration_is_refused() -> None:
    app = _app()
    app.get("/more")(Two().show)
    with pytest.raises(TypeError, match="permission"):
        declared_routes(app)
