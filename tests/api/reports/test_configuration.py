"""The effective configuration: values, where they are from, what the file says by now, and no secret."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import loader
from greenroom.config.environment import TABLE
from tests.api.management_rig import Client, FakeGateway

PATH = "/api/v1/config/effective"
FILE = """\
server:
  port: 9000
  api_keys:
    - {name: ops, sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, admin: true}
tenants: {lab: {requests_per_minute: 5}}
leases: {store: "redis://:hunter2@leases.example:6379/0"}
models:
  "qwen2.5":
    cmd: serve --port ${PORT} --api-key hunter2
    env: {TOKEN: hunter2}
    memory_mib: 100
    set_params: {temperature: 0.5, api_key: hunter2, extra: {X-Auth-Token: hunter2}}
    metadata: {password: hunter2, apiKey: hunter2, private_key_pem: hunter2}
    check_endpoint: /health?key=hunter2
"""


def gateway_of(folder: Path, text: str = FILE) -> FakeGateway:
    """A gateway that runs what this file says."""
    gateway = FakeGateway()
    gateway.path = folder / "greenroom.yaml"
    gateway.path.write_text(text)
    gateway.config = loader.load(gateway.path).config
    return gateway


async def asked(gateway: FakeGateway) -> dict[str, Any]:
    answer = await Client(gateway).get(PATH)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


async def values(gateway: FakeGateway) -> dict[str, dict[str, Any]]:
    return {one["key"]: one for one in (await asked(gateway))["values"]}


async def test_each_value_says_where_it_is_from(tmp_path: Path) -> None:
    found = await values(gateway_of(tmp_path))
    assert (found["server.port"]["value"], found["server.port"]["source"]) == (9000, "file")
    assert found["server.ui"]["source"] == "default"
    assert [key for key in found if key.startswith("tenants")] == ["tenants.lab.requests_per_minute"]
    assert found['models."qwen2.5".memory_mib'] == {
        "key": 'models."qwen2.5".memory_mib',
        "value": 100,
        "source": "file",
        "variable": None,
    }


async def test_variables_of_the_environment_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in TABLE if row.key == "server.port" and not row.adds)
    monkeypatch.setenv(row.name, "9001")
    found = (await values(gateway_of(tmp_path)))["server.port"]
    assert (found["value"], found["source"], found["variable"]) == (9001, "environment", row.name)


async def test_nothing_that_may_be_a_secret_is_told(tmp_path: Path) -> None:
    answer = await Client(gateway_of(tmp_path)).get(PATH)
    assert b"hunter2" not in answer.body and b"aaaaaaaa" not in answer.body
    found = {one["key"]: one["value"] for one in answer.json["values"]}
    assert found["leases.store"] == found['models."qwen2.5".cmd'] == "(hidden)"
    assert found["server.api_keys"][0]["name"] == "ops"
    assert found['models."qwen2.5".set_params.temperature'] == 0.5


@pytest.mark.parametrize(
    "line",
    [
        "args: --api-key hunter2",
        "macros: [hunter2]",
        "cmd_stop: {hunter2: 1}",
        "cmd: {a: hunter2}",
        "args: [[hunter2]]",
    ],
)
async def test_nor_is_it_told_by_what_is_wrong_with_the_file(tmp_path: Path, line: str) -> None:
    gateway = gateway_of(tmp_path)
    assert gateway.path is not None
    gateway.path.write_text("models: {m: {memory_mib: 1, path: /m/a.gguf, " + line + "}}")
    answer = await Client(gateway).get(PATH)
    assert answer.json["check"]["problems"] and b"hunter2" not in answer.body


@pytest.mark.parametrize("keys", ["[hunter2]", "hunter2", "[{name: a, key: b, admin: hunter2}]"])
async def test_a_key_in_the_wrong_place_is_not_told(tmp_path: Path, keys: str) -> None:
    gateway = gateway_of(tmp_path)
    assert gateway.path is not None
    gateway.path.write_text(f"server: {{api_keys: {keys}}}")
    answer = await Client(gateway).get(PATH)
    assert answer.json["check"]["problems"] and b"hunter2" not in answer.body


async def test_what_a_macro_holds_is_not_told(tmp_path: Path) -> None:
    text = FILE.replace("models:\n", "macros: {password: hunter2}\nmodels:\n")
    assert b"hunter2" not in (await Client(gateway_of(tmp_path, text)).get(PATH)).body


async def test_an_address_with_a_password_in_its_query_is_not_told(tmp_path: Path) -> None:
    text = FILE.replace("redis://:hunter2@leases.example:6379/0", "redis://leases.example:6379/0?password=hunter2")
    assert b"hunter2" not in (await Client(gateway_of(tmp_path, text)).get(PATH)).body


async def test_what_a_reload_would_change_is_told(tmp_path: Path) -> None:
    gateway = gateway_of(tmp_path)
    nothing = (await asked(gateway))["pending"]
    assert not any(nothing.values())
    assert gateway.path is not None
    gateway.path.write_text(FILE.replace("9000", "9001") + "  new: {cmd: 'x ${PORT}', memory_mib: 1}\n")
    pending = (await asked(gateway))["pending"]
    assert (pending["added"], pending["needs_restart"]) == (["new"], ["server.port"])


async def test_a_file_that_cannot_be_used_is_told_line_by_line(tmp_path: Path) -> None:
    gateway = gateway_of(tmp_path)
    assert gateway.path is not None
    gateway.path.write_text("server: {prot: 1}\nmodels: 3\n")
    found = await asked(gateway)
    assert len(found["check"]["problems"]) == 2 and "prot" in found["check"]["problems"][0]
    assert found["pending"] is None
    sources = {one["key"]: one["source"] for one in found["values"]}
    assert (sources["server.port"], sources["server.ui"]) == (None, "default")


async def test_a_disk_that_hangs_does_not_stop_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = gateway_of(tmp_path, f"model_roots: [{tmp_path}/roots]\n")
    assert gateway.path is not None
    gateway.path.write_text("models: [")
    isdir, on_loop = os.path.isdir, []

    def look(path: Any) -> bool:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return isdir(path)

    monkeypatch.setattr(os.path, "isdir", look)
    assert "there is no folder" in (await asked(gateway))["check"]["warnings"][0]
    assert not any(on_loop)
