from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.workers.comfyui.api import WorkflowRun
from greenroom.workers.comfyui.main import is_ours, listeners
from greenroom.workers.comfyui.workflow import PICTURES_MAX, SEED_MAX, WorkflowPlan
from greenroom.workers.serving.errors import ApiError

WORKFLOW: dict[str, Any] = {
    "1": {"class_type": "KSampler", "inputs": {"seed": 1, "denoise": 1.0, "latent_image": ["2", 0]}},
    "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 8, "height": 8}},
    "a": {"class_type": "CLIPTextEncode", "inputs": {"text": "before", "text.2": "before"}},
}


def plan(**inputs: Any) -> WorkflowPlan:
    named = {"prompt": ["a.text"], **{name: [place] for name, place in inputs.items()}}
    return WorkflowPlan.of(WORKFLOW, named)


def test_operators_own_inputs_take_plain_values() -> None:
    own = plan(denoise="1.denoise")
    [filled] = own.runs({"prompt": "x", "denoise": 0.5, "user": "me", "quality": "high"})
    assert (filled["1"]["inputs"]["denoise"], filled["a"]["inputs"]["text"]) == (0.5, "x")
    for wrong in ([1, 0], {"a": 1}):
        with pytest.raises(ApiError) as told:
            own.runs({"prompt": "x", "denoise": wrong})
        # A list would connect the input to another node.
        assert told.value.param == "denoise"


def test_workflow_itself_is_never_changed() -> None:
    own = plan(seed="1.seed")
    first, second = own.runs({"prompt": "x", "n": 2, "seed": 5})
    assert (first["1"]["inputs"]["seed"], second["1"]["inputs"]["seed"]) == (5, 6)
    assert WORKFLOW["a"]["inputs"]["text"] == "before" and WORKFLOW["1"]["inputs"]["seed"] == 1


def test_one_value_may_go_to_several_places_and_names_may_have_dots() -> None:
    [filled] = WorkflowPlan.of(WORKFLOW, {"prompt": ["a.text", "a.text.2"]}).runs({"prompt": "x"})
    assert filled["a"]["inputs"] == {"text": "x", "text.2": "x"}


def test_seed_stays_in_its_range() -> None:
    own = plan(seed="1.seed")
    seeds = [run["1"]["inputs"]["seed"] for run in own.runs({"prompt": "x", "n": 3, "seed": SEED_MAX})]
    assert all(0 <= seed <= SEED_MAX for seed in seeds) and len(set(seeds)) == 3


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers()))
NAMES = ["prompt", "n", "size", "seed", "width", "height", "steps", "guidance_scale", "num_inference_steps"]


@given(st.dictionaries(st.sampled_from([*NAMES, "denoise", "other"]), VALUES))
def test_any_body_is_filled_in_or_refused(body: dict[str, Any]) -> None:
    own = plan(seed="1.seed", width="2.width", height="2.height", denoise="1.denoise")
    try:
        runs = own.runs(body)
    except ApiError as refused:
        assert 400 <= refused.status < 500
        return
    assert 1 <= len(runs) <= PICTURES_MAX
    assert all(run["2"]["inputs"]["width"] <= 4096 for run in runs)


# --- progress -------------------------------------------------------------------------------------------------------


def progress(value: Any, most: Any = 10, node: str = "1", prompt_id: str = "p") -> dict[str, Any]:
    return {"value": value, "max": most, "node": node, "prompt_id": prompt_id}


def test_progress_is_that_of_the_samplers_of_all_runs() -> None:
    samplers = frozenset(("1", "2"))
    generation = WorkflowRun(2, len(samplers))
    generation.prompt_id = "p"
    seen = []
    for event in (progress(5), progress(10), progress(5, node="2"), progress(10, node="2")):
        generation.hear("progress", event, samplers)
        seen.append(generation.progress)
    assert seen == [0.125, 0.25, 0.375, 0.5]
    generation.next_run()
    assert generation.progress == 0.5


@pytest.mark.parametrize(
    "event",
    [
        progress(5, node="9"),
        progress(5, prompt_id="other"),
        progress("5"),
        progress(11),
        progress(-1),
        progress(5, 0),
        progress(None, None),
        {},
    ],
)
def test_events_of_others_and_nonsense_are_no_progress(event: dict[str, Any]) -> None:
    generation = WorkflowRun(1, 1)
    generation.prompt_id = "p"
    generation.hear("progress", event, frozenset("1"))
    assert generation.progress == 0


# --- the port -------------------------------------------------------------------------------------------------------


def test_port_of_another_user_is_not_ours() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    line = "   0: 0100007F:1FFC 00000000:0000 0A 00000000:00000000 00:00000000 00000000  {uid}        0 1 1 0\n"
    assert is_ours(0x1FFC, head + line.format(uid=os.getuid()))
    assert not is_ours(0x1FFC, head + line.format(uid=os.getuid() + 1))
    # Another port of that user is none of our business.
    assert is_ours(0x1FFD, head + line.format(uid=os.getuid() + 1))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_all_that_listen_on_a_port_are_seen(family: socket.AddressFamily, address: str) -> None:
    if family == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    with socket.create_server((address, 0), family=family) as listening:
        port, table = listening.getsockname()[1], listeners()
    theirs = table.replace(f" {os.getuid()} ", f" {os.getuid() + 1} ")
    assert is_ours(port, table) and not is_ours(port, theirs)
