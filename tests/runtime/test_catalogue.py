"""Names find models and instances of them; a change gives a new revision only where another process is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.diff import diff
from greenroom.config.schema import Config, Model
from greenroom.core.events import ConfigChanged
from greenroom.core.model import ModelId
from greenroom.errors import TooManyModels
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.known_models import KnownModels, TenantModels
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots


def config(**models: Model) -> Config:
    return Config(models=models)


def command(words: str = "serve ${PORT}", **keys: object) -> Model:
    return Model(cmd=words, **keys)  # type: ignore[arg-type]


def filled(first: Config) -> Catalog:
    catalog = Catalog()
    catalog.fill(first)
    return catalog


def test_models_are_found_by_id_and_alias() -> None:
    catalog = filled(config(a=command(aliases=("x", "y"))))
    assert {name: bool(catalog.find(name)) for name in ("a", "x", "y", "z")} == {
        "a": True,
        "x": True,
        "y": True,
        "z": False,
    }


def test_changed_command_is_a_new_revision_and_a_label_is_not() -> None:
    old = config(a=command(), b=command(), c=command())
    new = config(a=command("other ${PORT}"), b=command(aliases=("bee",)), c=command())
    catalog = filled(old)
    untouched = catalog.find("c")
    specs = catalog.change(new, diff(old, new))
    assert {spec.id: spec.revision for spec in specs} == {"a": 2, "b": 1}
    assert catalog.find("c") is untouched
    assert catalog.find("bee") is catalog.find("b")


def test_revisions_grow_over_a_removal() -> None:
    with_a, without = config(a=command(), b=command()), config(b=command())
    catalog = filled(with_a)
    catalog.change(without, diff(with_a, without))
    assert catalog.find("a") is None
    catalog.change(with_a, diff(without, with_a))
    found = catalog.find("a")
    assert found is not None and found.spec.revision == 2


def test_only_the_current_revision_is_given_out() -> None:
    old, new = config(a=command()), config(a=command("other ${PORT}"))
    catalog = filled(old)
    catalog.change(new, diff(old, new))
    assert catalog.revision(ModelId("a"), 1) is None
    assert catalog.revision(ModelId("a"), 2) is catalog.find("a")
    assert catalog.revision(ModelId("b"), 1) is None


def test_priorities_are_numbers_where_lower_goes_first() -> None:
    catalog = filled(config(a=command(priority="high"), b=command(), c=command(priority="low"), d=command(priority=7)))
    assert [entry.spec.priority for entry in catalog] == [0, 1, 2, 7]


def test_a_draft_changes_nothing_until_it_is_taken() -> None:
    old, new = config(a=command()), config(a=command("other ${PORT}"), b=command())
    catalog = filled(old)
    before = catalog.find("a")
    draft = catalog.draft(new, diff(old, new))
    assert catalog.find("a") is before and catalog.find("b") is None
    assert [spec.id for spec in catalog.take(draft)] == ["a", "b"]
    assert catalog.find("a") is not before and catalog.find("b") is not None


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
