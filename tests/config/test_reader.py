"""What YAML means here, and what is refused before any key is looked at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from greenroom.config import reader
from greenroom.config.reader import plain, read
from greenroom.errors import ConfigError


def complaint(path: Path, parser: reader.Parser = reader.FASTEST) -> str:
    with pytest.raises(ConfigError) as refused:
        read(path, parser)
    return refused.value.message.replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "my.yaml: is empty; give models, or at least one other key"),
        (" \n\n  \n", "my.yaml: is empty; give models, or at least one other key"),
        ("# only a comment\n", "my.yaml: is empty; give models, or at least one other key"),
        ("{}\n", "my.yaml: says nothing; give models, or at least one other key"),
        ("\n- a\n- b\n", "my.yaml:2: must be a mapping with keys such as server and models"),
        ("just words", "my.yaml:1: must be a mapping with keys such as server and models"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2: is not YAML: "),
        ("a: 1\nb: ]\n", "my.yaml:2: is not YAML: "),
        ("a: 1\nb: *gone\n", "my.yaml:2: is not YAML: "),
        ("a:\n\tb: 1\n", "my.yaml:2: is not YAML: the line begins with a tab; indent it with spaces"),
        ("a:\n  b: 1\n \tc: 2\n", "my.yaml:3: is not YAML: the line begins with a tab; indent it with spaces"),
        ("a: 1\nb: x\x07y\n", "my.yaml:2: holds the control character U+0007"),
        ("a: 1\nb: !!python/object:os.system x\n", "my.yaml:2: has the tag "),
        ("a: !!str 5\n", "my.yaml:1: has the tag "),
        ("a: " + "[" * 40 + "]" * 40, "my.yaml:1: is nested more than 32 deep"),
        ("a: " + "[" * 100_000, "my.yaml:1: is nested more than 32 deep"),
        ("a: &a [*a]\n", "my.yaml:1: repeats itself through aliases beyond all bounds"),
    ],
)
def test_what_is_no_single_mapping_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text, encoding="utf-8")
    assert complaint(file).startswith(told)


def huge() -> bytes:
    """A small file that means a huge one."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    return "\n".join(rows).encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: 1\nb: [1,\nc: 2\n", "(while parsing a flow sequence, begun on line 2)"),
        (b"a: 1\nb: \xff\n", "my.yaml:2: is not UTF-8 text"),
        (huge(), "repeats itself through aliases beyond all bounds"),
        (b"a: [" + b"1," * (reader.VALUES_MAX + 10) + b"]", "my.yaml:1: holds more than 200,000 values"),
    ],
    ids=["bracket", "utf8", "huge", "values"],
)
def test_what_cannot_be_read_as_a_whole_is_refused_with_its_line(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "my.yaml").write_bytes(content)
    assert complaint(tmp_path / "my.yaml").endswith(told)


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    assert complaint(file) == "my.yaml: cannot be read: No such file or directory"
    assert "cannot be read" in complaint(tmp_path / "my\0.yaml")
    os.mkfifo(file)
    assert complaint(file) == "my.yaml: is not a plain file"
    # A link to itself is unreadable for every user, root included.
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert complaint(tmp_path / "loop.yaml").startswith("loop.yaml: cannot be read: ")


def test_directory_is_refused(tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    assert complaint(tmp_path) == f"{tmp_path.name}: is a directory; name the file in it"
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_file_larger_than_the_limit_is_refused_and_one_at_the_limit_is_not(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(b"a: 1\n".ljust(reader.FILE_BYTES_MAX, b"#")[: reader.FILE_BYTES_MAX])
    assert read(file).tree == {"a": 1}
    file.write_bytes(b"a: 1\n".ljust(reader.FILE_BYTES_MAX + 1, b"#"))
    assert complaint(file) == "my.yaml: is larger than 4 MiB"


def test_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(tmp_path / "my.yaml").tree == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("off", "off"),
        ("no", "no"),
        ("y", "y"),
        ("True", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("7", 7),
        ("-7", -7),
        ("10_000", 10_000),
        ("007", 7),
        ("0x1F", 31),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 19, "9" * 19),
        ("9" * 5000, "9" * 5000),
        ("0x" + "f" * 16, "0x" + "f" * 16),
        ("1.2.3", "1.2.3"),
        ("0" * 64, "0" * 64),
        ("1e" + "0" * 62, "1e" + "0" * 62),
    ],
)
def test_unquoted_text_means(text: str, value: object) -> None:
    assert plain(text) == value
    assert type(plain(text)) is type(value)


def test_quoted_text_stays_text_and_keys_are_always_text(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("3.10: '5'\n'true': \"true\"\n\"null\": |\n  7\n")
    source = read(tmp_path / "my.yaml")
    assert source.tree == {"3.10": "5", "true": "true", "null": "7\n"}
    assert source.problems == ()


@pytest.mark.parametrize("key", ["null:", "~:", "true:", "False:", "?\n  :"])
@pytest.mark.parametrize("parser", [yaml.SafeLoader, reader.FASTEST])
def test_a_word_that_is_no_text_is_no_key(key: str, parser: reader.Parser, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(f"tenants:\n  lab: {{}}\n  {key} {{}}\n")
    source = read(tmp_path / "my.yaml", parser)
    (problem,) = source.problems
    assert (problem.where, problem.line) == (("tenants",), 3)
    word = "nothing" if "?" in key else key[:-1]
    assert problem.message == f"{word} stands for a key; put it in quotes if that is its name"
    assert source.tree == {"tenants": {"lab": {}}}


def test_every_value_has_the_line_of_its_key(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("a:\n  b:\n    - 1\n\n    - c: 2\n")
    lines = read(tmp_path / "my.yaml").lines
    assert lines == {(): 1, ("a",): 1, ("a", "b"): 2, ("a", "b", 0): 3, ("a", "b", 1): 5, ("a", "b", 1, "c"): 5}


def test_repeated_keys_are_all_told_with_both_lines(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("a: 1\nb: {c: 1,\n c: 2}\na: 2\na: 3\n")
    source = read(tmp_path / "my.yaml")
    assert [(problem.where, problem.message, problem.line) for problem in source.problems] == [
        (("b", "c"), "is given twice, first on line 2", 3),
        (("a",), "is given twice, first on line 1", 4),
        (("a",), "is given twice, first on line 1", 5),
    ]


@pytest.mark.parametrize(
    ("text", "told", "line"),
    [
        ("a: 1\n? [b]\n: 2\n", "a key must be text, not a list or a mapping", 2),
        ("a:\n  <<: 5\n", "must name a mapping, such as <<: *defaults", 2),
        ('a: "x\\0y"\n', "may not contain a NUL character", None),
    ],
)
def test_what_may_not_stand_there_is_told(tmp_path: Path, text: str, told: str, line: int | None) -> None:
    (tmp_path / "my.yaml").write_text(text)
    (problem,) = read(tmp_path / "my.yaml").problems
    assert (problem.message, problem.line) == (told, line)


def test_merged_mapping_gives_its_keys_and_own_keys_win(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("a: &a\n  x: 1\n  y: 2\nb:\n  y: 3\n  <<: *a\nc: {<<: [{y: 4}, *a]}\n")
    source = read(tmp_path / "my.yaml")
    assert source.tree["b"] == {"y": 3, "x": 1}
    assert source.tree["c"] == {"y": 4, "x": 1}
    assert not source.problems
    # A complaint about a merged key points at the line where it is written.
    assert (source.lines["b", "x"], source.lines["b", "y"]) == (2, 5)


def test_parser_without_the_c_extension_reads_the_same(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("a: [on, 7, '7', null]\nb: {<<: {c: 1.5}, d: x}\n")
    assert read(file, yaml.SafeLoader) == read(file)
    file.write_text("a: " + "[" * 5_000)
    assert complaint(file, yaml.SafeLoader) == "my.yaml:1: is nested more than 32 deep"
    file.write_text('a: "\\ud800"\n')
    assert [problem.message for problem in read(file, yaml.SafeLoader).problems] == [
        "holds half of a surrogate pair, which is no character"
    ]
