"""The table of environment variables: what each sets, which wins, and the words for a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config import environment
from greenroom.config.environment import HIDDEN
from greenroom.config.loader import load
from greenroom.config.marks import Variable
from greenroom.config.schema import Config, Model
from greenroom.errors import ConfigError

from .conftest import Complaints, Loads

FILE = "server: {port: 1, wait_max_s: 7}\nmodels: {q: {path: q.gguf}}\n"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("PORT", "9000", "server.port", 9000),
        ("HOST", "::1", "server.host", "::1"),
        ("ALLOWED_HOSTS", "runner, runner.example.org,", "server.allowed_hosts", ("runner", "runner.example.org")),
        ("METRICS_ALIASES", "Runner-API", "server.metrics_aliases", "runner-api"),
        ("ENABLE_DOWNLOADS", "true", "library.download", True),
        ("ENABLE_METRICS", "false", "server.metrics", False),
        ("METRICS_PORT", "9090", "server.metrics_port", 9090),
        ("MAX_QUEUE_DEPTH", "16", "scheduler.queue_depth_max", 16),
        ("QUEUE_TIMEOUT_MS", "30000", "server.wait_max_s", 30.0),
        ("VLLM_MAX_MODEL_LEN", "32768", "vllm.ctx_size", 32768),
        ("VLLM_GPU_MEMORY_UTILIZATION", "0.9", "vllm.gpu_memory_utilization", 0.9),
        ("VLLM_ENABLE_PREFIX_CACHING", "false", "vllm.prefix_caching", False),
        ("SYNC_STATE_FILE", "/models/sync_state.json", "versions.state_file", "/models/sync_state.json"),
        ("LOG_LEVEL", "WARN", "log.level", "warning"),
        ("LOG_FORMAT", "JSON", "log.format", "json"),
    ],
)
def test_variable_wins_over_the_file(loads: Loads, name: str, text: str, key: str, value: object) -> None:
    section, _, last = key.partition(".")
    assert getattr(getattr(loads(FILE, {name: text}), section), last) == value
    assert getattr(getattr(load(None, {name: text}).config, section), last) == value


def test_file_holds_where_no_variable_says_anything(loads: Loads) -> None:
    config = loads(FILE, {"PORT": "", "UNRELATED": "1"})
    assert (config.server.port, config.server.wait_max_s) == (1, 7)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PORT": "70000"}, 'PORT (server.port): must be at most 65,535, not "70000"'),
        ({"QUEUE_TIMEOUT_MS": "soon"}, "QUEUE_TIMEOUT_MS (server.wait_max_s): milliseconds are wanted, not 'soon'"),
        (
            {"LOG_LEVEL": "verbose"},
            'LOG_LEVEL (log.level): one of debug, info, warning, error is wanted, not "verbose"',
        ),
        (
            {"VLLM_GPU_MEMORY_UTILIZATION": "90"},
            'VLLM_GPU_MEMORY_UTILIZATION (vllm.gpu_memory_utilization): must be at most 1, not "90"',
        ),
    ],
)
def test_wrong_value_is_an_error_that_names_the_variable(
    complaints: Complaints, environ: dict[str, str], told: str
) -> None:
    assert complaints(FILE, environ) == [f"the environment variable {told}"]
    with pytest.raises(ConfigError) as refused:
        load(None, environ)
    assert refused.value.message == f"the environment variable {told}"


def test_a_file_of_the_desired_state_and_signed_operations_exclude_each_other(complaints: Complaints) -> None:
    (told,) = complaints("governance: {key_path: /k}\n" + FILE, {"SYNC_STATE_FILE": "/models/sync_state.json"})
    assert told.startswith("the environment variable SYNC_STATE_FILE (versions.state_file): does not go together")


def test_problems_of_file_and_environment_are_told_together(complaints: Complaints) -> None:
    told = complaints("server:\n  prot: 1\n", {"PORT": "x"})
    assert told == [
        'the environment variable PORT (server.port): a whole number is wanted, not "x"',
        "my.yaml:2: server.prot: unknown key, did you mean port?",
    ]


def test_section_that_is_no_mapping_is_told_of_the_file(complaints: Complaints) -> None:
    assert complaints("server: 5\n", {"PORT": "1"}) == [
        "my.yaml:1: server: a mapping (key: value) is wanted, not 5",
    ]


def test_what_vllm_gets_fills_only_what_its_models_leave_open(loads: Loads) -> None:
    config = loads(
        """\
        models:
          a: {engine: vllm, path: a}
          b: {engine: vllm, path: b, ctx_size: 8, memory_mib: 5, prefix_caching: true}
          c: {engine: transformers, path: c}
        """,
        {"VLLM_MAX_MODEL_LEN": "64", "VLLM_GPU_MEMORY_UTILIZATION": "0.5", "VLLM_ENABLE_PREFIX_CACHING": "0"},
    )
    said = [(one.ctx_size, one.gpu_memory_utilization, one.prefix_caching) for one in config.models.values()]
    assert said == [(64, 0.5, False), (8, None, True), (Model.model_fields["ctx_size"].default, None, True)]


@pytest.mark.parametrize(
    ("repo_id", "name", "engine"),
    [
        ("org/chat-7b", "org/chat-7b", "transformers"),
        ("org/chat-7b-GGUF:Q4_K_M", "org/chat-7b-GGUF:Q4_K_M", "llamacpp"),
        ("tiny-1.gguf", "tiny-1.gguf", "llamacpp"),
        ("/srv/models/chat-7b", "srv/models/chat-7b", "transformers"),
    ],
)
def test_model_repo_id_makes_a_model_under_version_control(loads: Loads, repo_id: str, name: str, engine: str) -> None:
    environ = {"MODEL_REPO_ID": repo_id, "HOME": "/nobody"}
    for config in (load(None, environ).config, loads("server: {port: 1}", environ)):
        ((found, model),) = config.models.items()
        assert (found, model.engine, model.path) == (name, engine, None)
        assert model.versions is not None and model.versions.repo_id == repo_id
        # It has to be fetched to somewhere.
        (root,) = environment.with_cache(config, environ).roots
        assert root.endswith("/huggingface/hub")
        elsewhere = config.model_copy(update={"model_roots": ("/srv",)})
        assert environment.with_cache(elsewhere, environ).roots == ("/srv",)


def test_model_repo_id_meets_what_the_file_says_of_its_model_or_of_another_one(loads: Loads) -> None:
    model = loads("models: {org/a: {engine: vllm}}", {"MODEL_REPO_ID": "org/a"}).models["org/a"]
    assert (model.engine, model.versions and model.versions.repo_id) == ("vllm", "org/a")
    # One that the file has under version control is the one that is meant: two would have to be named.
    own = "models: {q: {engine: llamacpp, versions: {repo_id: org/b}}}"
    config = loads(own, {"MODEL_REPO_ID": "org/a"})
    assert list(config.models) == ["q"] and environment.with_cache(config, {"MODEL_REPO_ID": "org/a"}).roots == ()


def test_model_repo_id_that_can_be_no_id_is_told_by_its_name(complaints: Complaints) -> None:
    (told,) = complaints("server: {port: 1}", {"MODEL_REPO_ID": "../a"})
    assert told.startswith("the environment variable MODEL_REPO_ID (models.") and ".." in told


def test_rows_of_many_names_put_the_rest_of_the_name_into_the_key() -> None:
    table = (Variable("DEFAULT", "…", key="a.default.b"), Variable("EACH_*", "…", int, key="a.*.b"))
    said = environment.said({"DEFAULT": "1", "EACH_default": "2", "EACH_x.y": "3"}, table)
    assert said.values == {("a", "default", "b"): 2, ("a", "x.y", "b"): 3}
    assert said.names[("a", "default", "b")] == "EACH_default"
    assert said.over({"a": {"x.y": {"c": 0}}}) == {"a": {"default": {"b": 2}, "x.y": {"c": 0, "b": 3}}}


def test_shown_says_where_each_value_is_from(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(FILE)
    environ = {"QUEUE_TIMEOUT_MS": "5000", "MODEL_BASE_PATH": str(tmp_path)}
    loaded = load(file, environ)
    rows = {row.name: row for row in environment.shown(loaded.config, environ, loaded.places)}
    assert (rows["PORT"].value, rows["PORT"].origin) == (1, "file")
    assert (rows["HOST"].value, rows["HOST"].origin) == ("127.0.0.1", "default")
    assert (rows["QUEUE_TIMEOUT_MS"].value, rows["QUEUE_TIMEOUT_MS"].origin) == (5.0, "environment")
    assert (rows["MODEL_BASE_PATH"].value, rows["MODEL_BASE_PATH"].origin) == ((str(tmp_path),), "added")
    assert rows["CUDA_VISIBLE_DEVICES"].origin == "unset"


def test_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TABLE", (Variable("HOST", "…", key="server.host", is_secret=True),))
    (row,) = environment.shown(Config(), {"HOST": "hush"}, ())
    assert row.value == HIDDEN
