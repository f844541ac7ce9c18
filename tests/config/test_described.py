"""Docstrings under fields: in the schemas that users read, and nowhere near the start of a program."""

from __future__ import annotations

import subprocess
import sys

from pydantic import ConfigDict, Field

from greenroom.config.marks import Described, descriptions


class Parent(Described):
    model_config = ConfigDict(protected_namespaces=())

    inherited: int = 0
    """Told by the parent."""
    replaced: int = 0
    """Told by the parent only."""
    default: str = ""
    """A name that schemas use themselves."""


class Child(Parent):
    replaced: int = 1
    """Told by the child,
    on two lines."""
    silent: int = 2
    own: int = Field(3, description="Said in its field.")
    """Said under it."""


class Outer(Described):
    inside: Child = Child()
    """What a reference says beside its target."""


def test_fields_are_described_by_their_own_docstring_or_the_one_inherited() -> None:
    properties = Child.model_json_schema()["properties"]
    assert {name: field.get("description") for name, field in properties.items()} == {
        "inherited": "Told by the parent.",
        "replaced": "Told by the child,\non two lines.",
        "default": "A name that schemas use themselves.",
        "silent": None,
        "own": "Said in its field.",
    }
    assert descriptions(Parent)["replaced"] == "Told by the parent only."


def test_models_inside_models_are_described_too() -> None:
    schema = Outer.model_json_schema()
    assert schema["properties"]["inside"]["description"] == "What a reference says beside its target."
    assert schema["$defs"]["Child"]["properties"]["inherited"]["description"] == "Told by the parent."


def test_a_class_without_sources_is_not_described() -> None:
    made = type("Made", (Described,), {"__annotations__": {"a": int}, "__module__": "nowhere"})
    assert descriptions(made) == {} and made.model_json_schema()["properties"]["a"]["type"] == "integer"


def test_no_source_is_read_to_import_the_gateway() -> None:
    program = "import linecache, greenroom.app; assert not [read for read in linecache.cache if 'greenroom' in read]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
