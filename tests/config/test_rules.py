"""Rules between keys, and which ids a model may have."""

from __future__ import annotations

import hashlib

import pytest
from pydantic import ValidationError

from greenroom.config.kinds import RESERVED_ENDINGS, RESERVED_IDS, id_problem
from greenroom.config.schema import Config, Model

from .conftest import Complaints, Loads

HASH = hashlib.sha256(b"a").hexdigest()


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        ("{path: a.gguf}", "llamacpp"),
        ("{path: A.GGUF}", "llamacpp"),
        ("{path: a.gguf, engine: null}", "llamacpp"),
        ("{path: a.bin, engine: llamacpp}", "llamacpp"),
        ("{path: a}", "transformers"),
        ("{path: a.gguf, engine: transformers}", "transformers"),
        ("{cmd: 'a ${PORT}'}", "command"),
        ("{cmd: [a, '${PORT}'], path: null}", "command"),
        ("{cmd: a, env: {PORT: '${PORT}'}}", "command"),
        ("{cmd: a, check_endpoint: none}", "command"),
    ],
)
def test_engine_is_inferred(loads: Loads, keys: str, engine: str) -> None:
    assert loads(f"models: {{q: {keys}}}").models["q"].engine == engine


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("ttl_s: 1", "2: models.q: give path (a .gguf file or a folder) or cmd (for engine command)"),
        ("path: ''", "2: models.q: give path (a .gguf file or a folder) or cmd (for engine command)"),
        (
            "path: a.gguf\n    cmd: a",
            "2: models.q: give path (engine llamacpp or transformers) or cmd (engine command), not both",
        ),
        ("engine: transformers", "2: models.q: engine transformers needs path"),
        (
            "path: a\n    n_gpu_layers: 5",
            "4: models.q.n_gpu_layers: n_gpu_layers is for engine llamacpp; transformers has nothing like it",
        ),
        (
            "path: a.gguf\n    isolate: true",
            "4: models.q.isolate: isolate is for engine transformers or diffusers; llamacpp takes its ",
        ),
        ("engine: llamacpp", "2: models.q: engine llamacpp needs path"),
        ("engine: command", "2: models.q: engine command needs cmd"),
        ("engine: nope", "3: models.q.engine: there is no engine 'nope'; there are comfyui, command, diffusers, "),
        (
            "path: a.gguf\n    options: {a: 1}",
            "4: models.q.options: is for engines of other packages; llamacpp has keys of its own",
        ),
        (
            "path: a.gguf\n    lora: {'a:b.gguf': 1}",
            '4: models.q.lora."a:b.gguf": llama.cpp takes no adapter whose path has a colon, comma or quote in it',
        ),
        (
            "path: a.gguf\n    abilities: []",
            "4: models.q.abilities: may not be empty; without the key it is asked for anything",
        ),
        (
            "path: a.gguf\n    abilities: [sing]",
            "4: models.q.abilities[0]: one of chat, completions, embeddings, rerank, images, image_edits, "
            'transcription, translation, speech, vision, audio, tools is wanted, not "sing"',
        ),
        (
            "cmd: a ${PORT}\n    ctx_size: 5",
            "4: models.q.ctx_size: ctx_size is for engine llamacpp, transformers, vllm or sglang; command ",
        ),
        (
            "engine: command\n    cmd: a ${PORT}\n    path: a.gguf",
            "5: models.q.path: path is for engine llamacpp, transformers, diffusers, vllm, sglang, comfyui or whisper",
        ),
        (
            "path: a.gguf\n    cmd_stop: a",
            "4: models.q.cmd_stop: cmd_stop is for engine command; llamacpp has nothing like it",
        ),
        (
            "engine: llamacpp\n    path: a.gguf\n    cmd: a",
            "5: models.q.cmd: cmd is for engine comfyui or command; llamacpp takes its arguments in args",
        ),
        (
            "path: a.gguf\n    isolate_tenants: process\n    versions: {}",
            "5: models.q.versions: does not go together with isolate_tenants: process: an update loads one process",
        ),
        ("cmd: a", '3: models.q.cmd: needs ${PORT}, the port to listen on, unless check_endpoint is "none"'),
        ("cmd: 'a \"b ${PORT}'", "3: models.q.cmd: cannot be split into words: no closing quotation"),
        ("cmd: '# ${PORT}'", "3: models.q.cmd: is empty"),
        ("cmd: ['', '${PORT}']", "3: models.q.cmd: is empty"),
        ("cmd: a ${PORT}\n    cmd_stop: ''", "4: models.q.cmd_stop: is empty"),
        ("cmd: a ${PORT}\n    check_endpoint: health", '4: models.q.check_endpoint: must begin with / or be "none"'),
        ("cmd: a ${PORT}\n    check_endpoint: /a b", "4: models.q.check_endpoint: may not contain spaces"),
        ("path: a.gguf\n    set_params: {model: 1}", "4: models.q.set_params.model: model cannot be set"),
        ("path: a.gguf\n    set_params: {stream: 1}", "4: models.q.set_params.stream: stream cannot be set"),
        (
            "path: a.gguf\n    strip_params:\n    - a\n    - model",
            "6: models.q.strip_params[1]: model cannot be removed",
        ),
        ("path: a.gguf\n    strip_params: [stream]", "4: models.q.strip_params[0]: stream cannot be removed"),
        ("path: a.gguf\n    env: {A=B: c}", '4: models.q.env."A=B": is not a name an environment variable can have'),
        ("path: a.gguf\n    env: {'': c}", '4: models.q.env."": is not a name an environment variable can have'),
    ],
)
def test_broken_rule_of_a_model_is_told(complaints: Complaints, keys: str, told: str) -> None:
    (line,) = complaints(f"models:\n  q:\n    {keys}\n")
    assert line.startswith(f"my.yaml:{told}")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("name: a", "give exactly one of key and sha256 for a"),
        (f"name: a, key: b, sha256: {HASH}", "give exactly one of key and sha256 for a"),
        ("name: a, key: ''", "key: must be visible ASCII characters without spaces, at least one"),
        ("name: a, key: 'a b'", "key: must be visible ASCII characters without spaces, at least one"),
        ("name: a, key: é", "key: must be visible ASCII characters without spaces, at least one"),
        (
            "name: a, sha256: abc",
            "sha256: must be 64 hexadecimal digits in lower case, as `greenroom key new` prints them",
        ),
        ("name: '', key: a", "name: may not be empty"),
        (f"name: {'n' * 257}, key: a", "name: may have at most 256 characters"),
        ('name: "a\\nb", key: a', "name: may not contain control or invisible characters"),
    ],
)
def test_broken_rule_of_an_api_key_is_told(complaints: Complaints, keys: str, told: str) -> None:
    (line,) = complaints(f"server:\n  api_keys:\n    - {{{keys}}}\n")
    assert line.startswith("my.yaml:3: server.api_keys[0]")
    assert line.endswith(told)


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("http://h", "must begin with redis://, rediss:// or unix://"),
        ("redis://h:99999", "has a port that is no whole number from 1 to 65535"),
        ("redis://h:abc", "has a port that is no whole number from 1 to 65535"),
        ("redis://h:0", "has a port that is no whole number from 1 to 65535"),
        ("rediss://me:secret@[::1]:-1/0", "has a port that is no whole number from 1 to 65535"),
        ("redis://[::1", "needs [ ] around an IPv6 address"),
        ("redis://[nowhere]:6379", "needs [ ] around an IPv6 address"),
        ("redis://fe80::1:6379", "needs [ ] around an IPv6 address"),
        ("redis://h\u2100:1", "has a host with characters that no host's name has"),
        # A password that was not written as addresses want it ends the host too early.
        ("redis://:secret/1@h:6379/0", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://:1/secret@h:6379/0", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://me:secret?1@h", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://me:secret#1@h", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://:12?secret@h:6379/0", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://:12?a=secret@h:6379/0", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://me?1=secret@h", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://me?db=1&secret@h", "has an @ behind its host: in a name or password write / as %2F"),
        ("unix://:12?secret@/run/a.sock", "has an @ behind its host: in a name or password write / as %2F"),
        ("redis://h/abc", "has a database that is no number"),
        ("redis://h/-1", "has a database that is no number"),
        ("redis://h/1/2", "has a database that is no number"),
        ("redis://h o:6379", "has a space in it"),
        ("redis://", "names no host, as in redis://localhost:6379/0"),
        ("redis:///0", "names no host, as in redis://localhost:6379/0"),
        ("rediss://me:secret@:6379/0", "names no host, as in redis://localhost:6379/0"),
        ("redis://?db=1", "names no host, as in redis://localhost:6379/0"),
        ("unix://", "names no socket by its path, as in unix:///run/redis.sock"),
        ("unix://me:secret@", "names no socket by its path, as in unix:///run/redis.sock"),
        ("unix:///?db=1", "names no socket by its path, as in unix:///run/redis.sock"),
        ("unix://me:secret/1@/run/a.sock", "names no socket by its path, as in unix:///run/redis.sock"),
    ],
)
def test_an_address_that_no_lease_store_can_have_is_told(complaints: Complaints, store: str, told: str) -> None:
    (line,) = complaints(f"leases:\n  store: '{store}'\n")
    assert line.startswith(f"my.yaml:2: leases.store: {told}")
    assert "secret" not in line


@pytest.mark.parametrize(
    "store",
    [
        *("redis://h", "redis://h/", "redis://h:6379/0", "rediss://me:a%2Fb@h:1/2?db=3", "redis://[::1]:6379"),
        *("redis://me:a@b@h:65535", "unix:///run/a.sock", "unix://me:x@/run/a@b.sock", "redis://h?name=a@b"),
        *("redis://h?db=1&client_name=a@b", "unix:///run/a.sock?db=1&client_name=a@b"),
    ],
)
def test_an_address_that_a_lease_store_can_have_is_taken(loads: Loads, store: str) -> None:
    assert loads(f"leases:\n  store: '{store}'\n").leases.store == store


def test_api_keys_may_not_repeat_in_name_or_secret(complaints: Complaints) -> None:
    assert complaints(f"""\
        server:
          api_keys:
            - {{name: x, key: a}}
            - {{name: x, key: b}}
            - {{name: y, sha256: {HASH}}}
        """) == [
        "my.yaml:4: server.api_keys[1].name: x names another key already",
        "my.yaml:5: server.api_keys[2]: is the same key as x",
    ]


def test_alias_may_be_no_id_and_no_other_alias(complaints: Complaints) -> None:
    assert complaints("""\
        models:
          a: {path: a.gguf, aliases: [b, c, c]}
          b:
            path: b.gguf
            aliases:
              - d
              - c
        """) == [
        "my.yaml:2: models.a.aliases[0]: b is already a model's id",
        "my.yaml:2: models.a.aliases[2]: c is already an alias of a",
        "my.yaml:7: models.b.aliases[1]: c is already an alias of a",
    ]


def test_ids_differ_by_case(loads: Loads) -> None:
    assert set(loads("models: {a: {path: a.gguf}, A: {path: a.gguf, aliases: [B, b]}}").models) == {"a", "A"}


GOOD_IDS = [
    "q",
    "qwen2.5:7b",
    "org/model",
    "a/b/c",
    "ü b",
    "x" * 256,
    "loads",
    "loads/x",
    "a.b",
    "...",
    "stream",
    "a@b%c?d",
]
BAD_IDS = {
    "": "empty",
    "x" * 257: "at most 256",
    "a\nb": "control",
    "a\u200bb": "invisible",
    "a\u202eb": "invisible",
    " a": "space",
    "a ": "space",
    "/a": "begin or end with /",
    "a/": "begin or end with /",
    "a//b": "//",
    "../a": "segments",
    "a/./b": "segments",
    "..": "segments",
    "a/logs/stream": "end in /stream",
    **{name: f"{name} is a word of the management API" for name in sorted(RESERVED_IDS | RESERVED_ENDINGS)},
    **{f"{name}/a": f"begin with {name}/" for name in sorted(RESERVED_IDS)},
    **{f"a/{name}": f"end in /{name}" for name in sorted(RESERVED_ENDINGS)},
}


@pytest.mark.parametrize("name", GOOD_IDS)
def test_text_can_be_an_id(name: str) -> None:
    assert id_problem(name) is None


@pytest.mark.parametrize("name", BAD_IDS)
def test_text_cannot_be_an_id_or_an_alias(name: str) -> None:
    assert BAD_IDS[name] in (id_problem(name) or "no problem")
    model = Model(path="/q.gguf")
    with pytest.raises(ValidationError):
        Config(models={name: model})
    with pytest.raises(ValidationError):
        Model(path="/q.gguf", aliases=(name,))


def test_rules_hold_for_a_config_that_comes_from_no_file() -> None:
    with pytest.raises(ValidationError, match="not both"):
        Model(path="/q.gguf", cmd="q")
    with pytest.raises(ValidationError, match="already a model's id"):
        Config(models={"a": Model(path="/a.gguf", aliases=("b",)), "b": Model(path="/b.gguf")})
    assert Model(path="/q.gguf").engine == "llamacpp"


@pytest.mark.parametrize(
    "route", ["tokenize", "", "/a/**/b", "/a//b", "/a/../b", "/./a", "/a%20b", "/a?b", "/a b", "/a*"]
)
def test_a_route_that_no_path_can_fit_is_refused(complaints: Complaints, route: str) -> None:
    (line,) = complaints(f"models:\n  q:\n    path: q.gguf\n    routes: ['/ok/*', '/ok/**', '/', '{route}']\n")
    assert line.startswith("my.yaml:4: models.q.routes[3]: ")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("", "engine comfyui needs path, the folder of its installation, or cmd, and not both"),
        ("path: a", "engine comfyui needs workflow, a file in ComfyUI's API format"),
        ("path: a, workflow: w", 'models.q.inputs: needs prompt, such as "6.text"'),
        ("path: a, workflow: w, inputs: {prompt: text}", "models.q.inputs.prompt: is written as NODE.INPUT"),
        ("cmd: a, workflow: w, inputs: {prompt: 6.text}", "models.q.cmd: needs ${PORT}, the port to listen on"),
        ("cmd: 'a ${PORT}', path: a, workflow: w, inputs: {prompt: 6.text}", "or cmd, and not both"),
    ],
)
def test_broken_rule_of_a_workflow_is_told(complaints: Complaints, keys: str, told: str) -> None:
    assert any(told in line for line in complaints(f"models: {{q: {{engine: comfyui, {keys}}}}}"))
