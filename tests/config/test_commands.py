"""How a command becomes words."""

from __future__ import annotations

import pytest

from greenroom.config.kinds import words


@pytest.mark.parametrize(
    ("command", "split"),
    [
        ("a b  c", ("a", "b", "c")),
        ("a 'b c' \"d e\" f\\ g", ("a", "b c", "d e", "f g")),
        ("a \\\n  --b c\n  --d e", ("a", "--b", "c", "--d", "e")),
        ("a\n# a remark's quote\n  # another\n--b #c", ("a", "--b", "#c")),
        ("a ; rm -rf $HOME | b `c` > d", ("a", ";", "rm", "-rf", "$HOME", "|", "b", "`c`", ">", "d")),
        ("a --port ${PORT}", ("a", "--port", "${PORT}")),
        ("", ()),
        (("a b", "", "c'"), ("a b", "", "c'")),
    ],
)
def test_command_becomes_words(command: str | tuple[str, ...], split: tuple[str, ...]) -> None:
    assert words(command) == split


def test_open_quote_is_an_error() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        words("a 'b")
