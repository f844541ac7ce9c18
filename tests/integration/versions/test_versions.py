"""Versions of a model with a real engine: updated beside itself, proved, flipped, rolled back, kept over restarts."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from greenroom.app import App
from greenroom.core.model import ModelId, Tier
from greenroom.features.versions.updates import UpdateOrder
from tests.harness import GatewayProcess, gateway, tiny, write_config
from tests.integration.raw import Answer, Raw, asking, http
from tests.models import tiny as tiny_file
from tests.waiting import until

CHAT = "/v1/chat/completions"
PROGRAM = Path(__file__).parent / "dies_at_write.py"


def weights(tmp_path: Path, name: str, **kind: Any) -> str:
    """A model below the root which says its name."""
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.gguf"
    shutil.copy(tiny_file(name, **kind), path)
    return str(path)


def models(tmp_path: Path, first: str = "alpha", *, loop: bool = False, **versions: Any) -> dict[str, Any]:
    path = weights(tmp_path, first, loop=loop)
    return {"m": tiny(Path(path), versions={"repo_id": "org/first", **versions}, parallel=4)}


def options(tmp_path: Path) -> dict[str, Any]:
    return {"library": {"roots": [str(tmp_path / "models")]}}


async def ask(app: App, **more: Any) -> Answer:
    return await http(app, "POST", CHAT, {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more})


async def update(app: App, repo_id: str, status: int = 200, **more: Any) -> Any:
    answer = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": repo_id, **more})
    assert answer.status == status, answer.body
    return answer.json()


async def version(app: App) -> Any:
    return (await http(app, "GET", "/status")).json()


def said(answer: Answer) -> tuple[str, str, str]:
    return answer.headers["x-model-version"], answer.headers["x-model-repo-id"], answer.text.split()[0]


def says(gate: GatewayProcess) -> tuple[int, str]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    status, headers, answer = gate.call("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return int(headers["x-model-version"]), answer["choices"][0]["message"]["content"].split()[0]


async def test_a_version_takes_the_name_and_headers_tell_it(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        first = await version(app)
        assert (first["model_version"], first["model_repo_id"], first["updating"]) == (1, "org/first", False)
        assert said(await ask(app)) == ("1", "org/first", "alpha")
        done = await update(app, weights(tmp_path, "bravo"))
        assert (done["status"], done["model_version"], done["error"]) == ("completed", 2, None)
        answer = await ask(app)
        assert said(answer)[::2] == ("2", "bravo") and answer.json()["model"] == "m"
        now = await version(app)
        assert (now["model_version"], now["desired"], now["error"]) == (2, None, None)
        listed = [model["id"] for model in (await http(app, "GET", "/v1/models")).json()["data"]]
        assert [name for name in listed if name.startswith("m")] == ["m"]
        kept = (await http(app, "GET", "/api/v1/models/m/versions")).json()["data"]
        assert [(one["model_version"], one["serves"]) for one in kept] == [(2, True), (1, False)]
        refused = await ask(app, stream="no")
        assert refused.status == 400
        wrong = await http(app, "POST", "/v1/embeddings", {"model": "m", "input": "x"})
        assert (wrong.status, wrong.headers["x-model-version"]) == (400, "2")
        # The old engine has left.
        await until(lambda: len(app.slots.live) == 1, "the old version has left")


async def test_streams_finish_on_the_old_version_and_later_ones_see_the_new(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path, loop=True), **options(tmp_path)) as app:
        old = await Raw.open(app)
        old.ask(asking("m", stream=True, max_tokens=400), path=CHAT)
        status, headers = await old.head()
        assert (status, headers["x-model-version"]) == (200, "1")
        await update(app, weights(tmp_path, "bravo"))
        assert said(await ask(app))[::2] == ("2", "bravo")
        rest = await old.rest(status, headers)
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in rest.data[:-1] if one["choices"])
        assert rest.whole and rest.data[-1] == "[DONE]" and text.startswith(" alpha one") and "bravo" not in text


async def test_generate_asks_the_model_under_version_control(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        answer = await http(app, "POST", "/generate", {"prompt": "hi", "max_tokens": 8})
        assert answer.status == 200, answer.body
        assert answer.json()["choices"][0]["text"].split()[0] == "alpha"
        assert answer.headers["x-model-version"] == "1"
        named = await http(app, "POST", "/generate?model=m", {"prompt": "hi", "max_tokens": 8})
        assert named.status == 200
        unknown = await http(app, "POST", "/generate?model=x", {"prompt": "hi"})
        assert unknown.status == 404


async def test_a_version_that_cannot_be_served_changes_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        serves = "alpha"
        for number, what in enumerate(("missing", "torn", "outside", "kind", "alien"), 1):
            assert said(await ask(app))[2] == serves
            path = tmp_path / "models" / f"{what}.gguf"
            if what == "torn":
                path.write_bytes(tiny_file("bravo").read_bytes()[:200_000])
            elif what == "outside":
                path = tiny_file("bravo")
            elif what == "kind":
                path.write_text("no model")
            elif what == "alien":
                path.write_bytes(tiny_file("bravo").read_bytes().replace(b"llama", b"whoah"))
            answer = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": str(path)})
            assert answer.status >= 400, answer.body
            if what in ("torn", "kind"):
                assert answer.error["message"].startswith(f"{path} is not a usable GGUF file: it ")
            if what == "alien":
                assert "unknown model architecture: 'whoah'" in answer.error["message"]
            if what in ("torn", "kind", "alien"):
                assert answer.error["message"].endswith(f" So m cannot serve {path}.")
            now = await version(app)
            assert (now["model_version"], now["updating"]) == (number, False)
            assert now["error"]["code"] == answer.error["code"] and now["desired"]["model_repo_id"] == str(path)
            assert said(await ask(app))[::2] == (str(number), serves)
            assert [entry.id for entry in app.catalog] == ["m"]
            await until(lambda: len(app.slots.live) == 1, "nothing of it is left")
            # The next one heals it.
            serves = "charlie" if serves == "alpha" else "alpha"
            await update(app, weights(tmp_path, serves))
            now = await version(app)
            assert (now["model_version"], now["error"], now["desired"]) == (number + 1, None, None)


async def test_a_path_has_no_revisions(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        order = {"model_repo_id": weights(tmp_path, "bravo"), "revision": "step-1200"}
        refused = await http(app, "POST", "/update-model?wait=true", order)
        assert (refused.status, refused.error["param"]) == (400, "revision")
        assert (await version(app))["model_version"] == 1


async def test_one_update_at_a_time(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        await ask(app)
        body = {"model_repo_id": weights(tmp_path, "bravo")}
        begun = await http(app, "POST", "/api/v1/models/m/update", body)
        assert (begun.status, begun.json()["status"]) == (202, "updating")
        task = begun.json()["taskId"]
        second = await http(app, "POST", "/update-model", body)
        assert (second.status, second.error["code"], second.error["taskId"]) == (409, "update_in_progress", task)
        assert (await version(app))["updating"] is True

        async def is_over() -> bool:
            return bool((await http(app, "GET", begun.headers["location"])).json()["status"] != "updating")

        await until(is_over, "the update is over")
        done = (await http(app, "GET", f"/update-model/{task}")).json()
        assert (done["status"], done["model_version"]) == ("completed", 2)
        listed = (await http(app, "GET", "/api/v1/operations?kind=update")).json()["data"]
        assert [(row["id"], row["status"]) for row in listed] == [(task, "done")]


async def test_an_update_tells_what_it_wants_at_once_and_nothing_of_the_last_one(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        await update(app, "./nothing", status=404)
        assert app.updates.error("m") is not None
        order = UpdateOrder(weights(tmp_path, "bravo"))
        beginning = asyncio.create_task(app.updates.submit("m", order, tenant="t", key="k"))
        await asyncio.sleep(0)
        assert not beginning.done() and app.updates.running("m") is not None
        desired = app.updates.desired("m")
        assert desired is not None and desired.model_repo_id == order.repo_id
        assert app.updates.error("m") is None
        await app.updates.ended((await beginning).id)
        assert app.updates.desired("m") is None


async def test_rolled_back_under_a_new_number_and_kept_over_a_restart(tmp_path: Path) -> None:
    served = models(tmp_path, keep=2)
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        await update(app, weights(tmp_path, "bravo"), model_version=7)
        assert said(await ask(app))[::2] == ("7", "bravo")
        back = await http(app, "POST", "/api/v1/models/m/rollback?wait=true")
        assert (back.status, back.json()["model_version"], back.json()["model_repo_id"]) == (200, 8, "org/first")
        assert said(await ask(app)) == ("8", "org/first", "alpha")
        gone = await http(app, "POST", "/api/v1/models/m/rollback?wait=true", {"version": 3})
        assert gone.status == 400
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        assert said(await ask(app)) == ("8", "org/first", "alpha")
        await update(app, weights(tmp_path, "charlie"))
        kept = (await http(app, "GET", "/api/v1/models/m/versions")).json()["data"]
        assert [one["model_version"] for one in kept] == [9, 8]
    written = json.loads((tmp_path / "state" / "versions.json").read_text())
    assert written["models"]["m"]["current"]["number"] == 9


async def test_callers_that_never_stop_asking_see_one_version_after_the_other(tmp_path: Path) -> None:
    served = models(tmp_path)
    # So few at once that some always wait.
    served["m"] |= {"parallel": 2, "concurrency": 2}
    names, seen, is_over = ("bravo", "charlie", "alpha"), list[list[tuple[int, str]]](), False

    async def caller(told: list[tuple[int, str]]) -> None:
        while not is_over:
            answer = await ask(app)
            assert answer.status == 200, answer.body
            number, _, name = said(answer)
            told.append((int(number), name))

    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        await ask(app)
        seen = [[] for _ in range(6)]
        callers = [asyncio.create_task(caller(told)) for told in seen]
        for name in names:
            await update(app, weights(tmp_path, name))
        is_over = True
        await asyncio.gather(*callers)
        expected = {1: "alpha", 2: "bravo", 3: "charlie", 4: "alpha"}
        for told in seen:
            assert all(expected[number] == name for number, name in told), "an answer of another version"
            assert [number for number, _ in told] == sorted(number for number, _ in told), "versions went back"
        assert {number for told in seen for number, _ in told} >= {1, 3}


async def test_a_reload_that_leaves_the_model_alone_does_not_end_its_update(tmp_path: Path) -> None:
    served = models(tmp_path)
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        await ask(app)
        body = {"model_repo_id": weights(tmp_path, "bravo")}
        begun = await http(app, "POST", "/update-model", body)
        write_config(tmp_path, {**served, "other": tiny(tiny_file("charlie"))}, **options(tmp_path))
        await app.reload()
        assert (await version(app))["updating"], "the reload came too late to prove anything"
        await app.updates.ended(begun.json()["taskId"])
        assert said(await ask(app))[::2] == ("2", "bravo")


async def test_orders_for_a_version_that_is_on_its_way_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        await ask(app)
        begun = await http(app, "POST", "/update-model", {"model_repo_id": weights(tmp_path, "bravo")})
        task = begun.json()["taskId"]
        await until(lambda: app.catalog.is_known("m@2"), "the second version is on its way")
        orders = [("m@2", "unload", {}), ("m@2", "load", {}), ("m", "load", {"evict": ["m@2"]})]
        answers = [await http(app, "POST", f"/api/v1/models/{name}/{verb}", body) for name, verb, body in orders]
        for refused in answers:
            assert (refused.status, refused.error["code"]) == (409, "update_in_progress"), refused.body
            assert refused.error["taskId"] == task and "the next version of m" in refused.error["message"]
        await app.updates.ended(task)
        assert said(await ask(app))[::2] == ("2", "bravo")


async def test_a_model_with_the_id_of_a_coming_version_serves_on(tmp_path: Path) -> None:
    served = {**models(tmp_path), "m@2": tiny(tiny_file("charlie"))}
    async with gateway(tmp_path, served, **options(tmp_path)) as app:
        await update(app, weights(tmp_path, "bravo"))
        assert said(await ask(app))[::2] == ("2", "bravo")
        other = await http(app, "POST", CHAT, asking("m@2"))
        assert (other.status, other.text.split()[0]) == (200, "charlie")


async def test_a_version_that_is_kept_is_deleted_by_force_only(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), **options(tmp_path)) as app:
        await update(app, weights(tmp_path, "bravo"))
        refused = await http(app, "DELETE", "/v1/models/inventory/alpha.gguf")
        assert (refused.status, refused.error["code"]) == (409, "model_in_use")
        back = await http(app, "POST", "/api/v1/models/m/rollback?wait=true")
        assert back.status == 200
        assert (await http(app, "DELETE", "/v1/models/inventory/bravo.gguf?force=true")).status == 200
        assert said(await ask(app))[::2] == ("3", "alpha")


async def test_where_weights_lie_is_told_to_operators_only(tmp_path: Path) -> None:
    keys = [{"name": "boss", "key": "b" * 20, "admin": True}, {"name": "guest", "key": "g" * 20, "tenant": "t"}]
    path = weights(tmp_path, "alpha")
    served = {"m": tiny(Path(path), versions={})}
    boss, guest = ({"authorization": "Bearer " + letter * 20} for letter in "bg")
    async with gateway(tmp_path, served, server={"api_keys": keys}, **options(tmp_path)) as app:
        failed = {"model_repo_id": str(tmp_path / "models" / "gone.gguf")}
        assert (await http(app, "POST", "/update-model?wait=true", failed, headers=boss)).status == 404
        for key, told, wanted in ((boss, path, failed["model_repo_id"]), (guest, "alpha.gguf", "gone.gguf")):
            answer = await http(app, "POST", CHAT, asking("m"), headers=key)
            assert (answer.status, answer.headers["x-model-repo-id"]) == (200, told)
            wrong = await http(app, "POST", "/v1/embeddings", {"model": "m", "input": "x"}, headers=key)
            assert (wrong.status, wrong.headers["x-model-repo-id"]) == (400, told)
            now = (await http(app, "GET", "/status", headers=key)).json()
            assert (now["model_repo_id"], now["desired"]["model_repo_id"]) == (told, wanted)
            id = answer.headers["x-request-id"]
            request = (await http(app, "GET", f"/api/v1/requests/{id}", headers=key)).json()
            listed = (await http(app, "GET", "/api/v1/models/m/versions", headers=key)).json()["data"]
            assert [request["model_repo_id"], *(one["model_repo_id"] for one in listed)] == [told, told]


async def test_a_version_that_heartbeats_came_before_is_told_of_the_request(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path), server={"heartbeat_after_s": 0.01}, **options(tmp_path)) as app:
        answer = await ask(app, stream=True)
        assert answer.whole and answer.events[0].startswith(": waiting") and "x-model-version" not in answer.headers
        told = (await http(app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")).json()
        assert (told["model_version"], told["model_repo_id"]) == (1, "org/first")


async def test_an_exclusive_model_is_updated_beside_itself_to_the_same_path(tmp_path: Path) -> None:
    served = models(tmp_path, loop=True)
    served["m"]["exclusive"] = True
    async with gateway(tmp_path, served, **options(tmp_path)) as app, await Raw.open(app) as old:
        old.ask(asking("m", stream=True, max_tokens=400), path=CHAT)
        head = await old.head()
        await update(app, str(tmp_path / "models" / "alpha.gguf"))
        assert said(await ask(app, max_tokens=4))[::2] == ("2", "alpha")
        assert (await old.rest(*head)).data[-1] == "[DONE]"


# --- where the GPU holds only one of them ---------------------------------------------------------------------------


def tight(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    return {**options(tmp_path), "budget_mib": 150, **keys}


async def test_two_that_do_not_fit_together_are_refused_unless_a_gap_is_allowed(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(tmp_path, loop=True), **tight(tmp_path)) as app:
        first = await ask(app, max_tokens=4)
        assert said(first)[::2] == ("1", "alpha")
        path = weights(tmp_path, "bravo")
        answer = await http(app, "POST", "/update-model?wait=true", {"model_repo_id": path})
        assert (answer.status, answer.error["code"]) == (409, "would_interrupt")
        assert said(await ask(app, max_tokens=4))[::2] == ("1", "alpha")
        old = await Raw.open(app)
        old.ask(asking("m", stream=True, max_tokens=200), path=CHAT)
        head = await old.head()
        changing = asyncio.create_task(update(app, path, allow_gap=True))
        # Some of these come while the model is held: they wait, and none fails.
        answers = [await ask(app, max_tokens=4) for _ in range(5)]
        done = await changing
        assert done["model_version"] == 2
        names = {"1": "alpha", "2": "bravo"}
        assert all(names[number] == name for number, _, name in map(said, answers))
        assert (await old.rest(*head)).whole
        assert said(await ask(app))[::2] == ("2", "bravo")


async def test_after_a_gap_that_failed_the_old_version_serves_again(tmp_path: Path) -> None:
    served = models(tmp_path, warm_up_timeout_s=0.001)
    async with gateway(tmp_path, served, **tight(tmp_path)) as app:
        assert said(await ask(app))[2] == "alpha"
        body = {"model_repo_id": weights(tmp_path, "bravo"), "allow_gap": True}
        changing = asyncio.create_task(http(app, "POST", "/update-model?wait=true", body))
        answers = [await ask(app) for _ in range(3)]
        assert (await changing).error["code"] == "warm_up_failed"
        answers.append(await ask(app))
        assert {said(answer)[::2] for answer in answers} == {("1", "alpha")}
        assert (await version(app))["error"]["code"] == "warm_up_failed"


async def test_two_models_whose_updates_fail_at_once_both_come_back(tmp_path: Path) -> None:
    alpha, bravo = weights(tmp_path, "alpha"), weights(tmp_path, "bravo")
    versions = {"repo_id": "org/first", "warm_up_timeout_s": 0.001}
    served = {name: tiny(Path(alpha), versions=versions, pinned=True, preload=True) for name in ("m", "n")}
    ids = [ModelId(name) for name in served]
    async with gateway(tmp_path, served, **{**options(tmp_path), "budget_mib": 250}) as app:

        def are_ready() -> bool:
            slots = [app.loop.scheduler.view.slots_of(one) for one in ids]
            return all(len(ours) == 1 and ours[0].tier is Tier.READY for ours in slots)

        await until(are_ready, "both are loaded")
        body = {"model_repo_id": bravo, "allow_gap": True}
        asked = [http(app, "POST", f"/api/v1/models/{name}/update?wait=true", body) for name in served]
        assert {answer.error["code"] for answer in await asyncio.gather(*asked)} == {"warm_up_failed"}
        # Nothing asks for them: each comes back because it was there before.
        await until(are_ready, "both are back")
        assert not any(app.loop.scheduler.view.models[one].spec.held for one in ids)


async def test_a_reload_while_requests_wait_for_the_next_version_lets_them_wait(tmp_path: Path) -> None:
    served = models(tmp_path, loop=True)
    async with gateway(tmp_path, served, **tight(tmp_path)) as app:
        await ask(app, max_tokens=4)
        old = await Raw.open(app)
        old.ask(asking("m", stream=True, max_tokens=450), path=CHAT)
        head = await old.head()
        body = {"model_repo_id": weights(tmp_path, "bravo"), "allow_gap": True}
        changing = asyncio.create_task(http(app, "POST", "/update-model?wait=true", body))
        await until(lambda: app.loop.scheduler.view.models[ModelId("m")].spec.held, "requests wait")
        write_config(tmp_path, served, **tight(tmp_path, stay_warm={"llm_s": 77}))
        await app.reload()
        asked = [asyncio.create_task(ask(app, max_tokens=4)) for _ in range(3)]
        assert (await old.rest(*head)).whole
        assert (await changing).status == 200
        assert {said(answer)[::2] for answer in await asyncio.gather(*asked)} == {("2", "bravo")}


async def test_answers_that_take_too_long_end_the_update(tmp_path: Path) -> None:
    served = models(tmp_path, loop=True, drain_s=0.001)
    async with gateway(tmp_path, served, **tight(tmp_path)) as app:
        await ask(app, max_tokens=4)
        old = await Raw.open(app)
        old.ask(asking("m", stream=True, max_tokens=450), path=CHAT)
        head = await old.head()
        body = {"model_repo_id": weights(tmp_path, "bravo"), "allow_gap": True}
        answer = await http(app, "POST", "/update-model?wait=true", body)
        if answer.status == 409:
            assert answer.error["code"] == "would_interrupt" and "drain_s" in answer.error["message"]
            assert said(await ask(app, max_tokens=4))[::2] == ("1", "alpha")
        assert (await old.rest(*head)).whole
