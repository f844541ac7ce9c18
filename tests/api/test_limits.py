from __future__ import annotations

from greenroom.access.keys import Caller
from greenroom.config.schema import Config
from greenroom.config.sections.keys import TenantLimits
from tests.api.management_rig import Client, FakeGateway, model

LAB = Caller(name="bob", tenant="lab", priority_max=1, admin=False)


async def test_nothing_is_limited_unless_it_is_said() -> None:
    assert (await Client(FakeGateway({"a": model()})).get("/api/v1/limits")).json == {"count": 0, "limits": []}


async def test_limits_tell_what_is_left() -> None:
    gateway = FakeGateway({"a": model()})
    models = {"a": model(limits={"concurrent_max": 4})}
    lab = TenantLimits(requests_per_minute=10, tokens_per_minute=1000)
    gateway.limiter.configure(Config(models=models, tenants={"lab": lab}))
    hold = gateway.limiter.admit(LAB, None)
    assert hold is not None
    hold.tokens_asked = 300
    hold.begin()
    tenant, of_model = (await Client(gateway).get("/api/v1/limits")).json["limits"]
    assert (tenant["kind"], tenant["name"], tenant["in_flight"], tenant["concurrent_max"]) == ("tenant", "lab", 1, None)
    assert (tenant["requests_per_minute"], tenant["requests_left"]) == (10, 9)
    assert (tenant["tokens_per_minute"], tenant["tokens_left"]) == (1000, 700)
    assert (of_model["kind"], of_model["name"], of_model["concurrent_max"]) == ("model", "a", 4)
    assert of_model["requests_per_minute"] is None


async def test_those_of_which_most_is_used_come_first() -> None:
    gateway = FakeGateway({"a": model()})
    tenants = {f"t{number}": TenantLimits(requests_per_minute=10 + number) for number in range(300)}
    gateway.limiter.configure(Config(models={"a": model()}, tenants=tenants | {"lab": TenantLimits(concurrent_max=4)}))
    hold = gateway.limiter.admit(LAB, None)
    assert hold is not None
    hold.begin()
    page = (await Client(gateway).get("/api/v1/limits?limit=5")).json
    assert (page["count"], len(page["limits"])) == (301, 5)
    assert (page["limits"][0]["name"], page["limits"][0]["in_flight"]) == ("lab", 1)
    assert len((await Client(gateway).get("/api/v1/limits")).json["limits"]) == 100
    assert (await Client(gateway).get("/api/v1/limits?limit=100000")).status == 400
