from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.cli.main import main
from greenroom.features.library.cli_models import size
from tests.cli.command import Cli, in_terminal
from tests.cli.fake_gateway import FakeGateway, answer, error
from tests.library.hub_cache import add_snapshot, folder_files, put
from tests.models import tiny, tiny_hf

NOWHERE = "http://127.0.0.1:9"


def record(id: str, **more: Any) -> dict[str, Any]:
    told = {"id": id, "kind": "gguf", "quantization": "Q4_K_M", "bytes": 4_700_000_000, "context_length": 8192}
    return {**told, "memory_mib": 6_000, "last_used": None, "files": [{"name": "m.gguf"}], **more}


def inventory(*records: dict[str, Any], problems: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    return {"object": "list", "data": list(records), "problems": list(problems)}


@pytest.fixture
def running(gateway: FakeGateway) -> FakeGateway:
    gateway.on("GET", "/health", answer({"status": "healthy"}))
    used = record("b", last_used=time.time() - 7_200, quantization=None, context_length=None, memory_mib=None)
    problem = {"path": "/m/c.gguf", "why": "it is cut short"}
    gateway.on("GET", "/v1/models/inventory", answer(inventory(record("org/a:Q4_K_M"), used, problems=(problem,))))
    return gateway


def test_models_of_a_gateway_are_a_table(running: FakeGateway, cli: Cli) -> None:
    out, err = cli("models")
    assert [line.split() for line in out.splitlines()] == [
        ["ID", "KIND", "QUANT", "SIZE", "CONTEXT", "MEMORY_MIB", "LAST_USED"],
        ["org/a:Q4_K_M", "gguf", "Q4_K_M", "4.7GB", "8192", "6000", "never"],
        ["b", "gguf", "-", "4.7GB", "-", "-", "2h", "ago"],
    ]
    assert err == "no model: /m/c.gguf: it is cut short\n"


def test_json_is_the_whole_answer(running: FakeGateway, cli: Cli) -> None:
    assert cli("models", "--json").json["data"][0]["id"] == "org/a:Q4_K_M"


def test_folders_are_looked_at_without_a_gateway(tmp_path: Path, cli: Cli) -> None:
    put(tmp_path / "a.gguf", tiny("a"))
    add_snapshot(tmp_path, "org/name", "c1", folder_files(tiny_hf("b")))
    assert [line.split()[:3] for line in cli("models", "--models", tmp_path, "--url", NOWHERE).lines[1:]] == [
        ["a.gguf", "gguf", "F16"],
        ["org/name", "safetensors", "fp32"],
    ]
    told = cli("models", "--models", tmp_path, "--json").json["data"]
    assert told[1]["source"]["commit"] == "c1" and told[0]["path"] == str(tmp_path / "a.gguf")


def test_names_that_are_no_text_are_told(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / os.fsdecode(b"\xff.gguf")).write_bytes(b"GGUF")
    assert "\\udcff.gguf" in cli("models", "--models", tmp_path).err
    assert len(cli("models", "--models", tmp_path, "--json").json["problems"]) == 1


def test_without_a_gateway_the_configuration_says_where_to_look(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models" / "a.gguf", tiny("a"))
    (tmp_path / "greenroom.yaml").write_text(yaml.safe_dump({"model_roots": [str(tmp_path / "models")]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREENROOM_URL", NOWHERE)
    out, err = cli("models")
    assert "a.gguf" in out and "no gateway answers" in err
    assert main(["models", "--url", NOWHERE]) == 3, "a gateway that is named must be there"
    cli("models", "-c", tmp_path / "nothing.yaml", status=1)


def test_no_gateway_and_no_configuration(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREENROOM_URL", NOWHERE)
    assert "no gateway answers" in cli("models", status=3).err
    assert "there are no models on disk" in cli("models", "--models", tmp_path / "empty").err


def test_rm_says_how_much_came_free(running: FakeGateway, cli: Cli) -> None:
    done = {"id": "org/a:Q4_K_M", "deleted": True, "bytes_freed": 4_700_000_000, "unloaded": []}
    running.on("DELETE", "/v1/models/inventory/org%2Fa%3AQ4_K_M", answer(done))
    assert cli("rm", "org/a:Q4_K_M", "--yes").out == "org/a:Q4_K_M is deleted; 4.7GB came free\n"
    assert "force" not in running.asked[-1].target
    assert cli("rm", "org/a:Q4_K_M", "-y", "--force", "--json").json == done
    assert running.asked[-1].target.endswith("?force=true")


def test_rm_tells_why_it_is_refused(running: FakeGateway, cli: Cli) -> None:
    running.on("DELETE", "/v1/models/inventory/b", error(409, "model_in_use", "b is configured (as x)."))
    assert "b is configured (as x)." in cli("rm", "b", "--yes", status=1).err
    assert "there is no model nothing on disk" in cli("rm", "nothing", "--yes", status=1).err


def test_rm_deletes_nothing_without_consent(running: FakeGateway, cli: Cli) -> None:
    assert "--yes" in cli("rm", "b", status=1).err
    assert all(asked.method == "GET" for asked in running.asked)
    shown = in_terminal(["rm", "b", "--url", running.url], typed="n\n", exits=1)
    assert "delete it from disk?" in shown and "nothing was deleted" in shown
    assert all(asked.method == "GET" for asked in running.asked)


def test_rm_without_a_gateway_keeps_what_is_configured(tmp_path: Path, cli: Cli) -> None:
    root = tmp_path / "models"
    put(root / "a.gguf", tiny("a"))
    put(root / "b" / "b.gguf", tiny("b"))
    config = {"model_roots": [str(root)], "models": {"x": {"path": str(root / "b"), "engine": "llamacpp"}}}
    (tmp_path / "greenroom.yaml").write_text(yaml.safe_dump(config))
    place = ["-c", str(tmp_path / "greenroom.yaml")]
    cli("rm", "a.gguf", "-y", *place)
    assert not (root / "a.gguf").exists()
    assert "configured as x" in cli("rm", "b/b.gguf", "-y", *place, status=1).err and (root / "b" / "b.gguf").exists()
    cli("rm", "b/b.gguf", "-y", "--force", *place)
    assert not (root / "b").exists()


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0B"), (999, "999B"), (1_000, "1.0kB"), (123_456_789, "123MB"), (5 * 10**15, "5000TB")]
)
def test_sizes(count: int, told: str) -> None:
    assert size(count) == told


def test_a_first_look_that_is_under_way_is_said(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", "/health", answer({"status": "healthy"}))
    gateway.on("GET", "/v1/models/inventory", answer({**inventory(), "looking": True}))
    err = cli("models").err
    assert "still being looked at" in err and "no models" not in err


def test_rm_speaks_in_the_words_of_the_command_line(running: FakeGateway, cli: Cli) -> None:
    said = "b is configured (as b). Ask with force=true to delete it all the same; it is unloaded first."
    running.on("DELETE", "/v1/models/inventory/b", error(409, "model_in_use", said))
    err = cli("rm", "b", "-y", status=1).err
    assert "--force" in err and "force=true" not in err


def test_rm_takes_paths_and_names_the_choices(tmp_path: Path, cli: Cli) -> None:
    put(tmp_path / "a.gguf", tiny("a"))
    put(tmp_path / "sub" / "b.gguf", tiny("b"))
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "notes.txt").write_text("mine")
    files = {"q-Q4_K_M.gguf": tiny("q4").read_bytes(), "q-Q8_0.gguf": tiny("q8").read_bytes()}
    add_snapshot(tmp_path, "org/two", "c1", files)
    place = ["--models", str(tmp_path), "--url", NOWHERE]
    assert "org/two:Q4_K_M, org/two:Q8_0" in cli("rm", "org/two", "-y", "--force", *place, status=1).err
    for name in ("papers", str(tmp_path / "papers"), "sub", str(tmp_path / "sub"), str(tmp_path), "..", ""):
        cli("rm", name, "-y", "--force", *place, status=1)
    assert (tmp_path / "papers" / "notes.txt").exists() and (tmp_path / "sub" / "b.gguf").exists()
    cli("rm", tmp_path / "sub" / ".." / "a.gguf", "-y", *place)
    assert not (tmp_path / "a.gguf").exists()


def test_rm_means_the_model_that_a_request_would_get(tmp_path: Path, cli: Cli) -> None:
    put(tmp_path / "m" / "a.gguf", tiny("a"))
    put(tmp_path / "elsewhere.gguf", tiny("b"))
    config = tmp_path / "greenroom.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "library": {"roots": [str(tmp_path / "m")]},
                "models": {"a.gguf": {"path": str(tmp_path / "elsewhere.gguf")}},
            }
        )
    )
    assert "is also the name of" in cli("check", config).out
    assert "configured with other files" in cli("rm", "a.gguf", "-y", "--force", "-c", config, status=1).err
    cli("rm", tmp_path / "m" / "a.gguf", "-y", "-c", config)
    assert not (tmp_path / "m" / "a.gguf").exists() and (tmp_path / "elsewhere.gguf").exists()
