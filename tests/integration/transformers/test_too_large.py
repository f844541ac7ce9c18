"""Models that find no room, folders outside the roots, and chat templates that do not end."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway, left_behind
from tests.integration.facts import at_rest, order, view
from tests.integration.raw import chat, http
from tests.integration.transformers.facts import held, memfds, says
from tests.models import tiny_hf
from tests.torch_python import hosted

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Its weights alone, at 32 bits.
LARGE_MIB = 70
SMALL_MIB = 50
# They take all the time, the interpreter, or all memory.
HOSTILE_TEMPLATES = {
    "spinning": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "counting": "{{ 10 ** 100000000 }}",
    "growing": "{{ 'a' * 3000000000 }}",
}
OUTSIDE = ("linked", "linked-file", "outside", "dotted")


def large(**keys: Any) -> dict[str, Any]:
    """A model of which nothing is declared, so that its needs are found out from its folder."""
    return hosted(tiny_hf("large", noise=True, hidden=512, layers=10), **{"memory_mib": None, **keys})


# --- no worker is needed to know it ---------------------------------------------------------------------------------


async def test_model_larger_than_the_gpu_is_refused_with_the_numbers_before_anything_starts(tmp_path: Path) -> None:
    memory = memfds()
    async with gateway(tmp_path, {"large": large()}, budget_mib=SMALL_MIB) as app:
        answer = await chat(app, "large")
        assert (answer.status, answer.error["code"]) == (503, "model_too_large"), answer.body
        assert answer.headers["x-should-retry"] == "false"
        assert f"{SMALL_MIB} MiB" in answer.error["message"]
        ordered = await order(app, "load", "large")
        assert (ordered.status, ordered.error["code"]) == (503, "model_too_large"), ordered.body
        assert (await view(app, "large"))["need"]["gpu_mib"] > LARGE_MIB
        assert ((await view(app, "large"))["slots"], held(app), memfds()) == ([], {}, memory)
        assert not left_behind(tmp_path)


async def test_model_larger_than_the_host_is_refused_as_well(tmp_path: Path) -> None:
    memory = memfds()
    async with gateway(tmp_path, {"large": large()}, host={"memory_mib": SMALL_MIB}) as app:
        for answer in (await chat(app, "large"), await order(app, "prepare", "large")):
            assert (answer.status, answer.error["code"]) == (503, "model_too_large"), answer.body
        assert ((await view(app, "large"))["slots"], held(app), memfds()) == ([], {}, memory)
        assert not left_behind(tmp_path)


# --- a worker finds it out ------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """A green room in which a large model has no place, and roots with ways out of them."""
    folder = tmp_path_factory.mktemp("roots")
    roots, outside = folder / "roots", folder / "outside"
    shutil.copytree(tiny_hf("inside"), roots / "inside")
    shutil.copytree(tiny_hf("inside"), outside)
    (roots / "linked").symlink_to(outside)
    (roots / "linked-file").mkdir()
    for file in outside.iterdir():
        (roots / "linked-file" / file.name).symlink_to(file)
    paths = {"outside": outside, "dotted": roots / ".." / "outside"}
    paths |= {name: roots / name for name in ("inside", "linked", "linked-file", *HOSTILE_TEMPLATES)}
    for name in HOSTILE_TEMPLATES:
        hostile(roots / name)
    models = {name: hosted(path) for name, path in paths.items()} | {"large": large()}
    memory = {"green_room_mib": SMALL_MIB, "spare_worker": False}
    model_roots = [str(roots), str(tiny_hf("inside").parent)]
    async with gateway(folder, models, memory=memory, model_roots=model_roots) as app:
        yield app


def hostile(folder: Path) -> None:
    shutil.copytree(tiny_hf(folder.name), folder)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": HOSTILE_TEMPLATES[folder.name]}))


@pytest.mark.parametrize("name", OUTSIDE)
async def test_folder_outside_the_roots_is_refused_wherever_its_links_lead(app: App, name: str) -> None:
    memory, claims = memfds(), held(app)
    answer = await chat(app, name)
    assert (answer.status, answer.error["code"]) == (503, "path_outside_roots"), answer.body
    assert name in answer.error["message"] and "model_roots" in answer.error["message"]
    assert (memfds(), held(app)) == (memory, claims)
    await says(app, "inside")


async def test_model_larger_than_the_green_room_is_served_and_leaves_it_cold(app: App) -> None:
    memory, claims = memfds(), held(app)
    prepared = await order(app, "prepare", "large")
    assert (prepared.status, prepared.error["code"]) == (503, "model_too_large"), prepared.body
    assert "green_room_mib" in prepared.error["message"]
    assert (memfds(), held(app)) == (memory, claims)
    assert (await chat(app, "large", max_tokens=2)).status == 200
    slept = await order(app, "sleep", "large")
    assert (slept.status, slept.error["code"]) == (409, "green_room_full"), slept.body
    assert (await view(app, "large"))["tier"] == "cold"
    assert (memfds(), held(app)) == (memory, claims)


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
async def test_chat_template_that_takes_too_much_costs_its_caller_only(app: App, name: str) -> None:
    await says(app, "inside")
    suffers = asyncio.create_task(chat(app, name))
    await says(app, "inside")
    answer = await suffers
    assert (answer.status, answer.error["code"]) == (422, "template_failed"), answer.body
    assert "template" in answer.error["message"]
    await at_rest(app)
    # Neither it nor its neighbour is worse for it.
    plain = await http(app, "POST", "/v1/completions", {"model": name, "prompt": "hi", "max_tokens": 4})
    assert name in plain.json()["choices"][0]["text"]
    await says(app, "inside")
