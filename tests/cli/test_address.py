from __future__ import annotations

from argparse import Namespace

import pytest

from greenroom.cli.address import DEFAULT_URL, address_of, parse
from greenroom.cli.failures import WrongUsage


@pytest.mark.parametrize(
    ("url", "shown", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8210", "http://127.0.0.1:8210", "127.0.0.1", 8210, ""),
        ("http://127.0.0.1:8210/", "http://127.0.0.1:8210", "127.0.0.1", 8210, ""),
        ("http://127.0.0.1:8210/v1", "http://127.0.0.1:8210", "127.0.0.1", 8210, ""),
        ("box:9000", "http://box:9000", "box", 9000, ""),
        ("http://[::1]:8210", "http://[::1]:8210", "::1", 8210, ""),
        ("https://models.example.org", "https://models.example.org", "models.example.org", 443, ""),
        ("https://example.org/llm/", "https://example.org/llm", "example.org", 443, "/llm"),
    ],
)
def test_an_address_is_read_as_people_write_it(url: str, shown: str, host: str, port: int, prefix: str) -> None:
    address = parse(url)
    assert (address.url, address.host, address.port, address.prefix) == (shown, host, port, prefix)


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://a b", "http://x\n.y"]
)
def test_what_is_no_address_is_wrong_usage(url: str) -> None:
    with pytest.raises(WrongUsage):
        parse(url or "http://")


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(WrongUsage) as refused:
        parse("http://me:hunter2@box:8210")
    assert "hunter2" not in refused.value.message


def test_the_option_wins_over_the_environment_and_that_over_the_default() -> None:
    plain = Namespace(url=None, api_key_env=None)
    assert address_of(plain, {}).url == DEFAULT_URL
    assert address_of(plain, {"GREENROOM_URL": "http://a:1"}).url == "http://a:1"
    assert (
        address_of(Namespace(url="http://b:2", api_key_env=None), {"GREENROOM_URL": "http://a:1"}).url == "http://b:2"
    )


def test_the_key_comes_from_the_environment_only() -> None:
    environ = {"GREENROOM_API_KEY": "one", "OTHER": " two \n"}
    assert address_of(Namespace(url=None, api_key_env=None), environ).key == "one"
    assert address_of(Namespace(url=None, api_key_env="OTHER"), environ).key == "two"
    assert address_of(Namespace(url=None, api_key_env=None), {}).key is None


def test_a_named_variable_that_is_not_set_is_wrong_usage() -> None:
    with pytest.raises(WrongUsage, match="MISSING is not set"):
        address_of(Namespace(url=None, api_key_env="MISSING"), {})


@pytest.mark.parametrize("key", ["a\r\nHost: evil", "schlüssel", "two words"])
def test_a_key_that_could_not_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(WrongUsage) as refused:
        address_of(Namespace(url=None, api_key_env=None), {"GREENROOM_API_KEY": key})
    assert key not in refused.value.message


def test_the_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(parse("http://x:1", "secret"))
