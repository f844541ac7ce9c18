"""What would happen, told without anything happening."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import pytest

from greenroom.access.keys import Caller, Permission
from greenroom.config.sections.tasks import Task
from greenroom.core.decide.placement import Places
from greenroom.core.events import ConfigChanged, LeaseAsked, RequestArrived
from greenroom.core.explain import Explanation, Plan
from greenroom.core.model import (
    Device,
    DeviceId,
    DeviceKind,
    Group,
    ModelId,
    Move,
    MoveId,
    MoveKind,
    Need,
    RequestId,
    SlotId,
    TenantId,
    Tier,
)
from greenroom.core.policy import Policy, PriorityClass
from greenroom.core.scheduler import DefaultScheduler
from greenroom.features.planning.explain_routes import RECALLED
from greenroom.leases.records import core_id
from greenroom.runtime.memory.watch import MemoryLook
from tests.api.management_rig import GPU, NOW, Answer, Client, FakeGateway, model
from tests.runtime.memory.readings import gpu, reading

PATH = "/api/v1/explain"
FULL_MIB = 8192 - 512


def everything(thing: Any, seen: frozenset[int] = frozenset()) -> Any:
    """All there is inside of it, down to plain values, to compare before and after."""
    if id(thing) in seen:
        return "again"
    if thing is None or isinstance(thing, str | int | float | Enum) or callable(thing):
        return repr(thing)
    # A memo of a pure function may fill: without it each answer is the same.
    if isinstance(thing, Places):
        return "memo"
    deeper = seen | {id(thing)}
    if isinstance(thing, Mapping):
        return [(everything(key, deeper), everything(value, deeper)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | set | frozenset):
        return [everything(one, deeper) for one in thing]
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    # A compiled class names its attributes elsewhere.
    names += [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__mypyc_attrs__", ())]
    # Values kept only to answer the next question faster are no part of the comparison.
    remembered = {one.name for one in fields(thing) if not one.compare} if is_dataclass(thing) else set[str]()
    kept = sorted(set(names) - remembered)
    return type(thing).__name__, {name: everything(getattr(thing, name, None), deeper) for name in kept}


async def explain(gateway: FakeGateway, **ask: Any) -> Answer:
    """The answer; the scheduler and its tables are as they were, and nothing was asked for."""
    before = everything(gateway.loop.scheduler)
    answer = await Client(gateway).post(PATH, ask)
    assert everything(gateway.loop.scheduler) == before
    assert gateway.effects.asked == []
    return answer


def test_a_change_would_be_noticed() -> None:
    gateway = FakeGateway({"a": model()})
    slot = gateway.add_slot("a", Tier.READY)
    before = everything(gateway.loop.scheduler)
    slot.last_used += 1
    assert everything(gateway.loop.scheduler) != before


async def test_ready_model_would_serve() -> None:
    gateway = FakeGateway({"a": model(aliases=("first",))})
    gateway.add_slot("a", Tier.READY)
    told = (await explain(gateway, model="first")).json
    assert (told["action"], told["model"], told["slot"]) == ("serve", "a", "s-a")
    assert (told["evict"], told["behind"], told["position"]) == ([], [], None)


async def test_model_on_its_way_would_be_joined() -> None:
    gateway = FakeGateway({"a": model()})
    move = Move(MoveId("m1"), MoveKind.LOAD, SlotId("s-a"), gateway.catalog_id("a"), 1, {GPU: 100}, NOW)
    gateway.add_slot("a", Tier.COLD, move=move)
    told = (await explain(gateway, model="a")).json
    assert (told["action"], told["slot"]) == ("join", "s-a")


async def test_busy_model_would_be_waited_for() -> None:
    gateway = FakeGateway({"a": model(concurrency=1)})
    gateway.add_slot("a", Tier.READY, in_flight={RequestId("r-1"): None})
    told = (await explain(gateway, model="a")).json
    assert (told["action"], told["why"]) == ("wait", "busy")


async def test_a_swap_names_the_models_that_would_leave_and_why() -> None:
    gateway = FakeGateway({"a": model(memory_mib=FULL_MIB), "b": model()})
    gateway.add_slot("b", Tier.READY, last_used=NOW - 100)
    told = (await explain(gateway, model="a")).json
    assert (told["action"], told["model"], told["move"]) == ("swap", "a", "load")
    assert [(one["model"], one["slot"], one["to"]) for one in told["evict"]] == [("b", "s-b", "cold")]
    assert told["evict"][0]["why"]


async def test_model_that_can_never_fit_would_be_refused() -> None:
    gateway = FakeGateway({"a": model(memory_mib=FULL_MIB + 1)})
    told = (await explain(gateway, model="a")).json
    assert (told["action"], told["why"]) == ("refuse", "too_large")


@pytest.mark.parametrize("name", ["a", "chat"])
async def test_model_whose_devices_are_not_there_is_told_which_are(name: str) -> None:
    gateway = FakeGateway({"a": model(devices=("gpu7", "GPU-x"))})
    gateway.tasks.configure(gateway.config.model_copy(update={"tasks": {"chat": Task(candidates=("a",))}}))
    told = (await explain(gateway, model=name)).json
    assert (told["action"], told["why"]) == ("refuse", "too_large")
    assert told["detail"] == (
        "a may use only gpu7 and GPU-x (`devices`), and this machine has gpu0. "
        "Name what is there, or leave `devices` out."
    )


@pytest.mark.parametrize("devices", [(), ("gpu0",), ("gpu0", "gpu7")])
async def test_model_that_can_never_fit_on_devices_that_are_there_is_told_nothing_of_others(
    devices: tuple[str, ...],
) -> None:
    gateway = FakeGateway({"a": model(memory_mib=FULL_MIB + 1, devices=devices)})
    told = (await explain(gateway, model="a")).json
    assert (told["why"], told["detail"]) == ("too_large", None)


async def test_a_swap_names_the_devices_where_its_model_would_come() -> None:
    gateway = FakeGateway({"a": model()})
    told = (await explain(gateway, model="a")).json
    assert (told["move"], told["devices"]) == ("load", [{"id": "gpu0", "name": "gpu0", "mib": 100}])
    gateway.add_slot("a", Tier.READY)
    assert (await explain(gateway, model="a")).json["devices"] == []


async def test_a_gpu_is_named_by_its_number_and_a_model_without_one_by_the_host() -> None:
    host, gpus = DeviceId("host"), (DeviceId("GPU-b"), DeviceId("GPU-a"))
    gateway = FakeGateway({"a": model(memory_mib=900), "b": model(devices=("host",))})
    there = [Device(gpu, DeviceKind.GPU, size, 0) for gpu, size in zip(gpus, (500, 1_000), strict=True)]
    there.append(Device(host, DeviceKind.HOST, 8_000, 0))
    gateway.memory_watch.last = MemoryLook(NOW, reading(gpu("GPU-b", 0), gpu("GPU-a", 1)))
    gateway.loop.scheduler.handle(ConfigChanged(NOW, devices=tuple(there)))
    gateway.effects.asked.clear()
    assert (await explain(gateway, model="a")).json["devices"] == [{"id": "GPU-a", "name": "gpu1", "mib": 900}]
    assert (await explain(gateway, model="b")).json["devices"] == [{"id": "host", "name": "host", "mib": 100}]


async def test_model_that_rules_exclude_beside_a_pinned_one_would_be_refused() -> None:
    gateway = FakeGateway({"a": model(pinned=True), "b": model()})
    rules = (Group("turns", (ModelId("a"), ModelId("b")), exclusive=False),)
    gateway.loop.scheduler.handle(ConfigChanged(NOW, limits=dataclasses.replace(gateway.state.limits, company=rules)))
    gateway.effects.asked.clear()
    gateway.add_slot("a", Tier.READY)
    told = (await explain(gateway, model="b")).json
    assert (told["action"], told["why"], told["beside"], told["eta_s"]) == ("refuse", "excluded", ["a"], None)


async def test_priority_counts_and_the_models_own_is_the_default() -> None:
    gateway = FakeGateway({"a": model(memory_mib=FULL_MIB, priority="low")})
    gateway.loop.scheduler.handle(gateway.lease_of(FULL_MIB, priority=1))
    gateway.effects.asked.clear()
    assert (await explain(gateway, model="a")).json["action"] == "wait"
    assert (await explain(gateway, model="a", priority="high")).json["action"] == "swap"
    assert (await explain(gateway, model="a", priority=0)).json["action"] == "swap"


def tenants(tenant: str) -> Caller:
    """A key that reads and leases for this tenant."""
    return Caller("k", TenantId(tenant), 0, admin=False, leases=True, verbs=frozenset({Permission.READ}))


async def leased(priority: int | None = None) -> FakeGateway:
    """Programs of an operator and of the tenant lab hold the memory that `a` needs, whose load takes five seconds."""
    gateway = FakeGateway({"a": model(memory_mib=FULL_MIB), "b": model()})
    gateway.state.models[gateway.catalog_id("a")].learned_s[MoveKind.LOAD] = 5.0
    labs = Client(gateway, is_admin=False, caller=tenants("lab"))
    for client, name in ((Client(gateway), "train"), (labs, "render")):
        assert (await client.post("/api/v1/leases", {"mib": 1_000, "name": name})).status == 201
    for number, ask in enumerate(gateway.leasing.asked):
        lasts = {"priority": number} if priority is None else {"priority": priority, "preemptible": True}
        held = LeaseAsked(NOW, core_id(ask.id), Need(gpu_mib=1_000), **lasts)
        gateway.loop.scheduler.handle(held)
    gateway.effects.asked.clear()
    return gateway


async def test_leases_that_hold_the_memory_are_named_and_no_time_is_told() -> None:
    told = (await explain(await leased(), model="a")).json
    assert (told["action"], told["why"], told["leases"], told["eta_s"]) == ("wait", "leased", ["train", "render"], None)
    assert (await explain(await leased(), model="b")).json["leases"] == []


async def test_a_tenant_is_told_the_names_of_its_own_leases_only() -> None:
    gateway = await leased()
    for tenant, names in (("lab", ["render"]), ("other", [])):
        client = Client(gateway, is_admin=False, caller=tenants(tenant))
        told = (await client.post(PATH, {"model": "a"})).json
        assert (told["why"], told["leases"]) == ("leased", names)


async def test_a_lease_that_would_be_recalled_is_told_by_its_name_to_those_who_may_see_it() -> None:
    gateway = await leased(priority=2)
    for tenant, names in (("lab", {"a lease", "render"}), ("other", {"a lease"})):
        client = Client(gateway, is_admin=False, caller=tenants(tenant))
        told = (await client.post(PATH, {"model": "a", "priority": "high"})).json
        assert (told["action"], {one["model"] for one in told["evict"]}) == ("swap", names)
        assert all(one["is_lease"] and one["why"] == RECALLED for one in told["evict"])
    told = (await explain(gateway, model="a", priority="high")).json
    assert {one["model"] for one in told["evict"]} == {"train", "render"}


async def test_a_candidate_whose_memory_is_leased_is_told_no_time() -> None:
    gateway = await leased()
    gateway.tasks.configure(gateway.config.model_copy(update={"tasks": {"chat": Task(candidates=("a",))}}))
    told = (await explain(gateway, model="chat")).json
    assert (told["why"], told["candidates"][0]["eta_s"]) == ("leased", None)


async def test_the_queue_says_that_memory_is_leased() -> None:
    gateway = await leased()
    gateway.add_waiter("a", 1)
    (row,) = (await Client(gateway).get("/api/v1/queue")).json["requests"]
    assert (row["plan"], row["why"], row["eta_s"]) == ("wait", "leased", None)


async def test_it_is_told_how_long_a_request_would_wait_at_most() -> None:
    gateway = FakeGateway({"a": model()})
    told = (await explain(gateway, model="a", x_budget_s=0.25)).json
    assert (told["action"], told["eta_s"], told["wait_max_s"]) == ("swap", None, 0.25)
    assert (await explain(gateway, model="a")).json["wait_max_s"] == 290.0
    gateway.add_slot("a", Tier.READY)
    assert (await explain(gateway, model="a", x_budget_s=0.25)).json["wait_max_s"] is None


async def test_full_queue_would_refuse() -> None:
    gateway = FakeGateway({"a": model(concurrency=1)})
    gateway.state.limits = dataclasses.replace(gateway.state.limits, queue_depth_max=1)
    gateway.add_slot("a", Tier.READY, in_flight={RequestId("r-9"): None})
    gateway.add_waiter("a", 1)
    told = (await explain(gateway, model="a")).json
    assert (told["action"], told["why"]) == ("refuse", "queue_full")


class Failing:
    """A policy that raises as soon as a request waits."""

    def priority_class(self, priority: int) -> PriorityClass:
        raise ZeroDivisionError("nothing to divide by")


@pytest.mark.parametrize("name", ["a", "chat"])
async def test_a_policy_that_raises_is_named_and_logged(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = FakeGateway({"a": model()})
    gateway.tasks.configure(gateway.config.model_copy(update={"tasks": {"chat": Task(candidates=("a",))}}))
    gateway.state.limits = dataclasses.replace(gateway.state.limits, policy="mine")
    gateway.state.policy = cast(Policy, Failing())
    answer = await Client(gateway).post(PATH, {"model": name})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    told = "The policy 'mine' (swapper 'memory') failed at a request for a: ZeroDivisionError: nothing to divide by."
    assert answer.error["message"].startswith(told)
    logged = capsys.readouterr().err
    assert "policy=mine" in logged and "ZeroDivisionError" in logged and "in priority_class" in logged
    others = await Client(gateway, is_admin=False).post(PATH, {"model": name})
    assert others.status == 500 and "divide" not in others.error["message"] and "mine" not in others.error["message"]


class Unplanned:
    """A scheduler whose answer has no plan, and its view."""

    def __init__(self, scheduler: DefaultScheduler) -> None:
        self.view = self
        self.limits = scheduler.view.limits
        self.weigh = scheduler.view.weigh

    def explanation(self, event: RequestArrived) -> Explanation:
        return Explanation(cast(Plan, None), 0, None)


# It is given a plan of a wrong type, which compiled code tells differently.
@pytest.mark.pure
@pytest.mark.parametrize("name", ["a", "chat"])
async def test_an_answer_that_cannot_be_told_is_not_said_to_be_the_policys_fault(name: str) -> None:
    gateway = FakeGateway({"a": model()})
    gateway.tasks.configure(gateway.config.model_copy(update={"tasks": {"chat": Task(candidates=("a",))}}))
    gateway.loop.scheduler = cast(DefaultScheduler, Unplanned(gateway.loop.scheduler))
    with pytest.raises(KeyError):
        await explain(gateway, model=name)


@pytest.mark.parametrize(
    ("ask", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({}, 400, "model"),
        ({"model": "a", "priority": "urgent"}, 400, "priority"),
        ({"model": "a", "priority": 1.5}, 400, "priority"),
        ({"model": "a", "x_budget_s": 0}, 400, "x_budget_s"),
        ({"model": "a", "x_budget_s": -2}, 400, "x_budget_s"),
        ({"model": "a", "prompt": "hello"}, 400, "prompt"),
        ({"model": "a", "tenant": "x" * 257}, 400, "tenant"),
    ],
)
async def test_wrong_question_names_what_is_wrong(ask: dict[str, Any], status: int, param: str) -> None:
    answer = await explain(FakeGateway({"a": model()}), **ask)
    assert answer.status == status
    assert answer.error["param"].startswith(param)


NO_PRIORITIES = (float("inf"), float("nan"), -1e300, 1.5, True, [1], {"high": 1}, 10**30, 101, "urgent", "")


@pytest.mark.parametrize("said", NO_PRIORITIES, ids=repr)
@pytest.mark.parametrize(("path", "ask"), [(PATH, {"model": "a"}), ("/api/v1/leases", {"mib": 1})])
async def test_whatever_is_no_priority_is_refused_in_the_words_of_requests(path: str, ask: Any, said: Any) -> None:
    answer = await Client(FakeGateway({"a": model()})).post(path, {**ask, "priority": said})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "priority")
    assert (
        answer.error["message"] == "priority is high, normal, low or a whole number from -100 to 100; lower goes first."
    )


@pytest.mark.parametrize("said", [None, 2, 2.0, "2", "LOW", -100])
async def test_what_is_a_priority_is_taken_however_it_is_written(said: Any) -> None:
    assert (await explain(FakeGateway({"a": model()}), model="a", priority=said)).status == 200
