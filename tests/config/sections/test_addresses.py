"""Addresses by which callers reach the server: those that can never match, or lead elsewhere, are refused."""

from __future__ import annotations

import json

import pytest

from greenroom.errors import ConfigError
from tests.config.conftest import Loads


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        *(
            ("allowed_hosts", value, told)
            for told, values in {
                '"*" alone allows every host': ["*.example.org", "models.*", "**"],
                "a host is named alone": ["https://a.example", "a.example:8443", "a.example/x", "127.0.0.1:80"],
                "is no name or address": ["", " a.example", "a..b", "-a.lan", "a_b-.lan", "a b", "modèles.lan", "a@b"],
                "is no address of a host": ["192.168.1.300", "10.1", "10.0.0.1.2", "8210", "256.256.256.256."],
                "is every address": ["0.0.0.0", "::", "[::]"],
                "names a network interface": ["fe80::1%eth0"],
            }.items()
            for value in values
        ),
        *(
            ("public_url", value, told)
            for told, values in {
                "is http:// or https://": ["", "a.example", "//a.example", "ftp://a", "javascript://a", "https://"],
                "its host is no name": [
                    "https:///x",
                    "https://a..b",
                    "https://a b",
                    "https://-a",
                    "https://[::1",
                    "http://:80",
                ],
                "its host is every address": ["http://0.0.0.0:8210", "http://[::]"],
                "has a port": ["https://a:0", "https://a:99999", "https://a:", "https://a:x", "https://a:٣"],
                "may hold no name or password": ["https://user:secret@a", "https://a@b"],
                "needs [ ]": ["http://::1/x"],
                "may hold no *": ["https://*.example.org", "https://*"],
                "its path has plain parts alone": [
                    "https://a/../b",
                    "https://a/.",
                    "https://a//b",
                    "https://a/b?c",
                    "https://a?c",
                    "https://a/#b",
                    "https://a#b",
                    "https://a/%2e%2e",
                    "https://a/b\\c",
                    "https://a/b c",
                    "https://a/b\nc",
                ],
            }.items()
            for value in values
        ),
        *(
            ("allowed_origins", value, told)
            for told, values in {
                "an origin is a scheme and a host": [
                    "",
                    "a.example",
                    "https://a/x",
                    "https://a?x",
                    "1a://b",
                    "https://",
                ],
                '"*" alone allows every origin': ["https://*.example.org", "https://*"],
                "its host is no name": ["https://a..b"],
                "has a port": ["https://a:0"],
                "may hold no name": ["https://a@b"],
            }.items()
            for value in values
        ),
    ],
)
def test_addresses_that_can_never_match_or_mislead_are_refused(loads: Loads, key: str, value: str, told: str) -> None:
    said = value if key == "public_url" else [value]
    with pytest.raises(ConfigError) as refused:
        loads(json.dumps({"server": {key: said}}))
    assert f"server.{key}" in refused.value.message and told in refused.value.message
    assert "Value error" not in refused.value.message and "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (
            "allowed_hosts",
            ["*", "a", "A.Example", "a.example.", "my_host", "10.0.0.1", "::1", "[fd00::2]", "xn--bcher-kva.example"],
        ),
        (
            "public_url",
            [
                "http://a",
                "https://a.example/",
                "https://a.example:8443/ai/v1",
                "http://[::1]:8210",
                "http://10.0.0.1/~x",
            ],
        ),
        (
            "allowed_origins",
            ["*", "null", "https://a.example", "http://a:3000/", "http://[::1]:3", "tauri://localhost"],
        ),
    ],
)
def test_addresses_that_callers_use_are_taken_as_they_are(loads: Loads, key: str, values: list[str]) -> None:
    for value in values:
        said = value if key == "public_url" else [value]
        taken = getattr(loads(json.dumps({"server": {key: said}})).server, key)
        assert taken == (value if key == "public_url" else (value,))
