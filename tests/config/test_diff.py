"""What a reload changes, and that every key has been thought about."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config.described import descriptions
from greenroom.config.diff import (
    AT_ONCE_KEYS,
    COMPARED_ELSEWHERE,
    LABEL_KEYS,
    NEW_SLOT_KEYS,
    RESTART_KEYS,
    Changes,
    diff,
    refuse_restart,
)
from greenroom.config.schema import Config, Model, Remote, Section
from greenroom.config.sections.engine_keys import COMMAND_KEYS, KEYS_OF_ENGINES
from greenroom.errors import ConfigError

from .conftest import Loads

NOTHING = Changes((), (), (), (), (), ())

# For each key of a model, a value that is not its default.
OTHER_VALUES: dict[str, Any] = {
    "exclusive": True,
    "path": "/other.gguf",
    "workflow": "/other.json",
    "inputs": {"prompt": ["6.text", "7.text"]},
    "checkpoints": "/other",
    "cmd": "other ${PORT}",
    "cmd_stop": "stop",
    "remote": "other",
    "check_endpoint": "/up",
    "listener": "any",
    "sizes_itself": True,
    "env": {"A": "b"},
    "cwd": "/tmp",
    "program": "/bin/llama-server",
    "python": "/bin/python",
    "ctx_size": 1,
    "cache_type_k": "q8_0",
    "cache_type_v": "q8_0",
    "n_gpu_layers": 1,
    "flash_attn": "on",
    "parallel": 1,
    "threads": 1,
    "embedding": True,
    "reranking": True,
    "mmproj": "/mmproj.gguf",
    "lora": {"/lora.gguf": 0.5},
    "draft_model": "/draft.gguf",
    "chat_template": "chatml",
    "reasoning": "off",
    "reasoning_format": "none",
    "reasoning_budget": 0,
    "args": ("--a",),
    "dtype": "float32",
    "compute_type": "int8",
    "beam_size": 1,
    "cache_tokens": 1,
    "quantization": "fp8",
    "device_map": "one",
    "isolate": True,
    "isolate_tenants": "off",
    "trust_remote_code": True,
    "allow_pickle": True,
    "skip_check": True,
    "aliases": ("other",),
    "name": "a",
    "description": "a",
    "unlisted": True,
    "metadata": {"a": 1},
    "use_model_name": "a",
    "strip_params": ("a",),
    "set_params": {"a": 1},
    "routes": ("/tokenize",),
    "strict_json": True,
    "limits": {"requests_per_minute": 5},
    "gpu_memory_utilization": 0.5,
    "prefix_caching": False,
    "media_hosts": ("pictures.example.org",),
    "memory_mib": 1,
    "host_memory_mib": 1,
    "gpu_memory_budget_mib": 1,
    "device": "cpu",
    "devices": ("gpu0",),
    "concurrency": 1,
    "priority": "low",
    "category": "vision",
    "abilities": ("chat",),
    "ttl_s": 1,
    "pinned": True,
    "preload": True,
    "versions": {"keep": 3},
    "load_timeout_s": 1,
    "stop_timeout_s": 1,
    "grace_s": 1,
}


def config_keys() -> set[str]:
    keys: set[str] = set()
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            keys |= {f"{name}.{key}" for key in section.model_fields}
        else:
            keys.add(name)
    return keys


def test_every_key_of_a_model_needs_a_new_slot_or_is_a_label() -> None:
    assert set(Model.model_fields) == NEW_SLOT_KEYS | LABEL_KEYS
    assert not NEW_SLOT_KEYS & LABEL_KEYS


def test_every_other_key_is_applied_at_once_or_needs_a_restart() -> None:
    sets = (AT_ONCE_KEYS, RESTART_KEYS, COMPARED_ELSEWHERE)
    assert frozenset().union(*sets) == config_keys()
    assert sum(map(len, sets)) == len(config_keys())


def test_keys_of_engines_exist_and_only_engines_that_read_files_share_some() -> None:
    for keys in KEYS_OF_ENGINES.values():
        assert set(Model.model_fields) >= keys
        # Both start a program of the operator's.
        assert keys is COMMAND_KEYS or COMMAND_KEYS & keys <= {"cmd"}


def test_description_says_which_engines_a_key_belongs_to() -> None:
    sentences = descriptions(Model)
    for key in Model.model_fields:
        said = sentences[key].split(":")[0].split(", ")
        owners = [name for name, keys in KEYS_OF_ENGINES.items() if key in keys]
        assert [name for name in said if name in KEYS_OF_ENGINES and key != "engine"] == owners, key


@pytest.mark.parametrize("key", sorted(set(Model.model_fields) - {"engine"}))
def test_changed_key_of_a_model(key: str) -> None:
    base: dict[str, Any] = {"cmd": "q ${PORT}"} if key in COMMAND_KEYS else {"path": "/q.gguf"}
    owner = next((name for name, keys in KEYS_OF_ENGINES.items() if key in keys), "llamacpp")
    if owner not in ("llamacpp", "command") and key not in COMMAND_KEYS:
        base = {"path": "/q", "engine": owner}
    if owner == "comfyui" and key not in COMMAND_KEYS:
        base |= {"workflow": "/w.json", "inputs": {"prompt": "6.text"}}
    if owner == "remote":
        base = {"remote": "first"}
    if key == "options":
        # Only engines of other packages have it, and none is installed here.
        assert key in NEW_SLOT_KEYS
        return
    remotes = {name: Remote(base_url="https://a") for name in ("first", "other")}
    old = Config(remotes=remotes, models={"q": Model(**base), "same": Model(path="/s.gguf")})
    changed = Model(**{**base, key: OTHER_VALUES[key]})
    new = Config(remotes=remotes, models={"q": changed, "same": Model(path="/s.gguf")})
    changes = diff(old, new)
    assert changes.changed == (("q",) if key in NEW_SLOT_KEYS else ())
    assert changes.relabelled == (("q",) if key in LABEL_KEYS else ())
    assert not (changes.added or changes.removed or changes.at_once or changes.needs_restart)


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
