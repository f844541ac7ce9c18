"""Instances of a model for tenants: one each, a bounded number, and only idle ones leave for others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.schema import Config
from greenroom.core.events import ConfigChanged
from greenroom.errors import TooManyModels
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.tenant_models import TenantModels


class Rig:
    """A catalogue with one model, and a scheduler that has busy slots for the ids in `busy`."""

    def __init__(self, instances_max: int) -> None:
        self.catalog = Catalog()
        keys: dict[str, Any] = {"cmd": "serve ${PORT}", "memory_mib": 1, "pinned": True, "aliases": ["first"]}
        self.catalog.fill(Config.model_validate({"models": {"alpha": keys | {"isolate_tenants": "process"}}}))
        self.busy: set[str] = set()
        self.posted: list[ConfigChanged] = []
        view = SimpleNamespace(is_waited_for=self.busy.__contains__, slots_of=lambda _: [])
        loop = cast(SchedulerLoop, SimpleNamespace(view=view, post=self.posted.append, clock=lambda: 0.0))
        self.models = TenantModels(self.catalog, KnownModels(self.catalog, loop, LiveSlots(), {}), instances_max)

    def of(self, tenant: str) -> Entry:
        base = self.catalog.find("alpha")
        assert base is not None
        return self.models.of(base, tenant)


def test_a_tenant_has_one_instance_which_is_not_pinned_and_has_no_name_of_its_own() -> None:
    rig = Rig(10)
    lab, shop = rig.of("lab"), rig.of("shop")
    assert rig.of("lab") is lab and lab.id != shop.id and rig.of("").id == "alpha"
    assert (lab.public_id, lab.base_id, lab.tenant) == ("alpha", "alpha", "lab")
    assert lab.config.unlisted and not lab.spec.pinned and not lab.config.aliases
    assert [event.models[0].id for event in rig.posted] == [lab.id, shop.id]
    named = rig.catalog.find("first")
    assert named is not None and named.id == "alpha"


def test_the_one_not_used_for_longest_leaves_and_no_id_comes_back() -> None:
    rig = Rig(2)
    lab, shop = rig.of("lab"), rig.of("shop")
    rig.of("lab")
    rig.of("new")
    assert rig.posted[-2].removed == (shop.id,) and not rig.catalog.is_known(shop.id)
    assert rig.of("shop").id not in (lab.id, shop.id)


def test_those_in_use_stay() -> None:
    rig = Rig(2)
    rig.busy |= {rig.of("lab").id, rig.of("shop").id}
    with pytest.raises(TooManyModels):
        rig.of("new")
    assert len(rig.catalog) == 3


def test_an_instance_follows_its_model_to_other_weights() -> None:
    rig = Rig(2)
    lab, base = rig.of("lab"), rig.of("")
    newer = replace(base, spec=replace(base.spec, revision=base.spec.revision + 1))
    again = rig.models.of(newer, "lab")
    assert again.id == lab.id and again.spec.revision == newer.spec.revision
    assert rig.posted[-1].models == (again.spec,)
