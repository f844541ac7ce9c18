"""What ComfyUI promises as an engine: start, ready, serve, cancel, sleep, wake, stop, crash, kill; over a stand-in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from greenroom.app import App
from tests.harness import gateway, url
from tests.integration import facts
from tests.integration.facts import at_rest
from tests.integration.faults import is_alive
from tests.integration.jobs.test_jobs import ended, job, submit
from tests.integration.raw import Answer, Raw, asking, http, request_bytes
from tests.standins.comfyui_installation import INPUTS, STAND_IN, WORKFLOW, Installation
from tests.standins.fake_comfyui import PNG
from tests.standins.standin_hub import standin_hub
from tests.waiting import PATIENCE_S, until

GENERATIONS = "/v1/images/generations"


class Studio(Installation):
    """An installation of ComfyUI and a gateway in front of it."""

    app: App

    async def ask(self, **body: Any) -> Answer:
        return await http(self.app, "POST", GENERATIONS, {"model": "m", "prompt": "a cat", **body})

    async def made(self, **body: Any) -> list[dict[str, Any]]:
        """What its pictures were made from."""
        answer = await self.ask(**body)
        assert answer.status == 200, answer.body
        contents = [base64.b64decode(item["b64_json"]) for item in answer.json()["data"]]
        assert all(content.startswith(PNG) for content in contents)
        return [json.loads(content.removeprefix(PNG)) for content in contents]

    async def pids(self) -> tuple[int, int]:
        """Of the worker, and of its ComfyUI."""
        worker = await facts.pid_of(self.app, "m")
        return worker, int(self.lines("start")[-1]["pid"])


@contextlib.asynccontextmanager
async def opened(folder: Path, *switches: str, **keys: Any) -> AsyncIterator[Studio]:
    studio = Studio(folder / "comfy")
    async with gateway(folder, {"m": studio.model(*switches, **keys)}) as app:
        studio.app = app
        yield studio


@pytest.fixture
async def studio(tmp_path: Path) -> AsyncIterator[Studio]:
    async with opened(tmp_path) as studio:
        yield studio


# --- start, serve ---------------------------------------------------------------------------------------------------


async def test_start_is_answered_when_comfyui_answers(tmp_path: Path) -> None:
    async with opened(tmp_path, "--load-s", "0.5") as studio:
        answer = await facts.order(studio.app, "load", "m")
        assert answer.status == 200, answer.body
        worker, comfy = await studio.pids()
        assert is_alive(worker) and is_alive(comfy)
        cards = (await http(studio.app, "GET", "/v1/models")).json()["data"]
        assert cards[0]["capabilities"] == ["images"]
        refused = await http(studio.app, "POST", "/v1/chat/completions", asking("m"))
        assert (refused.status, refused.error["code"]) == (400, "unsupported")


async def test_fields_of_a_request_fill_the_workflow(studio: Studio) -> None:
    sent: dict[str, Any] = {"size": "640x384", "seed": 42, "num_inference_steps": 3, "guidance_scale": 2.5}
    [made] = await studio.made(negative_prompt="blurry", **sent)
    assert (made["text"], made["negative"], made["seed"]) == ("a cat", "blurry", 42)
    assert (made["steps"], made["cfg"]) == (3, 2.5)
    assert made["latent"] == {"width": 640, "height": 384, "batch_size": 1}
    # What is not said is the workflow's, but for the seed: the same one would give the same picture.
    first, second = (await studio.made())[0], (await studio.made())[0]
    assert (first["steps"], first["cfg"], first["negative"]) == (4, 7.0, "ugly")
    assert first["seed"] != second["seed"]


async def test_several_pictures_have_several_seeds(studio: Studio) -> None:
    assert [made["seed"] for made in await studio.made(n=3, seed=7)] == [7, 8, 9]


async def test_pictures_are_counted_also_where_the_answer_has_urls(studio: Studio) -> None:
    for format in ("b64_json", "url"):
        assert (await studio.ask(n=3, response_format=format)).status == 200
    used = (await http(studio.app, "GET", "/api/v1/usage")).json()["total"]
    assert (used["pictures"], used["requests"], used["uncounted"], used["prompt_tokens"]) == (6, 2, 0, None)


async def test_several_pictures_are_one_batch_where_the_workflow_can(tmp_path: Path) -> None:
    async with opened(tmp_path, inputs={**INPUTS, "n": "5.batch_size"}) as studio:
        assert [(made["seed"], made["of"]) for made in await studio.made(n=3, seed=7)] == [(7, 0), (7, 1), (7, 2)]
        assert len(studio.lines("begin")) == 1


async def test_generations_wait_in_our_queue(studio: Studio) -> None:
    asked = [asyncio.create_task(studio.made(prompt=f"p{number}")) for number in range(4)]
    made = [one["text"] for pictures in await asyncio.gather(*asked) for one in pictures]
    assert sorted(made) == ["p0", "p1", "p2", "p3"]
    events = [line["event"] for line in studio.lines("begin", "end")]
    assert events == ["begin", "end"] * 4


async def test_command_of_the_operators(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "comfy")
    (tmp_path / "out").mkdir()
    cmd = ["python3", str(STAND_IN), "--port", "${PORT}", "--output-directory", str(tmp_path / "out")]
    model = studio.model(cmd=[*cmd, *studio.switches])
    del model["path"], model["args"]
    async with gateway(tmp_path, {"m": model}) as studio.app:
        [made] = await studio.made()
        assert made["text"] == "a cat"


async def test_pictures_are_urls_and_none_is_left_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as studio:
        async with AsyncOpenAI(base_url=url(studio.app) + "/v1", api_key="none", timeout=PATIENCE_S) as client:
            made = await client.images.generate(model="m", prompt="a cat", response_format="url", size="512x512")
        assert made.data is not None and made.data[0].url is not None
        got = await http(studio.app, "GET", "/v1/images/" + made.data[0].url.rpartition("/")[2])
        assert (got.status, got.headers["content-type"]) == (200, "image/png")
        [output] = studio.app.state_dir.run_dir.glob("*.out")
        assert os.listdir(output) == []
    assert not output.exists()


@pytest.mark.parametrize("switches", [(), ("--no-events",)])
async def test_jobs_tell_how_far_they_are(tmp_path: Path, switches: tuple[str, ...]) -> None:
    async with opened(tmp_path, "--step-s", "0.25", *switches) as studio:
        id = await submit(studio.app, {"model": "m", "prompt": "a", "steps": 12}, GENERATIONS)
        seen: list[float] = []

        async def is_over() -> bool:
            row = await job(studio.app, id)
            seen.extend([] if row["progress"] is None else [row["progress"]])
            return row["status"] not in ("queued", "running")

        await until(is_over)
        assert (await ended(studio.app, id))["status"] == "done"
        assert seen == sorted(seen) and seen[-1] == 1.0
        if not switches:
            assert any(0.1 < one < 0.95 for one in seen)


# --- bad input ------------------------------------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 10**9}, "n"),
    ({"n": 0}, "n"),
    ({"n": "many"}, "n"),
    ({"size": "30000x30000"}, "size"),
    ({"size": "513x512"}, "size"),
    ({"size": "large"}, "size"),
    ({"size": 512}, "size"),
    ({"width": 0}, "width"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "a" * 40_000}, "prompt"),
    ({"steps": 10**9}, "steps"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"guidance_scale": "high"}, "guidance_scale"),
    ({"stream": True}, "stream"),
]


async def test_bad_input_is_refused_by_name(studio: Studio) -> None:
    for body, param in BAD:
        answer = await studio.ask(**body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert not studio.lines("begin")


async def test_field_that_the_workflow_cannot_use_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, inputs={"prompt": "6.text"}) as studio:
        for body in ({"size": "512x512"}, {"seed": 1}, {"num_inference_steps": 2}, {"negative_prompt": "a"}, {"n": 2}):
            answer = await studio.ask(**body)
            assert (answer.status, answer.error["code"]) == (400, "unsupported"), answer.body
        assert len(await studio.made()) == 1


async def test_workflow_that_comfyui_refuses_is_told_node_by_node(studio: Studio) -> None:
    answer = await studio.ask(guidance_scale=66)
    assert (answer.status, answer.error["code"]) == (400, "workflow_refused")
    assert "node 3 (KSampler): Value 66 bigger than max: cfg" in answer.error["message"]
    assert len(await studio.made()) == 1


@pytest.mark.parametrize(("prompt", "words"), [("fail", "node 3 (KSampler): as told"), ("nothing", "no picture")])
async def test_workflow_that_fails_is_told(studio: Studio, prompt: str, words: str) -> None:
    answer = await studio.ask(prompt=prompt)
    assert (answer.status, answer.error["code"]) == (500, "model_failed")
    assert words in answer.error["message"]
    assert [line["left"] for line in studio.lines("forget")] == [0], "its history does not grow"
    assert len(await studio.made()) == 1


async def test_missing_checkpoint_is_named(studio: Studio) -> None:
    (studio.checkpoints / "tiny.safetensors").unlink()
    answer = await studio.ask()
    assert (answer.status, answer.error["code"]) == (503, "bad_model")
    assert "tiny.safetensors" in answer.error["message"]
    assert not studio.lines("start")


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        ([], "no workflow"),
        ({"nodes": [], "links": []}, "Export (API)"),
        (
            {**WORKFLOW, "6": {"class_type": "CLIPTextEncode", "inputs": {"prompt": ""}}},
            "6.text is not in the workflow",
        ),
        ({name: node for name, node in WORKFLOW.items() if name != "5"}, "there is no node 5"),
        ({**WORKFLOW, "6": {"class_type": "CLIPTextEncode", "inputs": {"text": ["1", 0]}}}, "comes from another node"),
    ],
)
async def test_broken_workflow_is_told_before_anything_starts(studio: Studio, workflow: Any, words: str) -> None:
    studio.write(workflow)
    answer = await studio.ask()
    assert (answer.status, answer.error["code"]) == (503, "bad_model")
    assert words in answer.error["message"]
    assert not studio.lines("start")


async def test_control_paths_are_not_open_behind_upstream(studio: Studio) -> None:
    await studio.made()
    refused = await http(studio.app, "POST", "/upstream/m/sleep", {})
    assert refused.status in (403, 404)
    assert not studio.lines("free")


# --- cancel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_client_that_leaves_is_worked_for_no_longer(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, "--step-s", "0.1") as studio:
        await studio.made(steps=1)
        async with await Raw.open(studio.app) as raw:
            body = {"model": "m", "prompt": "long", "steps": 1000}
            raw.send(request_bytes("POST", GENERATIONS, json.dumps(body).encode()))
            await until(lambda: studio.lines("begin")[-1]["text"] == "long")
            raw.leave(how)
        await until(lambda: studio.lines("end")[-1]["how"] == "interrupted")
        await at_rest(studio.app)
        assert (await studio.made(prompt="next", steps=1))[0]["text"] == "next"


async def test_next_generation_is_not_interrupted_for_the_last(tmp_path: Path) -> None:
    async with opened(tmp_path, "--step-s", "0.05") as studio:
        await studio.made(steps=1)
        for number in range(5):
            id = await submit(studio.app, {"model": "m", "prompt": "long", "steps": 1000}, GENERATIONS)
            await until(lambda: studio.lines("begin")[-1]["text"] == "long")
            after = asyncio.create_task(studio.made(prompt=f"p{number}", steps=2))
            assert (await http(studio.app, "DELETE", f"/v1/jobs/{id}")).json()["status"] == "cancelled"
            assert (await after)[0]["text"] == f"p{number}"


# --- sleep, wake, stop ----------------------------------------------------------------------------------------------


async def test_asleep_it_has_freed_its_memory_and_a_request_wakes_it(studio: Studio) -> None:
    await studio.made()
    pids = await studio.pids()
    for _ in range(3):
        slept = await facts.order(studio.app, "sleep", "m")
        assert slept.status == 200 and slept.json()["tier"] == "asleep", slept.body
        freed = len(studio.lines("free"))
        assert len(await studio.made()) == 1
        assert (await facts.view(studio.app, "m"))["tier"] == "ready"
    assert freed == 3
    assert await studio.pids() == pids


async def test_one_that_does_not_tell_its_memory_is_unloaded_instead(tmp_path: Path) -> None:
    async with opened(tmp_path, "--garbage-at", "/system_stats") as studio:
        await studio.made()
        worker, comfy = await studio.pids()
        await facts.order(studio.app, "sleep", "m")
        await until(lambda: not is_alive(worker) and not is_alive(comfy))
        assert (await facts.view(studio.app, "m"))["tier"] == "cold"
        assert len(await studio.made()) == 1


# --- crash, kill ----------------------------------------------------------------------------------------------------


async def test_comfyui_gone_in_the_middle_is_told_and_the_next_is_answered(studio: Studio) -> None:
    await studio.made()
    worker, _ = await studio.pids()
    answer = await studio.ask(prompt="crash", steps=10)
    assert (answer.status, answer.error["code"]) == (502, "engine_lost")
    await until(lambda: not is_alive(worker))
    await at_rest(studio.app)
    assert len(await studio.made()) == 1
    assert (await studio.pids())[0] != worker


async def test_those_that_ask_right_after_the_end_are_answered_by_the_next(studio: Studio) -> None:
    await studio.made()
    assert (await studio.ask(prompt="crash", steps=10)).status == 502
    assert [(await studio.ask()).status for _ in range(3)] == [200] * 3


async def test_garbage_in_the_middle_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path, "--garbage-at", "/prompt") as studio:
        await studio.made()
        answer = await studio.ask()
        assert (answer.status, answer.error["code"]) == (502, "engine_lost")


async def test_pictures_that_are_none_are_told(tmp_path: Path) -> None:
    async with opened(tmp_path, "--garbage-at", "/view") as studio:
        for format in ("b64_json", "url"):
            answer = await studio.ask(response_format=format)
            assert (answer.status, answer.error["code"]) == (502, "engine_error"), answer.body
            assert "no picture" in answer.error["message"]


async def test_workflow_that_cannot_be_watched_is_stopped(tmp_path: Path) -> None:
    async with opened(tmp_path, "--garbage-at", "/history/") as studio:
        assert (await studio.ask()).status == 502
        answer = await studio.ask(num_inference_steps=1_000)
        assert (answer.status, answer.error["code"]) == (502, "engine_lost")
        assert [line["how"] for line in studio.lines("end")] == ["success", "interrupted"]


@pytest.mark.parametrize("which", [0, 1])
async def test_a_process_killed_while_idle_is_noticed(studio: Studio, which: int) -> None:
    await studio.made()
    pids = await studio.pids()
    os.kill(pids[which], signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))
    assert len(await studio.made()) == 1


async def test_worker_killed_in_the_middle_takes_comfyui_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path, "--step-s", "0.1") as studio:
        await studio.made(steps=1)
        worker, comfy = await studio.pids()
        asked = asyncio.create_task(studio.ask(prompt="long", steps=50))
        await until(lambda: studio.lines("begin")[-1]["text"] == "long")
        os.kill(worker, signal.SIGKILL)
        await until(lambda: not is_alive(comfy))
        # It had sent nothing, so it was asked again.
        assert (await asked).status == 200


async def test_comfyui_that_cannot_start_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path, "--no-such-switch") as studio:
        answer = await studio.ask()
        assert (answer.status, answer.error["code"]) == (503, "model_load_failed")
        assert "no-such-switch" in answer.error["details"]


async def test_a_checkpoint_that_is_missing_can_be_fetched_to_where_the_workflow_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    studio = Studio(tmp_path / "comfy")
    (studio.checkpoints / "tiny.safetensors").unlink()
    with standin_hub() as hub:
        hub.repos["org/pictures"] = {"tiny.safetensors": bytes(2_048), "other.safetensors": bytes(10)}
        for name in [name for name in os.environ if name.startswith("HF_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        roots = [str(tmp_path / "models"), str(studio.checkpoints)]
        async with gateway(tmp_path, {"m": studio.model()}, library={"roots": roots}) as studio.app:
            refused = await studio.ask()
            assert (refused.status, refused.error["code"]) == (503, "bad_model")
            assert "there is no checkpoint tiny.safetensors" in refused.error["message"]
            asked = {"model": "org/pictures", "include": ["tiny.safetensors"], "destination": str(studio.checkpoints)}
            job = (await http(studio.app, "POST", "/v1/models/download", asked)).json()

            async def is_there() -> bool:
                told = (await http(studio.app, "GET", f"/v1/models/download/{job['job_id']}")).json()
                assert told["status"] not in ("failed", "cancelled"), told
                return bool(told["status"] == "completed")

            await until(is_there)
            assert sorted(os.listdir(studio.checkpoints)) == ["tiny.safetensors"]
            # An order to load it does not wait until failed loads are tried again.
            assert (await facts.order(studio.app, "load", "m")).status == 200
            assert (await studio.ask()).status == 200
