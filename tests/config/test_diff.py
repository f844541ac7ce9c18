"""What a reload changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from greenroom.config.diff import Changes, diff, refuse_restart
from greenroom.config.schema import Config, Model, Remote
from greenroom.errors import ConfigError

from .conftest import Loads

NOTHING = Changes((), (), (), (), (), ())


@pytest.mark.parametrize(
    ("base", "key", "value", "needs_new_slot"),
    [
        ({"path": "/q.gguf"}, "path", "/other.gguf", True),
        ({"path": "/q.gguf"}, "ctx_size", 1, True),
        ({"path": "/q.gguf"}, "concurrency", 1, True),
        ({"path": "/q.gguf"}, "isolate_tenants", "off", True),
        ({"path": "/q.gguf"}, "ttl_s", 1, False),
        ({"path": "/q.gguf"}, "set_params", {"a": 1}, False),
        ({"cmd": "q ${PORT}"}, "cmd", "other ${PORT}", True),
        ({"cmd": "q ${PORT}"}, "check_endpoint", "/up", True),
        ({"cmd": "q ${PORT}"}, "cmd_stop", "stop", False),
        ({"cmd": "q ${PORT}"}, "sizes_itself", True, False),
        ({"remote": "first"}, "remote", "other", True),
    ],
)
def test_changed_key_of_a_model(base: dict[str, Any], key: str, value: object, needs_new_slot: bool) -> None:
    remotes = {name: Remote(base_url="https://a") for name in ("first", "other")}
    old = Config(remotes=remotes, models={"q": Model(**base), "same": Model(path="/s.gguf")})
    new = Config(remotes=remotes, models={"q": Model(**{**base, key: value}), "same": Model(path="/s.gguf")})
    told = {"changed" if needs_new_slot else "relabelled": ("q",)}
    assert diff(old, new) == replace(NOTHING, **told)


def test_changed_engine_needs_a_new_slot_and_a_named_one_is_no_change() -> None:
    inferred, named = Model(path="/q.gguf"), Model(path="/q.gguf", engine="llamacpp")
    assert diff(Config(models={"q": inferred}), Config(models={"q": named})) == NOTHING
    command = Model(cmd="q ${PORT}")
    assert diff(Config(models={"q": inferred}), Config(models={"q": command})).changed == ("q",)


def test_models_that_come_go_and_change_are_told_apart() -> None:
    def model(name: str, **more: Any) -> Model:
        return Model(path=f"/{name}.gguf", **more)

    old = Config(models={name: model(name) for name in ("a", "b", "c", "d", "e")})
    new = Config(
        models={
            "f": model("f"),
            "d": model("d", ttl_s=5, ctx_size=7),
            "c": model("c", ttl_s=5),
            "b": model("b"),
            "A": model("A"),
        }
    )
    changes = diff(old, new)
    assert changes == Changes(
        added=("A", "f"), changed=("d",), relabelled=("c",), removed=("a", "e"), at_once=(), needs_restart=()
    )
    assert not changes.is_empty


def test_equal_files_change_nothing_however_they_are_written(loads: Loads) -> None:
    old = loads("models: {a: {path: /m/a.gguf, ttl_s: 5}, b: {path: b.gguf}}\n")
    new = loads("macros: {d: /m}\nmodels:\n  b: {path: ./b.gguf}\n  a: {ttl_s: 5.0, path: '${d}/a.gguf'}\n")
    assert diff(old, new) == NOTHING
    assert diff(old, new).is_empty


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0, False), ([1], [True])])
def test_value_for_an_engine_that_only_python_takes_for_equal_is_a_change(before: Any, after: Any) -> None:
    old = Config(models={"q": Model(path="/q.gguf", set_params={"a": before})})
    new = Config(models={"q": Model(path="/q.gguf", set_params={"a": after})})
    assert diff(old, new).relabelled == ("q",)


def test_keys_outside_models_are_told_apart_by_what_they_need(loads: Loads) -> None:
    old = loads("server: {port: 1, drain_s: 1}\n")
    new = loads("""\
        server: {port: 2, drain_s: 2, api_keys: [{name: a, key: b}]}
        gpus: [{memory_mib: 1}]
        log: {level: debug}
        macros: {a: b}
        """)
    changes = diff(old, new)
    assert changes.at_once == ("log.level", "server.api_keys", "server.drain_s")
    assert changes.needs_restart == ("gpus", "server.port")


def test_changed_secret_of_an_api_key_is_a_change(loads: Loads) -> None:
    old, new = (loads(f"server: {{api_keys: [{{name: a, key: {key}}}]}}\n") for key in ("b", "c"))
    assert diff(old, new).at_once == ("server.api_keys",)


def test_changed_order_of_sets_is_a_change_because_the_first_wins_ties(loads: Loads) -> None:
    models = "models: {a: {path: a.gguf}, b: {path: b.gguf}}\n"
    sets = ("x: a, y: b", "y: b, x: a", "x: a, y: b")
    first, second, third = (loads(f"{models}scheduler: {{company: {{matrix: {{sets: {{{each}}}}}}}}}") for each in sets)
    assert diff(first, second).at_once == ("scheduler.company",)
    assert diff(first, third) == NOTHING


def test_reload_that_needs_a_restart_is_refused_and_names_the_keys() -> None:
    refuse_restart(NOTHING)
    with pytest.raises(ConfigError) as refused:
        refuse_restart(Changes((), (), (), (), ("log.level",), ("gpus", "server.port")))
    assert refused.value.message.startswith("only a restart can change gpus, server.port. Nothing was changed")
