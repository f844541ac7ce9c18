"""Which names lead to something below the roots, and that no name leads out of them."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.library.roots import Roots, is_below, pinned


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models" / "org" / "name").mkdir(parents=True)
    (tmp_path / "models" / "a.gguf").write_bytes(b"a")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"k")
    return tmp_path / "models"


def test_names_are_absolute_or_relative_to_a_root(root: Path) -> None:
    roots = Roots([str(root)])
    assert roots.locate("a.gguf") == str(root / "a.gguf")
    assert roots.locate(str(root / "a.gguf")) == str(root / "a.gguf")
    assert roots.locate("org/name") == str(root / "org" / "name")
    assert roots.locate("org/./name/../name") == str(root / "org" / "name")
    assert roots.locate(str(root)) == str(root)


@pytest.mark.parametrize(
    "name", ["", "\0", "nothing", "../secret/key", "org/../../secret/key", "/etc/passwd", "x" * 5_000, "a.gguf/x", "~"]
)
def test_nothing_else_is_found(root: Path, name: str) -> None:
    assert Roots([str(root)]).locate(name) is None


def test_links_count_by_where_they_lead(root: Path) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    (root / "out.gguf").symlink_to(root.parent / "secret" / "key")
    (root / "in.gguf").symlink_to("a.gguf")
    (root / "inside").symlink_to("org")
    (root / "round").symlink_to("round")
    (root.parent / "secret" / "in").symlink_to(root / "a.gguf")
    roots = Roots([str(root)])
    assert roots.locate("out/key") is None
    assert roots.locate("out.gguf") is None
    assert roots.locate("round") is None
    # The folder is real and the file keeps its name.
    assert roots.locate("in.gguf") == str(root / "in.gguf")
    assert roots.locate("inside/name") == str(root / "org" / "name")
    # A link outside that leads in is answered by what it leads to.
    assert roots.locate(str(root.parent / "secret" / "in")) == str(root / "a.gguf")
    # Not `root/a.gguf`: the folder above `out` is that of the secrets.
    (root.parent / "a.gguf").write_bytes(b"another")
    assert roots.locate("out/../a.gguf") is None


def split(folder: Path, name: str = "m") -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    first, second = (folder / f"{name}-0000{part}-of-00002.gguf" for part in (1, 2))
    return first, second


def test_part_of_a_split_model_is_pinned_where_all_parts_are(root: Path) -> None:
    (first, second), linked = split(root / "store", "chat"), split(root / "latest")
    for path, link in zip((first, second), linked, strict=True):
        path.write_bytes(b"x")
        link.symlink_to(path)
    assert pinned(str(linked[0])) == str(first)
    # Its neighbour leads elsewhere now.
    (root / "other").mkdir()
    second.rename(root / "other" / second.name)
    linked[1].unlink()
    linked[1].symlink_to(root / "other" / second.name)
    assert pinned(str(linked[0])) == str(linked[0])


def test_part_is_not_pinned_beside_a_part_of_other_weights(root: Path) -> None:
    (first, second), linked = split(root / "store"), split(root / "latest")
    for path in (first, second, root / "store" / "newer.gguf"):
        path.write_bytes(b"x")
    linked[0].symlink_to(first)
    linked[1].symlink_to(root / "store" / "newer.gguf")
    assert pinned(str(linked[0])) == str(linked[0])


def test_only_plain_files_and_folders_are_found(root: Path) -> None:
    os.mkfifo(root / "pipe.gguf")
    (root / "null").symlink_to("/dev/null")
    assert Roots([str(root)]).locate("pipe.gguf") is None
    assert Roots([str(root), "/dev"]).locate("/dev/null") is None


def test_root_that_is_not_there_or_a_link(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    roots = Roots([str(root.parent / "gone"), str(root.parent / "link")])
    assert roots.locate("a.gguf") == str(root / "a.gguf")
    assert not Roots([])
    assert Roots([]).locate(str(root / "a.gguf")) is None


def test_names_that_begin_like_a_root_are_not_below_it() -> None:
    assert is_below("/models/a", "/models") and is_below("/models", "/models") and is_below("/models", "/")
    assert not is_below("/models-private/a", "/models") and not is_below("/", "/models")


_PART = st.sampled_from([".", "..", "a.gguf", "org", "name", "out", "up", "", "secret", "key", "models", "~", "\udcff"])


@settings(deadline=None)
@given(parts=st.lists(_PART, max_size=8), absolute=st.booleans())
def test_no_name_leads_out(parts: list[str], absolute: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder).resolve()
        root = base / "models"
        (root / "org" / "name").mkdir(parents=True)
        (base / "secret").mkdir()
        for file in (root / "a.gguf", base / "secret" / "key", base / "a.gguf"):
            file.write_bytes(b"x")
        (root / "out").symlink_to(base / "secret")
        (root / "org" / "up").symlink_to("../..")
        name = "/".join(parts)
        found = Roots([str(root)]).locate(f"{root}/{name}" if absolute else name)
        if found is not None:
            assert is_below(os.path.realpath(found), str(root))
            assert is_below(found, str(root))
            assert os.path.normpath(found) == found
