"""Signed operations through running gateways: every route that changes models needs a token, inference never does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App, make_management
from greenroom.core.model import ModelId
from greenroom.features.governance.audit import verify
from greenroom.features.governance.canonical_json import sha256_of
from greenroom.features.governance.shared_nonces import AFTER, CALLS
from greenroom.features.governance.tokens import as_text
from greenroom.library.records import Version
from tests.features.governance.token_rig import PUBLIC, key_file, shared_token, signed_token
from tests.harness import GatewayProcess, fake, gateway, tiny, write_config
from tests.integration.raw import Answer, asking, chat, http
from tests.models import tiny as tiny_model
from tests.redis_server import redis_server
from tests.waiting import PATIENCE_S, until

GUIDE = Path(__file__).parents[3] / "docs" / "governance.md"
KEYS = [{"name": "ops", "key": "ops-key", "admin": True}, {"name": "plain", "key": "plain-key"}]
# A new route that is declared with `signed=NEVER` fails here until it has a reason.
NEEDS_NO_TOKEN = {
    ("POST", "/v1/jobs"): "a request to a model",
    ("DELETE", "/v1/jobs/{job_id}"): "a request to a model",
    ("DELETE", "/v1/models/download/{job_id}"): "ends what a token began",
    ("DELETE", "/api/v1/leases/{lease_id}"): "gives memory back",
    ("POST", "/api/v1/leases/{lease_id}/renew"): "keeps what is held",
    ("POST", "/api/v1/explain"): "changes nothing",
    ("POST", "/api/v1/simulate"): "changes nothing",
    ("DELETE", "/api/v1/requests/{request_id}"): "ends a request, and moves no model",
    ("POST", "/api/show"): "changes nothing",
}
BODIES: dict[str, Any] = {
    "/v1/models/load": {"modelId": "m"},
    "/v1/models/unload": {"modelId": "m"},
    "/v1/models/download": {"model": "org/name"},
    "/models/load": {"model": "m"},
    "/models/unload": {"model": "m"},
    "/api/pull": {"model": "org/name"},
    "/api/delete": {"model": "m"},
    "/v1/cache/flush": {"scope": "all"},
    "/api/v1/leases": {"mib": 1, "wait_s": 5},
}


def now() -> int:
    return int(time.time())


def with_key(folder: Path, **keys: Any) -> dict[str, Any]:
    """Tokens are accepted from the first second on: the journal is older than they are."""
    (folder / "state" / "governance").mkdir(parents=True, exist_ok=True)
    (folder / "state" / "governance" / "nonces").write_text("greenroom nonces 1 after 0\n")
    (folder / "state" / "lock").touch()
    return {"key_path": key_file(folder), **keys}


async def ask(app: App, method: str, path: str, body: Any = None, token: Any = None, key: str = "ops") -> Answer:
    """With the token in the header."""
    headers = {"Authorization": f"Bearer {key}-key"}
    if token is not None:
        headers["X-Verified-Op-Token"] = token if isinstance(token, str) else as_text(token)
    return await http(app, method, path, body, headers=headers)


def audited(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "state" / "governance" / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    models = {"m": fake("m", aliases=["other"], routes=["/echo/open"])}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}, governance=with_key(tmp_path)) as app:
        yield app


def governed(app: App) -> list[tuple[str, str]]:
    declared = [route.declared for route in make_management(app).routes]
    return [(one.method, one.path) for one in declared if one.signed is not None]


async def test_every_route_that_changes_something_needs_a_token_or_a_reason(app: App) -> None:
    routes = {(route.declared.method, route.declared.path) for route in make_management(app).routes}
    signed = set(governed(app))
    assert {one for one in routes - signed if one[0] != "GET"} == NEEDS_NO_TOKEN.keys()
    assert {one for one in signed if one[0] == "GET"} == {("GET", "/unload")}


async def test_the_guide_names_every_governed_route(app: App) -> None:
    rows = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for method, template in governed(app):
        path = template.replace("{model_id:path}", "{id}")
        last = path.rpartition("/")[2]
        assert any(f"`{method} {path}" in row or f"`…/{last}`" in row for row in rows), path


async def test_every_governed_route_refuses_without_a_token_and_does_nothing(app: App, tmp_path: Path) -> None:
    for method, template in governed(app):
        path = template.replace("{model_id:path}", "m")
        for body in (BODIES.get(path), BODIES.get(path, {})):
            answer = await ask(app, method, path, body)
            # Errors of Ollama's paths are a text.
            error = answer.json()["error"]
            assert answer.status == 401 and (isinstance(error, str) or error["code"] == "token_missing"), path
    assert not app.loop.scheduler.state.slots_of(ModelId("m"))
    # The first is told, the others are counted.
    assert [line["code"] for line in audited(tmp_path)[1:]] == ["token_missing"]
    await app.governance.close()
    assert [line.get("repeats") for line in audited(tmp_path)[1:]] == [None, 2 * len(governed(app)) - 1]


async def test_reading_and_inference_need_none(app: App) -> None:
    assert (await ask(app, "GET", "/api/v1/status")).status == 200
    body = asking("m")
    assert (await ask(app, "POST", "/v1/chat/completions", body, key="plain")).status == 200
    assert (await ask(app, "POST", "/api/v1/leases", {"mib": 1})).status == 201
    assert (await ask(app, "POST", "/api/v1/explain", {"model": "m"})).status == 200
    assert (await ask(app, "POST", "/api/v1/models/m/nothing")).status == 405


async def test_the_key_is_checked_before_the_token(app: App) -> None:
    token = shared_token(modelId="m", issuedAt=now())
    assert (await ask(app, "POST", "/v1/models/load", {"modelId": "m"}, token, key="plain")).status == 403
    assert (await ask(app, "POST", "/v1/models/load", {"modelId": "m"}, token, key="no")).status == 401
    assert (await ask(app, "POST", "/v1/models/load", {"modelId": "m"}, token)).status == 202


async def test_tokens_permit_operations_on_every_route(app: App, tmp_path: Path) -> None:
    async def done(operation: str, model: str | None, method: str, path: str, body: Any = None) -> int:
        token = shared_token(operation=operation, modelId=model, issuedAt=now())
        return (await ask(app, method, path, body, token)).status

    in_body = {"modelId": "m", "verifiedOpToken": shared_token(modelId="m", issuedAt=now())}
    assert (await ask(app, "POST", "/v1/models/load", in_body)).status == 202
    assert await done("model-load", "m", "POST", "/api/v1/models/m/load") == 200
    assert await done("model-load", "other", "POST", "/api/v1/models/other/load") == 200
    assert await done("cache-flush", None, "POST", "/v1/cache/flush", {"scope": "all", "modelId": None}) == 200
    assert await done("model-unload", "m", "POST", "/v1/models/unload", {"modelId": "m"}) == 200
    assert await done("model-unload", "m", "POST", "/api/v1/models/m/unload") == 200
    assert await done("model-unload", "m", "POST", "/api/v1/models/m/sleep") == 422
    assert await done("config-reload", None, "POST", "/api/v1/reload") == 200
    assert await done("model-delete", "org/x", "DELETE", "/v1/models/inventory/org/x") == 404
    assert await done("model-delete", "org/x", "DELETE", "/api/delete", {"model": "org/x"}) == 404
    # By the id of the hub, so that no other spelling is a way around a rule.
    pulled = {"model": "hf.co/org/x", "stream": False}
    assert await done("model-download", "hf.co/org/x", "POST", "/api/pull", pulled) == 403
    assert await done("model-download", "org/x", "POST", "/api/pull", pulled) == 400
    assert await done("model-unload", None, "POST", "/api/v1/leases", {"mib": 1, "wait_s": 1}) == 201
    assert await done("model-unload", "m", "POST", "/api/v1/models/m/load") == 403
    assert verify(tmp_path / "state" / "governance" / "audit.jsonl").problem is None
    statuses = [202, 200, 200, 200, 200, 200, 422, 200, 404, 404, 400, 201]

    def answered() -> list[int]:
        return [line["status"] for line in audited(tmp_path) if line["event"] == "answered"]

    # The last answer may be written down after the refusal that came behind it.
    await until(lambda: len(answered()) == len(statuses), "all is written")
    assert answered() == statuses


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/load", b'{"modelId":"m","modelId":"other"}'),
        ("/v1/models/load", b'{"modelId":"m","model":"m"}'),
        ("/v1/models/load?modelId=m", b'{"modelId":"m"}'),
        ("/v1/models/load?a=1&a=2", b'{"modelId":"m"}'),
        ("/v1/models/load", b'["m"]'),
        ("/v1/models/load", b'{"modelId":NaN}'),
        ("/api/v1/leases", b'{"mib":1,"wait_s":0,"wait_s":9}'),
    ],
)
async def test_bodies_that_could_be_read_in_two_ways_are_refused(app: App, path: str, body: bytes) -> None:
    token = shared_token(modelId="m", issuedAt=now())
    headers = {"Authorization": "Bearer ops-key", "X-Verified-Op-Token": as_text(token)}
    answer = await http(app, "POST", path, body=body, headers={**headers, "Content-Type": "application/json"})
    assert answer.status == 400
    assert (await ask(app, "POST", "/v1/models/load", {"modelId": "m"}, token)).status == 202, "it is unspent"


@pytest.mark.parametrize("wait_s", ["5", True, 0.1, [0]])
async def test_a_lease_needs_a_token_unless_it_surely_does_not_wait(app: App, wait_s: Any) -> None:
    assert (await ask(app, "POST", "/api/v1/leases", {"mib": 1, "wait_s": wait_s})).error["code"] == "token_missing"


async def test_two_tokens_are_one_too_many(app: App) -> None:
    tokens = [shared_token(modelId="m", issuedAt=now()) for _ in range(2)]
    answer = await ask(app, "POST", "/v1/models/load", {"modelId": "m", "verifiedOpToken": tokens[0]}, tokens[1])
    assert answer.error["code"] == "token_malformed"


async def test_engines_are_not_controlled_past_the_gateway(app: App) -> None:
    assert (await ask(app, "POST", "/upstream/m/echo/open", {})).status == 200
    assert (await ask(app, "GET", "/upstream/m/echo/closed")).status == 200
    assert (await ask(app, "POST", "/upstream/m/slots/0", {})).error["code"] == "not_allowed"
    job = await ask(app, "POST", "/v1/jobs", {"route": "/upstream/m/slots/0", "body": {"model": "m"}})
    assert (job.status, job.error["code"]) == (403, "not_allowed")


async def test_signers_approve_the_whole_call(tmp_path: Path) -> None:
    rules = [{"operations": ["model-load"], "signers_min": 2}]
    keys = with_key(tmp_path, signers=PUBLIC, rules=rules)
    async with gateway(tmp_path, {"m": fake("m")}, server={"api_keys": KEYS}, governance=keys) as app:
        body = {"evict": []}

        def token(*signers: str) -> Any:
            return signed_token(*signers, body={"evict": [], "wait": "true"}, modelId="m", issuedAt=now())

        path = "/api/v1/models/m/load?wait=true"
        assert (await ask(app, "POST", path, body, token("alice"))).error["code"] == "token_too_few_signers"
        both = token("alice", "carol")
        changed = await ask(app, "POST", "/api/v1/models/m/load?wait=false", body, both)
        assert changed.error["code"] == "token_body_changed"
        assert (await ask(app, "POST", path, body, both)).status == 200


async def test_rules_change_by_a_reload(tmp_path: Path) -> None:
    governance = with_key(tmp_path, enabled=False)
    async with gateway(tmp_path, {"m": fake("m")}, server={"api_keys": KEYS}, governance=governance) as app:
        assert (await ask(app, "POST", "/api/v1/models/m/load")).status == 200
        write_config(tmp_path, {"m": fake("m")}, server={"api_keys": KEYS}, governance={**governance, "enabled": True})
        assert (await ask(app, "POST", "/api/v1/reload")).status == 200
        assert (await ask(app, "POST", "/api/v1/models/m/load")).error["code"] == "token_missing"
        bad = {**governance, "enabled": True, "key_path": str(tmp_path / "none")}
        write_config(tmp_path, {"m": fake("m")}, server={"api_keys": KEYS}, governance=bad)
        token = shared_token(operation="config-reload", modelId=None, issuedAt=now())
        refused = await ask(app, "POST", "/api/v1/reload", None, token)
        assert refused.status == 422 and "No such file" in refused.error["message"]
        assert (await ask(app, "POST", "/api/v1/models/m/load")).error["code"] == "token_missing"


# --- no way around the rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "model", "path", "signed", "sent"),
    [
        ("cache-flush", "m", "/v1/cache/flush?modelId=m&tenantId=lab", {"modelId": "m", "tenantId": "lab"}, "scope"),
        ("model-download", "org/x", "/v1/models/download?revision=abc", {"revision": "abc"}, "model"),
        ("model-load", "m", "/v1/models/load?evictModel=m", {"evictModel": "m"}, "modelId"),
        ("model-load", "m", "/api/v1/models/m/load", {"wait": "false"}, "wait"),
    ],
)
async def test_a_signed_field_is_refused_where_it_is_not_read(
    app: App, tmp_path: Path, operation: str, model: str, path: str, signed: dict[str, Any], sent: str
) -> None:
    body = {sent: {"scope": "all", "wait": "false"}.get(sent, model)}
    token = shared_token(operation=operation, modelId=model, issuedAt=now(), bodySha256=sha256_of({**signed, **body}))
    for _ in range(2):
        answer = await ask(app, "POST", path, body, token)
        assert (answer.status, answer.error["code"]) == (400, "invalid_request"), "it is unspent"
    last = audited(tmp_path)[-1]
    assert (last["event"], last["code"], last["key"]) == ("refused", "invalid_request", "ops")
    assert not app.loop.scheduler.state.slots_of(ModelId("m"))


@contextlib.asynccontextmanager
async def guarding(tmp_path: Path, *operations: str) -> AsyncIterator[App]:
    """These operations need two signers for `secret-a.gguf`, which is on disk, and `prod-b`, which is configured."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for file, model in (("secret-a.gguf", "alpha"), ("b.gguf", "beta")):
        shutil.copy(tiny_model(model), root / file)
    (root / "sub" / "linked.gguf").symlink_to(root / "secret-a.gguf")
    (root / "way").symlink_to(root)
    models = {"prod-b": {"path": str(root / "way" / "b.gguf")}, "m": fake("m")}
    rules = [{"operations": list(operations), "models": ["secret-a.gguf", "prod-*"], "signers_min": 2}]
    keys = with_key(tmp_path, signers=PUBLIC, rules=rules)
    options = {"server": {"api_keys": KEYS}, "library": {"roots": [str(root)]}}
    async with gateway(tmp_path, models, governance=keys, **options) as app:
        await app.library.looked()
        yield app


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[App]:
    async with guarding(tmp_path) as app:
        yield app


SPELLINGS = ["{}//secret-a.gguf", "sub/../secret-a.gguf", "{}/./secret-a.gguf", "way/secret-a.gguf", "{}/way/b.gguf"]


@pytest.mark.parametrize("spelt", [*SPELLINGS, "secret-a.gguf", "{}/secret-a.gguf", "sub/linked.gguf", "b.gguf"])
async def test_rules_hold_for_every_spelling_of_a_model(guarded: App, tmp_path: Path, spelt: str) -> None:
    name = spelt.format(tmp_path / "root")
    bodies = [
        ("model-load", name, "/v1/models/load", {"modelId": name}),
        ("model-unload", name, "/v1/models/unload", {"modelId": name}),
        ("model-load", "m", "/v1/models/load", {"modelId": "m", "evictModel": name}),
    ]
    for operation, model, path, body in bodies:
        token = signed_token("alice", body=body, operation=operation, modelId=model, issuedAt=now())
        answer = await ask(guarded, "POST", path, body, token)
        assert answer.error["code"] in ("token_too_few_signers", "invalid_request"), (path, answer.status)
    token = signed_token("alice", operation="model-delete", modelId=name, issuedAt=now())
    answer = await ask(guarded, "DELETE", f"/v1/models/inventory/{name}", None, token)
    assert answer.error["code"] in ("token_too_few_signers", "invalid_request"), answer.status
    assert not [entry.id for entry in guarded.catalog if entry.is_adhoc]


async def test_options_make_no_other_model_for_the_rules(guarded: App) -> None:
    body = {"modelId": "secret-a.gguf", "device": "cpu"}
    both = signed_token("alice", "bob", body=body, modelId="secret-a.gguf", issuedAt=now())
    assert (await ask(guarded, "POST", "/v1/models/load", body, both)).status == 202
    name = next(entry.public_id for entry in guarded.catalog if entry.is_adhoc)
    assert name == "secret-a.gguf"
    token = signed_token("alice", body={"modelId": name}, operation="model-unload", modelId=name, issuedAt=now())
    answer = await ask(guarded, "POST", "/v1/models/unload", {"modelId": name}, token)
    assert answer.error["code"] == "token_too_few_signers"


async def test_a_rule_for_a_model_holds_for_its_coming_version(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    old, new = (shutil.copy(tiny_model(name), tmp_path / "models") for name in ("alpha", "beta"))
    served = {"m": {**tiny(Path(old)), "versions": {"repo_id": "org/first"}}}
    rules = [{"operations": ["model-unload"], "models": ["m"], "signers_min": 2}]
    keys = with_key(tmp_path, signers=PUBLIC, rules=rules)
    async with gateway(tmp_path, served, governance=keys, server={"api_keys": KEYS}) as app:
        coming = app.catalog.coming("m", app.config.models["m"], Version(2, "org/second", str(new)))
        app.catalog.add(coming)
        for name, path in (("m@2", "/v1/models/unload"), ("m@2", "/api/v1/models/m@2/unload")):
            body = {"modelId": name} if path.startswith("/v1") else None
            token = signed_token("alice", body=body or {}, operation="model-unload", modelId=name, issuedAt=now())
            assert (await ask(app, "POST", path, body, token)).error["code"] == "token_too_few_signers"


@pytest.mark.parametrize("operation", ["model-delete", "model-unload"])
async def test_files_of_a_guarded_model_are_not_deleted_by_their_own_id(tmp_path: Path, operation: str) -> None:
    """`force` unloads the users of the files: a rule for unloading them counts too."""
    file, path = tmp_path / "root" / "b.gguf", "/v1/models/inventory/b.gguf?force=true"
    fields = {"operation": "model-delete", "modelId": "b.gguf"}
    async with guarding(tmp_path, operation) as app:
        load = signed_token("alice", modelId="prod-b", issuedAt=now())
        assert (await ask(app, "POST", "/api/v1/models/prod-b/load", None, load)).status == 200
        one = signed_token("alice", body={"force": "true"}, issuedAt=now(), **fields)
        assert (await ask(app, "DELETE", path, None, one)).error["code"] == "token_too_few_signers"
        assert file.exists() and app.loop.scheduler.state.slots_of(ModelId("prod-b"))
        both = signed_token("alice", "bob", body={"force": "true"}, issuedAt=now(), **fields)
        assert (await ask(app, "DELETE", path, None, both)).json()["unloaded"] == ["prod-b"]
        assert not file.exists()


# --- several gateways -------------------------------------------------------------------------------------------------


async def test_of_fifty_replays_on_two_gateways_one_runs(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis:
        redis.say("HSET", CALLS, AFTER, "0")
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        options = [
            {"server": {"api_keys": KEYS}, "governance": {**with_key(folder), "store": redis.url}} for folder in folders
        ]
        async with (
            gateway(folders[0], {"m": fake("m")}, **options[0]) as one,
            gateway(folders[1], {"m": fake("m")}, **options[1]) as two,
        ):
            token = shared_token(modelId="m", issuedAt=now())
            calls = (ask((one, two)[n % 2], "POST", "/v1/models/load", {"modelId": "m"}, token) for n in range(50))
            answers = await asyncio.gather(*calls)
            assert sorted(answer.status for answer in answers) == [202, *[403] * 49]
            assert {answer.error["code"] for answer in answers if answer.status == 403} == {"token_replayed"}
            permitted = [line for folder in folders for line in audited(folder) if line["event"] == "permitted"]
            assert len(permitted) == 1
            # Without the store nothing is permitted; one that lost its data lets no old token pass.
            redis.kill()
            fresh = shared_token(modelId="m", issuedAt=now())
            down = await ask(one, "POST", "/v1/models/load", {"modelId": "m"}, fresh)
            assert (down.status, down.error["code"]) == (503, "nonce_store_unavailable")
            redis.start()
            for app in (one, two):
                lost = await ask(app, "POST", "/v1/models/load", {"modelId": "m"}, token)
                assert lost.error["code"] == "token_issued_before_start"


async def test_a_new_state_directory_takes_tokens_at_once_and_one_that_lost_its_journal_does_not(
    tmp_path: Path,
) -> None:
    """A directory that this start made cannot have forgotten a nonce; what was issued before may be another one's."""
    journal, keys = tmp_path / "state" / "governance" / "nonces", {"key_path": key_file(tmp_path)}
    body = {"modelId": "m"}

    async def load(app: App, token: Any) -> str:
        answer = await http(app, "POST", "/v1/models/load", {**body, "verifiedOpToken": token})
        return "loading" if answer.status == 202 else str(answer.error["code"])

    before = now() - 2
    async with gateway(tmp_path, {"m": fake("m")}, governance=keys) as app:
        token = shared_token(modelId="m", issuedAt=now())
        assert await load(app, token) == "loading"
        assert await load(app, token) == "token_replayed"
        assert await load(app, shared_token(modelId="m", issuedAt=before)) == "token_issued_before_start"
    async with gateway(tmp_path, {"m": fake("m")}, governance=keys) as app:
        assert await load(app, token) == "token_replayed"
        assert await load(app, shared_token(modelId="m", issuedAt=now())) == "loading"
    journal.unlink()
    async with gateway(tmp_path, {"m": fake("m")}, governance=keys) as app:
        for issued_at in (token["opToken"]["issuedAt"], now(), now() + 5):
            lost = await load(app, shared_token(modelId="m", issuedAt=issued_at))
            assert lost == "token_issued_before_start"


@pytest.mark.slow
async def test_a_kill_while_a_permitted_load_begins_lets_it_not_run_again(tmp_path: Path) -> None:
    """The engine's own start ends the gateway: the token is spent, and the next run refuses it."""
    killer = {"cmd": ["/bin/sh", "-c", f"kill -9 $(cat {tmp_path}/pid); exit 1 # ${{PORT}}"], "memory_mib": 100}
    governance = with_key(tmp_path)
    config = write_config(tmp_path, {"m": killer}, governance=governance)
    process = GatewayProcess(tmp_path, config)
    (tmp_path / "pid").write_text(str(process.process.pid))
    token = shared_token(modelId="m", issuedAt=now())
    with contextlib.suppress(OSError, HTTPException):
        await asyncio.to_thread(process.call, "POST", "/v1/models/load", {"modelId": "m", "verifiedOpToken": token})
    assert process.process.wait(PATIENCE_S) == -9
    write_config(tmp_path, {"m": fake("m")}, governance=governance)
    async with gateway(tmp_path, {"m": fake("m")}, governance=governance) as app:
        again = await http(app, "POST", "/v1/models/load", {"modelId": "m", "verifiedOpToken": token})
        assert again.error["code"] == "token_replayed"
        assert not app.loop.scheduler.state.slots_of(ModelId("m"))
        assert (await chat(app, "m")).status == 200
    assert verify(tmp_path / "state" / "governance" / "audit.jsonl").problem is None


async def test_an_update_that_names_no_model_needs_the_signers_of_downloads_too(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = str(shutil.copy(tiny_model("alpha"), tmp_path / "models" / "alpha.gguf"))
    served = {"m": {**tiny(Path(path)), "versions": {"repo_id": "org/first"}}}
    rules = {"rules": [{"operations": ["model-download"], "signers_min": 2}]}
    library = {"roots": [str(tmp_path / "models")]}
    async with gateway(tmp_path, served, governance=with_key(tmp_path, **rules), library=library) as app:
        for model, query in (("m", "?model=m"), (None, "")):
            token = shared_token(operation="model-update", modelId=model, issuedAt=now())
            headers = {"X-Verified-Op-Token": as_text(token)}
            body = {"model_repo_id": path}
            answer = await http(app, "POST", f"/update-model{query}", body, headers=headers)
            assert (answer.status, answer.error["code"]) == (403, "token_too_few_signers")
