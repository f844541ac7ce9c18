"""Rules are judged by what a call will touch: no spelling of a repository or model gets an answer of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from greenroom.app import App
from greenroom.errors import BadRequest
from tests.features.governance.token_rig import PUBLIC, signed_token
from tests.harness import fake, gateway
from tests.harness import tiny as tiny_config
from tests.integration.facts import over
from tests.integration.governance.test_governance import KEYS, ask, now, with_key
from tests.integration.raw import Answer
from tests.library.hub_cache import put
from tests.models import tiny, tiny_ears
from tests.standins.standin_hub import StandinHub
from tests.waiting import until

SECRET, FREE = "org/secret", "org/free"
DOWNLOAD: Final = "/v1/models/download"
# No order with it begins, so that an order that is permitted is told by this refusal.
NOWHERE: Final = "/nowhere"


@pytest.fixture
def hub(hub: StandinHub) -> StandinHub:
    for repo in (SECRET, FREE):
        hub.repos[repo] = {"config.json": b"{}", "model.safetensors": repo.encode() * 100}
    return hub


def served_alpha(tmp_path: Path, **versions: Any) -> dict[str, Any]:
    """A model below the root that is under version control."""
    (tmp_path / "models").mkdir(exist_ok=True)
    weights = shutil.copy(tiny("alpha"), tmp_path / "models" / "alpha.gguf")
    return {"served": {**tiny_config(Path(weights)), "versions": versions}}


@contextlib.asynccontextmanager
async def guarding(
    tmp_path: Path,
    *guarded: str,
    operations: tuple[str, ...] = (),
    models: dict[str, Any] | None = None,
    library: dict[str, Any] | None = None,
) -> AsyncIterator[App]:
    """Two signers are needed for what these patterns fit."""
    (tmp_path / "models").mkdir(exist_ok=True)
    rules = [{"operations": list(operations), "models": list(guarded), "signers_min": 2}]
    governance = with_key(tmp_path, signers=PUBLIC, rules=rules)
    library = {"roots": [str(tmp_path / "models")], "download": True, **(library or {})}
    configured = {"m": fake("m"), **(models or {})}
    async with gateway(tmp_path, configured, server={"api_keys": KEYS}, governance=governance, library=library) as app:
        await app.library.looked()
        yield app


async def signed(
    app: App,
    operation: str,
    model: str | None,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    signers: tuple[str, ...] = ("alice",),
) -> Answer:
    token = signed_token(*signers, body=body or {}, operation=operation, modelId=model, issuedAt=now())
    return await ask(app, method, path, body, token)


def needs_two(answer: Answer) -> bool:
    """Errors of Ollama's paths are a text."""
    error = answer.json().get("error", "")
    return answer.status == 403 and "needs 2 signers" in (error if isinstance(error, str) else error["message"])


# --- what is fetched --------------------------------------------------------------------------------------------------

ADDRESSES: Final = (
    *("{hub}/{repo}", "{hub}/{repo}/", "{hub}//{repo}", "{hub}/{repo}?a=b", "{hub}/{repo}#x", "{HUB}/{repo}/tree/main"),
    *("{hub}/{repo}/resolve/main/config.json", "{hub}/{repo}/blob/main/config.json?download=true", "{hub}/{coded}"),
    *("https://huggingface.co/{repo}", "https://HuggingFace.CO:443/{repo}", "https://huggingface.co./{repo}/tree/v1"),
    *("http://hf.co:80/{repo}", "HTTPS://www.huggingface.co/{repo}/raw/refs/pr/1/config.json", "https://hf.co/{coded}"),
)
IDS: Final = ("{repo}", "{repo}@main", "{repo}@v1", "{repo}:Q4_K_M", "{repo}@refs/pr/1", "{repo}@main:Q4_K_M")


def cased(name: str, seed: random.Random) -> str:
    return "".join(seed.choice((letter.lower(), letter.upper())) for letter in name)


def coded(name: str, seed: random.Random) -> str:
    return "".join(f"%{ord(letter):02x}" if seed.random() < 0.5 else letter for letter in name)


def spelt(repo: str, hub: StandinHub, seed: random.Random) -> dict[str, Any]:
    """An order for this repository, in some way to write it."""
    repo = cased(repo, seed) if seed.random() < 0.5 else repo
    form = seed.choice((*IDS, *ADDRESSES))
    host = hub.url.removeprefix("http://")
    written = form.format(repo=repo, coded=coded(repo, seed), hub=hub.url, HUB=f"HTTP://{host}")
    body: dict[str, Any] = {"url" if "://" in written and seed.random() < 0.5 else "model": written}
    for key, value in (("revision", "v2"), ("include", ["*.json"]), ("exclude", ["*.bin"])):
        if seed.random() < 0.2:
            body[key] = value
    return body


@pytest.mark.parametrize("seed", range(4))
async def test_no_spelling_of_a_download_has_another_answer(hub: StandinHub, tmp_path: Path, seed: int) -> None:
    """Orders that are permitted end at their destination, which is none."""
    draw = random.Random(seed)
    pattern = draw.choice((SECRET, "ORG/Secret", "org/s*", f"{SECRET}@v1", f"{SECRET}:Q4_K_M", f"{SECRET}@main"))
    async with guarding(tmp_path, pattern, operations=("model-download",)) as app:
        for _ in range(60):
            for repo in (SECRET, FREE):
                body = {**spelt(repo, hub, draw), "destination": NOWHERE}
                name = body.get("model", body.get("url"))
                answer = await signed(app, "model-download", name, DOWNLOAD, body)
                if repo == SECRET:
                    assert needs_two(answer), (pattern, body, answer.body)
                else:
                    assert (answer.status, answer.error["param"]) == (400, "destination"), (body, answer.body)
    assert hub.seen == []


async def test_every_way_to_a_download_is_judged_by_its_repository(hub: StandinHub, tmp_path: Path) -> None:
    served = served_alpha(tmp_path)
    async with guarding(tmp_path, SECRET, operations=("model-download",), models=served) as app:
        for name in ("org/secret", "ORG/Secret", "org/secret@main", "org/secret:Q4_K_M"):
            load, update = {"modelId": name}, {"model_repo_id": name}
            assert needs_two(await signed(app, "model-load", name, "/v1/models/load", load)), name
            assert needs_two(await signed(app, "model-load", name, "/models/load", {"model": name})), name
            for written in (name, f"hf.co/{name}", f"huggingface.co/{name}:latest"):
                assert needs_two(await signed(app, "model-download", name, "/api/pull", {"model": written})), written
            assert needs_two(await signed(app, "model-update", "served", "/api/v1/models/served/update", update)), name
            assert needs_two(await signed(app, "model-update", None, "/update-model", update)), name
        address = f"{hub.url}/org/secret"
        assert needs_two(await signed(app, "model-download", address, "/api/pull", {"name": address}))
        update = {"model_repo_id": address}
        assert needs_two(await signed(app, "model-update", "served", "/api/v1/models/served/update", update))
    assert hub.seen == []


@pytest.mark.parametrize("guarded", [SECRET, f"{SECRET}@main", f"{SECRET}:Q4_K_M"])
async def test_what_an_update_or_a_load_takes_from_the_hub_is_judged_by_its_repository(
    hub: StandinHub, tmp_path: Path, guarded: str
) -> None:
    served = served_alpha(tmp_path)
    async with guarding(tmp_path, guarded, operations=("model-load", "model-update"), models=served) as app:
        for name in (SECRET, SECRET.upper(), f"{SECRET}@main", f"{SECRET}@v1", f"{SECRET}:Q4_K_M"):
            update = {"model_repo_id": name}
            assert needs_two(await signed(app, "model-update", None, "/update-model", update)), name
            assert needs_two(await signed(app, "model-load", name, "/v1/models/load", {"modelId": name})), name
    assert hub.seen == []


async def test_going_back_to_weights_is_judged_like_an_update_to_them(hub: StandinHub, tmp_path: Path) -> None:
    served = served_alpha(tmp_path, repo_id=SECRET)
    beta = shutil.copy(tiny("beta"), tmp_path / "models" / "beta.gguf")
    for guarded in (f"{SECRET}@main", "alpha.gguf"):
        async with guarding(tmp_path, guarded, operations=("model-update",), models=served) as app:
            if app.updates.of("served").last_number == 1:
                update = {"model_repo_id": str(beta)}
                taken = await signed(app, "model-update", "served", "/api/v1/models/served/update", update)
                await app.updates.ended(taken.json()["taskId"])
            for body in ({}, {"version": 1}):
                path = "/api/v1/models/served/rollback"
                assert needs_two(await signed(app, "model-update", "served", path, body)), (guarded, body)
            unknown = await signed(app, "model-update", "served", path, {"version": 9})
            assert (unknown.status, unknown.error["param"]) == (400, "version")


async def test_a_path_that_reads_like_an_address_leads_to_no_weights(hub: StandinHub, tmp_path: Path) -> None:
    """`x://../vault` is a path where a folder `x:` is, and a download makes one."""
    for folder in ("vault", "x:"):
        (tmp_path / "models" / folder).mkdir(parents=True)
    shutil.copy(tiny("beta"), tmp_path / "models" / "vault" / "beta.gguf")
    served = served_alpha(tmp_path)
    async with guarding(tmp_path, "vault/beta.gguf", models=served) as app:
        update = {"model_repo_id": "x://../vault/beta.gguf"}
        taken = await signed(app, "model-update", "served", "/api/v1/models/served/update", update)
        with pytest.raises(BadRequest, match="no address"):
            await app.updates.ended(taken.json()["taskId"])


async def ended(app: App, answer: Answer) -> Any:
    return await over(app, answer.headers["location"], {"Authorization": "Bearer ops-key"})


async def test_a_repository_is_not_fetched_by_a_name_that_it_had_before(hub: StandinHub, tmp_path: Path) -> None:
    hub.renamed["org/old"] = SECRET
    async with guarding(tmp_path, SECRET) as app:
        taken = await signed(app, "model-download", "org/old", DOWNLOAD, {"model": "org/old"})
        assert taken.status == 202
        failed = await ended(app, taken)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "repo_renamed")
        assert SECRET in failed["error"]["message"] and hub.sent == 0
        both = await signed(app, "model-download", SECRET, DOWNLOAD, {"model": SECRET}, signers=("alice", "bob"))
        assert (await ended(app, both))["status"] == "completed"


async def test_what_was_judged_is_what_is_fetched(hub: StandinHub, tmp_path: Path) -> None:
    async with guarding(tmp_path, SECRET, operations=("model-download",)) as app:
        body = {"url": f"HTTP://127.0.0.1:{hub.port}/Org/Free/resolve/main/config.json?x=1"}
        hub.repos["Org/Free"] = hub.repos[FREE]
        seen = await ended(app, await signed(app, "model-download", body["url"], DOWNLOAD, body))
        assert (seen["status"], seen["model"], [file["path"] for file in seen["files"]]) == (
            *("completed", "Org/Free"),
            ["config.json"],
        )


async def test_a_download_into_the_folder_of_a_model_is_one_of_that_model(hub: StandinHub, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "vault"
    folder.mkdir(parents=True)
    weights = shutil.copy(tiny("alpha"), folder / "alpha.gguf")
    (tmp_path / "models" / "way").symlink_to(folder)
    for guarded in ("prod", "vault/alpha.gguf", "vault"):
        models = {"prod": tiny_config(Path(weights))}
        async with guarding(tmp_path, guarded, operations=("model-download",), models=models) as app:
            for said in ("vault", "vault/", f"{folder}", "way", "vault/../way", "."):
                body = {"model": FREE, "destination": said}
                is_root_for_itself = said == "." and guarded == "vault"
                answer = await signed(app, "model-download", FREE, DOWNLOAD, body)
                assert needs_two(answer) or is_root_for_itself, (guarded, said, answer.body)


async def test_a_file_without_a_destination_is_judged_like_one_into_the_first_root(
    hub: StandinHub, tmp_path: Path
) -> None:
    shutil.copy(tiny("alpha"), tmp_path / "models" / "alpha.gguf")
    library = {"hosts": [f"localhost:{hub.port}"]}
    async with guarding(tmp_path, "alpha.gguf", operations=("model-download",), library=library) as app:
        url = f"http://localhost:{hub.port}/mmproj-alpha.gguf"
        for body in ({"url": url, "destination": "."}, {"url": url}, {"model": url}):
            assert needs_two(await signed(app, "model-download", url, DOWNLOAD, body)), body
    assert hub.seen == []


async def test_no_spelling_of_an_address_has_another_answer(hub: StandinHub, tmp_path: Path) -> None:
    library = {"hosts": [f"localhost:{hub.port}"]}
    host = f"http://localhost:{hub.port}"
    async with guarding(tmp_path, f"{host}/a/b.gguf", operations=("model-download",), library=library) as app:
        for end in ("", "?", "?x=1", "#x", "?download=true#x", "?x=https://c/d.gguf"):
            for path in ("/a/b.gguf", "/%61/b%2Egguf", "/A/B.gguf"):
                url = host.replace("host", "HOST") + path + end
                body = {"url": url, "destination": NOWHERE}
                answer = await signed(app, "model-download", url, DOWNLOAD, body)
                assert needs_two(answer), (url, answer.body)


# --- what is on disk --------------------------------------------------------------------------------------------------


def cached(tmp_path: Path, **files: str) -> dict[str, Path]:
    """A repository in the hub's cache with these GGUF files."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models" / "models--org--secret"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    return {
        name: Path(shutil.copy(tiny(model), repo / "snapshots" / commit / f"{name}.gguf"))
        for name, model in files.items()
    }


async def test_no_spelling_of_a_model_on_disk_has_another_answer(hub: StandinHub, tmp_path: Path) -> None:
    paths = cached(tmp_path, one="alpha", two="beta")
    async with guarding(tmp_path, "*") as app:
        ids = [record.id for record in app.library.records]
    assert len(ids) == 2
    for guarded in (SECRET, "Org/SECRET"):
        async with guarding(tmp_path, guarded) as app:
            path = str(paths["one"])
            short = os.path.relpath(path, tmp_path / "models")
            for name in (*ids, SECRET, f"{SECRET}@main", SECRET.upper(), path, short, ids[0].upper()):
                for operation, order in (("model-load", "load"), ("model-unload", "unload")):
                    answer = await signed(app, operation, name, f"/v1/models/{order}", {"modelId": name})
                    assert needs_two(answer), (guarded, name, answer.status, answer.body)
                evicting = {"modelId": "m", "evictModel": name}
                assert needs_two(await signed(app, "model-load", "m", "/v1/models/load", evicting)), name
                answer = await signed(app, "model-delete", name, "/api/delete", {"model": name}, method="DELETE")
                assert needs_two(answer), (guarded, name, answer.status, answer.body)


async def test_a_field_that_is_not_read_chooses_no_other_model(hub: StandinHub, tmp_path: Path) -> None:
    paths = cached(tmp_path, one="alpha", two="beta")
    for file, other in (("one", "two"), ("two", "one")):
        async with guarding(tmp_path, f"{SECRET}:{file}") as app:
            there = app.library.find(str(paths[other]))
            assert there is not None and there.quantization is not None
            name = str(paths[file])
            delete = {"model": name, "quantization": there.quantization}
            assert needs_two(await signed(app, "model-delete", name, "/api/delete", delete, method="DELETE"))


@pytest.mark.parametrize("tag", ["", ":latest"])
async def test_the_tag_of_ollamas_lists_makes_no_other_model(tmp_path: Path, tag: str) -> None:
    (tmp_path / "models").mkdir()
    weights = Path(shutil.copy(tiny("alpha"), tmp_path / "models" / "alpha.gguf"))
    async with guarding(tmp_path, "alpha.gguf", operations=("model-delete",)) as app:
        name = f"alpha.gguf{tag}"
        answer = await signed(app, "model-delete", name, "/api/delete", {"model": name}, method="DELETE")
        assert needs_two(answer) and weights.exists(), answer.body
        both = ("alice", "bob")
        answer = await signed(app, "model-delete", name, "/api/delete", {"model": name}, method="DELETE", signers=both)
        assert answer.status == 200
        await until(lambda: not weights.exists(), "it is deleted")


async def test_an_update_that_names_no_model_is_judged_by_the_one_that_is_meant(tmp_path: Path) -> None:
    served = served_alpha(tmp_path)
    served["served"]["aliases"] = ["prod"]
    body = {"model_repo_id": str(shutil.copy(tiny("beta"), tmp_path / "models" / "beta.gguf"))}
    for guarded, is_guarded in (("served", True), ("PROD", True), ("other", False), ("beta.gguf", True)):
        async with guarding(tmp_path, guarded, operations=("model-update",), models=served) as app:
            for model, path in (
                *((None, "/update-model"), ("served", "/update-model?model=served")),
                *(("prod", "/update-model?model=prod"), ("prod", "/api/v1/models/prod/update")),
            ):
                said = {**body, **({"model": model} if "?" in path else {})}
                token = signed_token("alice", body=said, operation="model-update", modelId=model, issuedAt=now())
                answer = await ask(app, "POST", path, body, token)
                assert needs_two(answer) == is_guarded, (guarded, path, answer.body)
                if not is_guarded:
                    await app.updates.ended(answer.json()["taskId"])


async def test_a_name_is_judged_by_the_file_that_an_order_has_chosen_for_it(hub: StandinHub, tmp_path: Path) -> None:
    paths = cached(tmp_path, **{"one-Q4_K_M": "alpha", "two-Q8_0": "beta"})
    async with guarding(tmp_path, f"{SECRET}:Q8_0", operations=("model-unload",)) as app:
        order = {"modelId": SECRET, "quantization": "Q8_0", "maxContextLength": 256}
        await ended(app, await signed(app, "model-load", SECRET, "/v1/models/load", order))
        for name in (SECRET, str(paths["one-Q4_K_M"])):
            unload = await signed(app, "model-unload", name, "/v1/models/unload", {"modelId": name})
            assert needs_two(unload), name
        both = ("alice", "bob")
        unload = {"modelId": SECRET}
        answer = await signed(app, "model-unload", SECRET, "/v1/models/unload", unload, signers=both)
        assert answer.status == 200


async def test_a_rule_for_a_size_of_whisper_is_one_for_its_repository(hub: StandinHub, tmp_path: Path) -> None:
    """On disk, and where it would be fetched."""
    put(tmp_path / "models" / "faster-whisper-tiny", tiny_ears("alpha speaks"))
    async with guarding(tmp_path, "whisper-tiny", "small") as app:
        for name in ("tiny", "faster-whisper-tiny", "systran/Faster-Whisper-small", "whisper-small"):
            answer = await signed(app, "model-load", name, "/v1/models/load", {"modelId": name})
            assert needs_two(answer), (name, answer.body)
