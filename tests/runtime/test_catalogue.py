"""Names find models; a change gives a new revision only where another process is needed."""

from greenroom.config.diff import diff
from greenroom.config.schema import Config, Model
from greenroom.core.model import ModelId
from greenroom.runtime.catalogue import Catalog


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
