"""Every key of a llama-swap file is mapped, or named with the reason why not; every import can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import loader
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.importing.llama_swap import import_file
from greenroom.importing.result import Imported, as_yaml

CMD = "srv --port ${PORT}"


def imported(folder: Path, tree: Any) -> Imported:
    path = folder / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return import_file(path)


def served(folder: Path, made: Imported, environ: dict[str, str] | None = None) -> Config:
    """As `greenroom serve` would read it."""
    path = folder / "greenroom.yaml"
    path.write_text(as_yaml(made.tree, ["A title"], made.notes))
    return loader.load(path, environ or {}).config


def at(tree: Any, place: str) -> Any:
    for step in place.split(">"):
        tree = tree[step]
    return tree


def model(**keys: Any) -> dict[str, Any]:
    return {"models": {"m": {"cmd": CMD, **keys}}}


def peer(**keys: Any) -> dict[str, Any]:
    return {**model(), "peers": {"p": {"proxy": "https://x.example/", "models": ["q"], **keys}}}


def selector(**keys: Any) -> dict[str, Any]:
    return {**model(), "selectors": {"s": {"strategy": "warm", "targets": ["m"], **keys}}}


def routing(**router: Any) -> dict[str, Any]:
    return {**model(), "routing": router}


# Groups and matrix stand at the top, or here.
ROUTER = "routing.router.settings."


def under(at: str, **rules: Any) -> dict[str, Any]:
    return routing(router={"use": next(iter(rules)).rstrip("s"), "settings": rules}) if at else {**model(), **rules}


# Each key of llama-swap's schema: what is said, and where it is in our file. A text is part of the note about the key.
TIMES = ("connect", "keepalive", "responseHeader", "tlsHandshake", "expectContinue", "idleConn")
KEYS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "healthCheckTimeout": ({**model(), "healthCheckTimeout": 60}, "models>m>load_timeout_s", 60),
    "logLevel": ({**model(), "logLevel": "warn"}, "log>level", "warning"),
    "logTimeFormat": ({**model(), "logTimeFormat": "kitchen"}, "", "one format"),
    "logToStdout": ({**model(), "logToStdout": "both"}, "", "greenroom logs"),
    "logRequests": ({**model(), "logRequests": True}, "", "ignores it"),
    "store.path": ({**model(), "store": {"path": "a.db"}}, "", "state_dir"),
    "metricsMaxInMemory": ({**model(), "metricsMaxInMemory": 5}, "", "/api/v1/requests"),
    "captureBuffer": ({**model(), "captureBuffer": 5}, "", "never kept"),
    "ui.activity.session_id": ({**model(), "ui": {"activity": {"session_id": ["X-S"]}}}, "", "no header"),
    "performance.disabled": ({**model(), "performance": {"disabled": True}}, "", "server.metrics"),
    "performance.every": ({**model(), "performance": {"every": "5s"}}, "", "look_every_s"),
    "startPort": ({**model(), "startPort": 9000}, "ports>first", 9000),
    "sendLoadingState": ({**model(), "sendLoadingState": True}, "", "server.heartbeat"),
    "includeAliasesInList": ({**model(), "includeAliasesInList": True}, "", "aliases"),
    "globalTTL": ({**model(), "globalTTL": 90}, "stay_warm>llm_s", 90),
    "unloadTimeout": ({**model(), "unloadTimeout": 7}, "models>m>stop_timeout_s", 7),
    "macros": ({"macros": {"n": 1}, **model()}, "macros>n", 1),
    "apiKeys": (
        {**model(), "apiKeys": ["${env.K}"]},
        "server>api_keys",
        [{"name": "key1", "key": "${env.K}", "tenant": "everyone", "admin": True}],
    ),
    "globalConcurrencyLimit": ({**model(), "globalConcurrencyLimit": 8}, "", "its own concurrency"),
    **{
        f"security.cors.{key}": ({**model(), "security": {"cors": {key: value}}}, "", "server.allowed_origins")
        for key, value in {"allowedOrigins": ["https://a.example"], "allowCredentials": True, "maxAge": 9}.items()
    },
    "upstream.ignorePaths": ({**model(), "upstream": {"ignorePaths": ["x"]}}, "", "loads its model"),
    "profiles.p.pins.a": ({**model(), "profiles": {"p": {"pins": {"a": "m"}}}}, "", "greenroom reload"),
    "profiles.p.description": ({**model(), "profiles": {"p": {"description": "d"}}}, "", "greenroom reload"),
    "selectors.s.strategy": (selector(strategy="pin"), "tasks>s>pin_primary", True),
    "selectors.s.targets": (selector(), "tasks>s", {"candidates": ["m"], "prefer_first_s": 0}),
    "selectors.s.settings.spillover": (selector(settings={"spillover": 1}), "", "not spread"),
    "selectors.s.description": (selector(description="D"), "tasks>s>description", "D"),
    "selectors.s.unlisted": (selector(unlisted=True), "tasks>s>unlisted", True),
    "selectors.s.name": (selector(name="N"), "", "name for people"),
    "selectors.s.metadata.a": (selector(metadata={"a": 1}), "", "no metadata"),
    "hooks.on_startup.preload": ({**model(), "hooks": {"on_startup": {"preload": ["m"]}}}, "models>m>preload", True),
    "hooks.on_startup.profile": ({**model(), "hooks": {"on_startup": {"profile": "p"}}}, "", "greenroom reload"),
    **{
        f"{at}groups.g.{key}": (
            under(at, groups={"g": {"members": ["m"], key: value}}),
            f"scheduler>company>groups>g>{key}",
            value,
        )
        for at in ("", ROUTER)
        for key, value in {"members": ["m"], "swap": False, "exclusive": False, "persistent": True}.items()
    },
    **{
        f"{at}matrix.{key}": (
            under(at, matrix={"sets": {"s": "m"}, key: value}),
            f"scheduler>company>matrix>{key}",
            value,
        )
        for at in ("", ROUTER)
        for key, value in {"vars": {"a": "m"}, "evict_costs": {"m": 5}, "sets": {"t": "m"}}.items()
    },
    "routing.router.use": (routing(router={"use": "group"}), "scheduler>company", {"groups": {}}),
    "routing.scheduler.use": (routing(scheduler={"use": "fifo"}), "", "scheduler.policy"),
    "routing.scheduler.settings.fifo.priority": (
        routing(scheduler={"settings": {"fifo": {"priority": {"m": 3}}}}),
        "models>m>priority",
        0,
    ),
    "peers.p.proxy": (peer(), "remotes>p>base_url", "https://x.example/v1"),
    "peers.p.models": (peer(), "models>p/q>use_model_name", "q"),
    "peers.p.apiKey": (peer(apiKey="${env.K}"), "remotes>p>api_key_env", "K"),
    "peers.p.filters.setParams": (peer(filters={"setParams": {"a": 1}}), "models>p/q>set_params", {"a": 1}),
    "peers.p.filters.stripParams": (peer(filters={"stripParams": "a"}), "models>p/q>strip_params", ["a"]),
    "peers.p.filters.strip_params": (peer(filters={"strip_params": "a"}), "models>p/q>strip_params", ["a"]),
    "peers.p.filters.setParamsByID.q.a": (peer(filters={"setParamsByID": {"q": {"a": 1}}}), "", "one of its names"),
    "peers.p.timeouts.connect": (peer(timeouts={"connect": 3}), "remotes>p>connect_timeout_s", 3),
    "peers.p.timeouts.responseHeader": (peer(timeouts={"responseHeader": 9}), "remotes>p>first_byte_timeout_s", 9),
    **{
        f"peers.p.timeouts.{key}": (peer(timeouts={key: 1}), "", "no such time")
        for key in ("keepalive", "tlsHandshake", "expectContinue", "idleConn")
    },
    "models.m.cmd": (model(), "models>m>cmd", CMD),
    "models.m.cmdStop": (model(cmdStop="kill ${PID}"), "models>m>cmd_stop", "kill ${PID}"),
    "models.m.proxy": (model(cmd="srv -p 81:9001", proxy="http://127.0.0.1:81"), "models>m>cmd", "srv -p ${PORT}:9001"),
    "models.m.checkEndpoint": (model(checkEndpoint="/ok"), "models>m>check_endpoint", "/ok"),
    "models.m.env": (model(env=["A=1=2", "B="]), "models>m>env", {"A": "1=2", "B": ""}),
    "models.m.aliases": (model(aliases=["a", " b "]), "models>m>aliases", ["a", "b"]),
    "models.m.ttl": (model(ttl=0), "models>m>ttl_s", 0),
    "models.m.unloadTimeout": ({**model(unloadTimeout=3), "unloadTimeout": 9}, "models>m>stop_timeout_s", 3),
    "models.m.useModelName": (model(useModelName="q"), "models>m>use_model_name", "q"),
    "models.m.name": (model(name="M"), "models>m>name", "M"),
    "models.m.description": (model(description="A model"), "models>m>description", "A model"),
    "models.m.unlisted": (model(unlisted=True), "models>m>unlisted", True),
    "models.m.metadata": (model(metadata={"a": {"b": [1]}}), "models>m>metadata", {"a": {"b": [1]}}),
    "models.m.concurrencyLimit": (model(concurrencyLimit=3), "models>m>concurrency", 3),
    "models.m.sendLoadingState": (model(sendLoadingState=True), "", "server.heartbeat"),
    "models.m.filters.stripParams": (model(filters={"stripParams": "a, b"}), "models>m>strip_params", ["a", "b"]),
    "models.m.filters.strip_params": (model(filters={"strip_params": "a"}), "models>m>strip_params", ["a"]),
    "models.m.filters.setParams": (model(filters={"setParams": {"a": 1}}), "models>m>set_params", {"a": 1}),
    "models.m.filters.setParamsByID": (
        model(filters={"setParamsByID": {"${MODEL_ID}:hot": {"temperature": 2}}}, aliases=["m:hot"]),
        "tasks>m:hot",
        {"candidates": ["m"], "set_params": {"temperature": 2}, "unlisted": True},
    ),
    "models.m.filters.setParamsByID.m": (model(filters={"setParamsByID": {"m": {"a": 1}}}), "", "own id"),
    "models.m.macros": (model(macros={"x": 1}, metadata={"x": "${x}"}), "models>m>metadata>x", 1),
    **{f"models.m.timeouts.{key}": (model(timeouts={key: 1}), "", "times of their own") for key in TIMES},
    "models.m.compat.ignoreWebsockets": (model(compat={"ignoreWebsockets": True}), "", "WebSocket"),
    "models.m.capabilities.in": (
        model(capabilities={"in": ["text", "image"]}),
        "models>m>abilities",
        ["chat", "completions", "embeddings", "vision"],
    ),
    "models.m.capabilities.out": (model(capabilities={"out": ["image"]}), "models>m>abilities", ["images"]),
    "models.m.capabilities.tools": (
        model(capabilities={"tools": True}),
        "models>m>abilities",
        ["chat", "completions", "embeddings", "tools"],
    ),
    "models.m.capabilities.reranker": (model(capabilities={"reranker": True}), "models>m>abilities", ["rerank"]),
    "models.m.capabilities.disableAuto": (model(capabilities={"disableAuto": True}), "", "always shown"),
    "models.m.capabilities.context": (model(capabilities={"context": 9}), "", "engine's own context"),
    "models.m.healthCheckTimeout": (model(healthCheckTimeout=9), "", "load_timeout_s"),
}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_mapped_or_named_and_the_result_can_be_served(key: str, tmp_path: Path) -> None:
    tree, place, wanted = KEYS[key]
    made = imported(tmp_path, tree)
    served(tmp_path, made, {"K": "a-key"})
    if place:
        assert at(made.tree, place) == wanted
    else:
        lines = [note.line for note in made.notes if note.line.startswith(f"{key}: not mapped: ")]
        assert len(lines) == 1 and wanted in lines[0]


@pytest.mark.parametrize(
    ("said", "place"),
    [
        (model(filters={"setParams": {"max_tokens?": 9, "top_p": 1}}), "models>m>set_params"),
        (model(filters={"setParamsByID": {"h": {"max_tokens?": 9, "top_p": 1}}}), "tasks>h>set_params"),
        (peer(filters={"setParams": {"max_tokens?": 9, "top_p": 1}}), "models>p/q>set_params"),
    ],
)
def test_a_default_for_requests_is_named_and_not_forced_on_them(
    said: dict[str, Any], place: str, tmp_path: Path
) -> None:
    made = imported(tmp_path, said)
    assert at(made.tree, place) == {"top_p": 1}
    (told,) = [note.line for note in made.notes if "max_tokens?" in note.line]
    assert "not mapped" in told and "only where a request does not" in told


def test_the_older_name_of_stripped_fields_counts_only_alone(tmp_path: Path) -> None:
    made = imported(tmp_path, model(filters={"stripParams": "a", "strip_params": "b"}))
    assert at(made.tree, "models>m>strip_params") == ["a"]


@pytest.mark.parametrize(("used", "decides"), [(None, "groups"), ("group", "groups"), ("matrix", "matrix")])
def test_below_routing_groups_decide_unless_it_says_otherwise(used: str | None, decides: str, tmp_path: Path) -> None:
    settings = {"groups": {"g": {"members": ["m"]}}, "matrix": {"sets": {"s": "m"}}}
    made = imported(tmp_path, routing(router={"settings": settings, **({"use": used} if used else {})}))
    assert list(at(made.tree, "scheduler>company")) == [decides]
    assert any("decide" in note.line for note in made.notes)


def test_a_priority_may_be_said_of_an_alias(tmp_path: Path) -> None:
    said = {"routing": {"scheduler": {"settings": {"fifo": {"priority": {"other": 3}}}}}}
    made = imported(tmp_path, {"models": {"m": {"cmd": CMD, "aliases": ["other"]}, "n": {"cmd": CMD}}, **said})
    assert at(made.tree, "models>m>priority") == 0 and "priority" not in at(made.tree, "models>n")
    assert not [note for note in made.notes if "not mapped" in note.line]


def test_the_guide_names_every_key() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "switching.md").read_text(encoding="utf-8")
    for key in KEYS:
        parts = key.split(".")
        name = parts[2] if parts[0] == "models" else parts[0]
        assert f"`{name}`" in guide, key


def test_the_id_with_a_path_of_its_own_is_told_where_it_is(tmp_path: Path) -> None:
    made = imported(tmp_path, {"models": {"comfyui_auto": {"cmd": CMD}}})
    assert [note.line for note in made.notes] == [
        "models.comfyui_auto: it is not at /comfyui/ here but at /upstream/comfyui_auto/"
    ]


def test_keys_that_llama_swap_does_not_have_are_named(tmp_path: Path) -> None:
    made = imported(
        tmp_path, {**model(ttll=3, filters={"x": 1}), "modles": {}, "groups": {"g": {"members": [], "y": 1}}}
    )
    told = [note.line for note in made.notes]
    for key in ("models.m.ttll", "models.m.filters.x", "modles", "groups.g.y"):
        assert f"{key}: not mapped: llama-swap has no such key" in told


def test_without_rules_one_model_runs_at_a_time_and_stays(tmp_path: Path) -> None:
    config = served(tmp_path, imported(tmp_path, model()))
    assert config.scheduler.company is not None and config.scheduler.company.groups == {}
    assert not config.scheduler.fit_memory and config.stay_warm.llm_s == 0 and config.server.port == 8080


def test_keys_are_kept_as_hashes_or_variables_and_never_told(tmp_path: Path) -> None:
    made = imported(tmp_path, {**model(), "apiKeys": ["sk-secret", "${env.K}"]})
    text = as_yaml(made.tree, [], made.notes)
    assert "sk-secret" not in text and "key: ${env.K}" in text
    first, second = served(tmp_path, made, {"K": "other"}).server.api_keys
    assert first.admin and first.tenant == second.tenant == "everyone"
    made = imported(tmp_path, {**model(), "apiKeys": {"sk-secret": 1}})
    assert "sk-secret" not in as_yaml(made.tree, [], made.notes)


@pytest.mark.parametrize(
    "key", ["apiKeys", "macros", "models.m.env", "models.m.cmd", "models.m.cmdStop", "models.m.ttl"]
)
def test_a_wrong_value_is_never_shown_because_it_may_be_a_secret(key: str, tmp_path: Path) -> None:
    tree = _with({"models": {"m": {"cmd": CMD}, "other": {"cmd": CMD}}}, key.split("."), [{"sk-secret": "sk-secret"}])
    made = imported(tmp_path, tree)
    text = as_yaml(made.tree, [], made.notes)
    assert f"# {key}: not mapped: a " in text and "sk-secret" not in text


def test_a_level_that_llama_swap_does_not_have_is_named(tmp_path: Path) -> None:
    made = imported(tmp_path, {**model(), "logLevel": "loud"})
    assert [note.line for note in made.notes] == ["logLevel: not mapped: one of debug, info, warn, error is wanted"]
    assert "log" not in made.tree


# --- macros ---------------------------------------------------------------------------------------------------------

MACROS = """
macros:
  bin: /opt/srv
  run: ${bin} --port ${PORT}
  size: 4096
models:
  plain:
    cmd: ${run} -c ${size} --name ${MODEL_ID}
    metadata: {size: "${size}", text: "about ${size}"}
  own:
    macros: {bin: /opt/other, more: "--more ${size}"}
    cmd: ${run} ${more}
"""


def test_macros_stay_and_those_of_a_model_are_written_out(tmp_path: Path) -> None:
    made = imported(tmp_path, MACROS)
    assert at(made.tree, "models>plain>cmd") == "${run} -c ${size} --name ${MODEL_ID}"
    assert at(made.tree, "models>own>cmd") == "/opt/other --port ${PORT} --more 4096"
    config = served(tmp_path, made)
    assert config.models["plain"].cmd == "/opt/srv --port ${PORT} -c 4096 --name plain"
    assert config.models["plain"].metadata == {"size": 4096, "text": "about 4096"}


def test_names_that_are_none_here_are_written_out(tmp_path: Path) -> None:
    made = imported(tmp_path, {"macros": {"9b": "x", "GPUS": "y"}, **model(cmd=CMD + " ${9b} ${GPUS}")})
    assert served(tmp_path, made).models["m"].cmd == CMD + " x y" and "macros" not in made.tree


@pytest.mark.parametrize(
    ("macros", "cmd"),
    [
        ({"a": "${a}"}, CMD),
        ({"a": "${b}", "b": "${a}"}, CMD),
        ({}, CMD + " ${nobody}"),
        ({"a": ["x"]}, CMD),
        ({"a": "x"}, CMD + " $${env.HOME}"),
    ],
)
def test_macros_in_circles_and_unknown_ones_are_refused(macros: dict[str, Any], cmd: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.yaml:\d+: (macros|models)"):
        imported(tmp_path, {"macros": macros, **model(cmd=cmd)})


def test_macros_that_grow_without_bound_are_refused(tmp_path: Path) -> None:
    macros = {"a0": "x" * 100, **{f"a{n}": ("${a" + str(n - 1) + "}") * 10 for n in range(1, 20)}}
    with pytest.raises(ConfigError, match="expand to more than 8 MiB"):
        imported(tmp_path, {"macros": macros, **model()})


# --- what cannot be run here ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"proxy": "http://10.0.0.7:9000"}, "another host"),
        ({"proxy": "https://localhost:9000"}, "no http://"),
        ({"proxy": "unix:///tmp/x"}, "no http://"),
        ({"proxy": "http://localhost:9000/api"}, "has a path"),
        ({"proxy": "http://localhost:9000", "cmd": "srv"}, "port 9000"),
        ({"proxy": "http://localhost:9000", "cmd": "srv -c 9000 -n 9000"}, "port 9000"),
        ({"cmd": "srv"}, "no port can be given"),
        ({"cmd": None}, "no cmd"),
    ],
)
def test_a_model_that_cannot_be_run_is_left_out_by_name(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    tree = {"models": {"m": {"cmd": CMD, **keys}, "other": {"cmd": CMD}}, "matrix": {"sets": {"s": "m & other"}}}
    made = imported(tmp_path, tree)
    told = [note.line for note in made.notes]
    assert any(line.startswith("models.m: not mapped: the whole model: ") and why in line for line in told)
    assert any(line.startswith("matrix: not mapped: m was not imported") for line in told)
    assert list(served(tmp_path, made).models) == ["other"]


def test_a_file_of_which_no_model_can_be_run_is_refused_with_every_reason(tmp_path: Path) -> None:
    tree = {"models": {"a": {"cmd": "srv"}, "load": {"cmd": CMD}, "b": "srv"}, "peers": {"p": {"proxy": "ftp://x"}}}
    with pytest.raises(ConfigError, match=r"config\.yaml: holds no model that can be served\n") as refused:
        imported(tmp_path, tree)
    for where in ("models.a", "models.load", "models.b", "peers.p.proxy"):
        assert f"\n{where}: not mapped: the whole " in refused.value.message


def test_a_file_whose_peers_alone_can_be_asked_is_imported(tmp_path: Path) -> None:
    tree = {**peer(), "models": {"m": {"cmd": "srv"}}}
    assert list(served(tmp_path, imported(tmp_path, tree)).models) == ["p/q"]


def test_left_out_models_leave_groups_preloads_and_priorities(tmp_path: Path) -> None:
    tree = {
        "models": {"m": {"cmd": "srv"}, "load": {"cmd": CMD}, "other": {"cmd": CMD}},
        "groups": {"g": {"members": ["m", "other"]}},
        "hooks": {"on_startup": {"preload": ["m"]}},
        "routing": {"scheduler": {"settings": {"fifo": {"priority": {"m": 1}}}}},
    }
    config = served(tmp_path, imported(tmp_path, tree))
    assert config.scheduler.company is not None and config.scheduler.company.groups is not None
    assert config.scheduler.company.groups["g"].members == ("other",) and not config.models["other"].preload


@pytest.mark.parametrize(
    ("cmd", "env", "wanted"),
    [
        ("srv --port 9000 -c 9000", [], "srv --port ${PORT} -c 9000"),
        ("srv --port=9000", [], "srv --port=${PORT}"),
        ("docker run -p 127.0.0.1:9000:80 i", [], "docker run -p 127.0.0.1:${PORT}:80 i"),
        ("srv --bind localhost:9000", [], "srv --bind localhost:${PORT}"),
        ("srv", ["LISTEN=127.0.0.1:9000"], "srv"),
    ],
)
def test_a_fixed_port_becomes_a_free_one(cmd: str, env: list[str], wanted: str, tmp_path: Path) -> None:
    made = served(tmp_path, imported(tmp_path, model(cmd=cmd, env=env, proxy="http://localhost:9000"))).models["m"]
    assert made.cmd == wanted and made.env == ({"LISTEN": "127.0.0.1:${PORT}"} if env else {})
    # A daemon holds the ports of containers.
    assert made.listener == ("any" if cmd.startswith("docker") else "own")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {"a": 1, "b": 1, "c": 1}),
        ({"a": 10, "b": 5}, {"a": 0, "b": 1, "c": 2}),
        ({"a": -3, "b": -4}, {"a": 2, "b": 3, "c": 1}),
        ({"a": 7, "b": -7}, {"a": 0, "b": 2, "c": 1}),
    ],
)
def test_priorities_are_reversed(said: dict[str, int], wanted: dict[str, int], tmp_path: Path) -> None:
    tree = {"models": {name: {"cmd": CMD} for name in "abc"}}
    tree["routing"] = {"scheduler": {"settings": {"fifo": {"priority": said}}}}
    models = served(tmp_path, imported(tmp_path, tree)).models
    assert {name: 1 if one.priority == "normal" else one.priority for name, one in models.items()} == wanted


# --- peers ----------------------------------------------------------------------------------------------------------


def test_models_of_peers_are_asked_by_whole_names_and_by_clear_ones(tmp_path: Path) -> None:
    peers = {
        "Big Box": {"proxy": "http://127.0.0.1:1", "models": ["m", "q", "both"], "apiKey": "sk-secret"},
        "big-box": {"proxy": "http://lan:8080", "models": ["both", "load"]},
    }
    made = imported(tmp_path, {**model(), "peers": peers})
    config = served(tmp_path, made)
    assert {name: one.aliases for name, one in config.models.items() if one.engine == "remote"} == {
        "Big Box/m": (),
        "Big Box/q": ("q",),
        "Big Box/both": (),
        "big-box/both": (),
    }
    assert {name: one.base_url for name, one in config.remotes.items()} == {
        "big-box": "http://127.0.0.1:1/v1",
        "big-box-2": "http://lan:8080/v1",
    }
    assert "sk-secret" not in as_yaml(made.tree, [], made.notes)
    assert config.remotes["big-box"].api_key_env == "PEER_BIG_BOX_KEY"
    # An order of our management API.
    assert any(note.line.startswith("peers.big-box.models: not mapped: load: ") for note in made.notes)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"proxy": "http://lan:8080", "apiKey": "x"}, "without encryption"),
        ({"proxy": "ftp://lan"}, "https://HOST"),
        ({"proxy": "https://user:pw@lan"}, "https://HOST"),
        ({"proxy": "https://[::1"}, "https://HOST"),
        ({"proxy": None}, "https://HOST"),
    ],
)
def test_a_peer_that_cannot_be_asked_is_named(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    made = imported(tmp_path, peer(**keys))
    assert any("the whole peer: " in note.line and why in note.line for note in made.notes)
    assert list(served(tmp_path, made).models) == ["m"] and "pw" not in as_yaml(made.tree, [], made.notes)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "spillover"}, "not spread"),
        ({"strategy": "else"}, "warm or pin"),
        ({"targets": ["nobody"]}, "none of its targets"),
        ({"targets": ["m"] * 17}, "at most 16"),
    ],
)
def test_a_selector_that_no_task_can_be_is_named(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    made = imported(tmp_path, selector(**keys))
    assert any("the whole selector: " in note.line and why in note.line for note in made.notes)
    assert not served(tmp_path, made).tasks


def test_a_selector_may_name_models_of_peers(tmp_path: Path) -> None:
    made = imported(tmp_path, {**peer(), "selectors": {"s": {"strategy": "pin", "targets": ["m", "p/q"]}}})
    assert served(tmp_path, made).tasks["s"].candidates == ("m", "p/q")


# --- hostile files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nmodels: [*e,*e,*e]\n",
        "models: " + "[" * 1000,
        "x" * (5 * 1024 * 1024),
        "models: !!python/object/apply:os.system ['true']",
        "models: {a: &x {cmd: *x}}",
        "models: []",
        "[]",
        "models: {a: {cmd: x, cmd: y}}",
        "\0",
        "",
    ],
)
def test_hostile_files_are_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        imported(tmp_path, text)


@pytest.mark.parametrize(
    "value", [None, 3, -1, 1.5, True, "x", [], [3], {}, {"a": 3}, [[1]], {"a": {"b": []}}, "${PORT}"]
)
def test_wrong_values_are_named_or_refused_but_nothing_breaks(value: Any, tmp_path: Path) -> None:
    """Every key in turn has a value that it should not have. A part of what is made is read back: that takes time."""
    for number, (key, (tree, _, _)) in enumerate(KEYS.items()):
        steps = key.split(".")
        if steps == ["models", "m", "cmd"]:
            continue
        wrong = _with(tree, steps, value)
        try:
            made = imported(tmp_path, wrong)
            if number % 4 == len(str(value)) % 4:
                served(tmp_path, made, {"K": "a-key"})
        except ConfigError as error:
            assert "config.yaml" in error.message or "greenroom.yaml" in error.message


def _with(tree: Any, steps: list[str], value: Any) -> Any:
    if not steps:
        return value
    below = tree.get(steps[0], {}) if isinstance(tree, dict) else {}
    return {**(tree if isinstance(tree, dict) else {}), steps[0]: _with(below, steps[1:], value)}


def test_what_is_written_reads_back_as_it_was(tmp_path: Path) -> None:
    odd = {
        "1e3": "1e3",
        "on": "on",
        "~": "null",
        "x": " a\tb ",
        "é\u2028": "0x1F",
        "<<": "*a",
        "y": "a\n b\n\nc ",
        "": "-",
    }
    made = imported(tmp_path, model(metadata=odd, description="a: b # c"))
    config = served(tmp_path, made)
    assert config.models["m"].metadata == odd and config.models["m"].description == "a: b # c"


def test_a_note_is_one_line_whatever_a_key_is_called(tmp_path: Path) -> None:
    made = imported(tmp_path, model(**{"a\nmodels: {}": 1, "b\x1b[2J": 2, "c\u2028d": 3}))
    assert all(note.line.isprintable() for note in made.notes)
    assert len(made.notes) == 3 and list(served(tmp_path, made).models) == ["m"]
