"""Providers of remote models: what may be said of them, that no key is ever in a message, and what a reload changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from greenroom.config.diff import diff
from greenroom.config.loader import load
from greenroom.config.schema import Config, Model, Remote
from greenroom.config.sections.remotes import read_remote_key
from greenroom.errors import ConfigError

SECRET = "sk-123-very-secret"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, "base_url is needed"),
        ({"provider": "openai"}, "provider openai needs api_key_env or api_key_file"),
        ({"provider": "openai", "api_key_env": "A", "api_key_file": "a"}, "not both"),
        ({"base_url": "http://models.lan/v1", "api_key_env": "A"}, "without encryption"),
        ({"base_url": "http://models.lan/v1", "ca_file": "a"}, "https only"),
        ({"base_url": "https://models.lan/v1", "budget_per_day": 5}, "is needed for budget_per_day"),
        *(
            ({"base_url": address}, "https://HOST")
            for address in (
                "models.lan",
                "ftp://models.lan",
                f"https://me:{SECRET}@models.lan/v1",
                f"https://models.lan/v1?key={SECRET}",
                "https://models.lan/v1#a",
                "https://models.lan/v 1",
                "https://models.lan:99999/v1",
                "https://models.lan:0/v1",
                "https:///v1",
                f"https://{'a' * 64}.lan/v1",
                "https://models..lan/v1",
                "https://modèles.lan",
            )
        ),
        ({"provider": "openai", "api_key_env": SECRET}, "api_key_env"),
    ],
)
def test_a_provider_that_cannot_be_used_is_refused(keys: dict[str, str], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Remote.model_validate(keys)
    problems = refused.value.errors()
    words = str([(problem["loc"], problem["msg"], problem.get("ctx")) for problem in problems])
    assert told.replace("base_url is", "is") in words and (SECRET not in words or keys.get("api_key_env") == SECRET)


def test_addresses_that_are_taken() -> None:
    assert Remote(provider="anthropic", api_key_env="A").address.geturl() == "https://api.anthropic.com/v1"
    assert Remote(provider="openai", api_key_env="A").address.hostname == "api.openai.com"
    for address in ("https://[::1]:8443/openai/v1/", "http://127.0.0.1:9/v1", "http://localhost/v1"):
        assert Remote(base_url=address, api_key_env="A").base_url == address
    assert Remote(base_url="http://models.lan/v1").has_key is False


def test_a_key_in_the_place_of_its_name_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"remotes: {{acme: {{provider: openai, api_key_env: {SECRET}}}}}\n")
    with pytest.raises(ConfigError, match="not the key itself") as refused:
        load(file, {})
    assert SECRET not in str(refused.value)


def test_what_is_missing_is_a_warning_and_files_start_at_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "remotes:\n"
        "  a: {provider: openai, api_key_env: NOT_THERE_AT_ALL}\n"
        "  b: {base_url: 'https://models.lan', api_key_file: secret, ca_file: ca.pem}\n"
        "  c: {base_url: 'https://models.lan'}\n"
    )
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o644)
    first, second, third = load(file, {}).warnings
    assert first == "remotes.a: there is no environment variable NOT_THERE_AT_ALL"
    assert second.startswith(f"remotes.b: the file {tmp_path}/secret can be read or changed by other users")
    assert third == f"remotes.b: ca_file: there is no file {tmp_path}/ca.pem"


def test_a_key_is_read_from_its_place_and_must_be_one(tmp_path: Path) -> None:
    of_env = Remote(provider="openai", api_key_env="A")
    assert read_remote_key(of_env, {"A": f" {SECRET}\n"}) == SECRET
    assert read_remote_key(Remote(base_url="https://a"), {}) is None
    file = tmp_path / "secret"
    of_file = Remote(provider="openai", api_key_file=str(file))
    with pytest.raises(ValueError, match="there is no file"):
        read_remote_key(of_file)
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_remote_key(of_file) == SECRET
    for wrong in ("", "\n", f"{SECRET} {SECRET}", f"{SECRET}\r\nx: y", "clé"):
        file.write_bytes(wrong.encode())
        with pytest.raises(ValueError, match="has no key") as refused:
            read_remote_key(of_file)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"engine": "remote"}, "needs remote"),
        ({"remote": "a", "memory_mib": 5}, "is for models that run here"),
        ({"remote": "a", "pinned": True}, "is for models that run here"),
        ({"remote": "a", "path": "a.gguf"}, "remote is for engine remote"),
        ({"remote": "a", "engine": "remote", "path": "a.gguf"}, "path is for engine"),
    ],
)
def test_keys_that_make_no_sense_for_a_remote_model_are_refused(keys: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Model.model_validate(keys)


def test_a_remote_model_names_a_provider_that_is_there() -> None:
    acme = Remote(base_url="https://a")
    config = Config(remotes={"acme": acme}, models={"m": Model(remote="acme")})
    assert config.models["m"].engine == "remote"
    with pytest.raises(ValidationError, match="there is no acne in remotes; there are: acme"):
        Config(remotes={"acme": acme}, models={"m": Model(remote="acne")})
    with pytest.raises(ValidationError):
        Config(remotes={"Acme:": acme})


def test_a_changed_provider_gives_its_models_new_slots() -> None:
    models = {"m": Model(remote="acme"), "n": Model(remote="other"), "o": Model(path="a.gguf")}
    remotes = {"acme": Remote(base_url="https://a"), "other": Remote(base_url="https://a")}
    old = Config(remotes=remotes, models=models)
    changes = diff(old, Config(remotes={**remotes, "acme": Remote(base_url="https://b")}, models=models))
    assert (changes.changed, changes.at_once) == (("m",), ("remotes",))
    assert diff(old, Config(remotes=remotes, models=models)).is_empty
