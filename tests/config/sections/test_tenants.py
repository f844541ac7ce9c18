"""Limits of tenants, keys and models in the file, and those that the environment names."""

from __future__ import annotations

import pytest

from greenroom.config.schema import Config, RateLimits, TenantLimits
from greenroom.errors import ConfigError
from tests.config.conftest import Complaints, Loads


def per_minute(config: Config) -> dict[str, int | None]:
    return {name: limits.requests_per_minute for name, limits in config.tenants.items()}


def test_limits_are_read_for_tenants_keys_and_models(loads: Loads) -> None:
    config = loads("""
        tenants:
          default: {requests_per_minute: 50}
          lab: {tokens_per_minute: 9000, concurrent_max: 4, queue_depth_max: 7}
        server: {api_keys: [{name: k, key: secret, limits: {concurrent_max: 2}}]}
        models: {m: {path: m.gguf, limits: {requests_per_minute: 3}}}
        limits: {store: "redis://localhost:6379/1"}
    """)
    assert config.tenants["default"] == TenantLimits(requests_per_minute=50)
    assert config.tenants["lab"] == TenantLimits(tokens_per_minute=9000, concurrent_max=4, queue_depth_max=7)
    assert config.server.api_keys[0].limits == RateLimits(concurrent_max=2)
    assert config.models["m"].limits == RateLimits(requests_per_minute=3)


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {lab: {requests_per_minute: 0}}",
        "tenants: {lab: {requests_per_minute: true}}",
        "tenants: {lab: {per_minute: 5}}",
        'tenants: {"": {requests_per_minute: 5}}',
        "limits: {store: http://localhost}",
        "models: {m: {path: m.gguf, limits: {queue_depth_max: 5}}}",
    ],
)
def test_wrong_limits_are_refused(loads: Loads, text: str) -> None:
    with pytest.raises(ConfigError):
        loads(text)


def test_the_environment_wins_over_the_file_and_keeps_the_rest_of_it(loads: Loads) -> None:
    environ = {"TENANT_RATE_LIMIT_lab": "100req/min", "TENANT_RATE_LIMIT_community-x": " 7 REQ / min "}
    config = loads("tenants: {lab: {requests_per_minute: 5, concurrent_max: 2}, other: {concurrent_max: 1}}", environ)
    assert per_minute(config) == {"lab": 100, "other": None, "community-x": 7}
    assert config.tenants["lab"].concurrent_max == 2


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({}, None),
        ({"DEFAULT_RATE_LIMIT": "100req/min"}, 100),
        ({"TENANT_RATE_LIMIT_default": "50req/min"}, 50),
        ({"TENANT_RATE_LIMIT_default": "50req/min", "DEFAULT_RATE_LIMIT": "100req/min"}, 50),
        ({"TENANT_RATE_LIMIT_default": "", "DEFAULT_RATE_LIMIT": ""}, None),
        ({"TENANT_RATE_LIMIT_default": "", "DEFAULT_RATE_LIMIT": "100"}, 100),
    ],
)
def test_the_tenants_default_wins_over_the_general_default(
    loads: Loads, environ: dict[str, str], limit: int | None
) -> None:
    tenants = loads("log: {}", environ).tenants
    assert tenants.get("default", TenantLimits()).requests_per_minute == limit


@pytest.mark.parametrize("value", ["fast", "0req/min", "-5", "1.5", "100req/s", "99999999999"])
def test_a_wrong_variable_is_refused_by_its_name(loads: Loads, value: str) -> None:
    with pytest.raises(ConfigError, match="TENANT_RATE_LIMIT_lab"):
        loads("log: {}", {"TENANT_RATE_LIMIT_lab": value})


def test_variable_whose_tenant_cannot_be_is_named(loads: Loads) -> None:
    with pytest.raises(ConfigError, match=r"^the environment variable TENANT_RATE_LIMIT_a\tb \(tenants"):
        loads("log: {}", {"TENANT_RATE_LIMIT_a\tb": "5req/min"})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('tenants:\n  " lab": {requests_per_minute: 5}', 'my.yaml:2: tenants." lab"'),
        ('scheduler:\n  tenant_weights:\n    "lab ": 2', 'my.yaml:3: scheduler.tenant_weights."lab "'),
        ('server:\n  api_keys:\n    - {name: " k", key: a}', "my.yaml:3: server.api_keys[0].name"),
        ('server:\n  api_keys:\n    - {name: k, tenant: "lab ", key: a}', "my.yaml:3: server.api_keys[0].tenant"),
        ('profiles:\n  p:\n    tenants: ["lab "]', "my.yaml:3: profiles.p.tenants[0]"),
        ('profiles:\n  p:\n    keys: [" k"]', "my.yaml:3: profiles.p.keys[0]"),
        (f'governance:\n  signers:\n    " me": "{"1" * 64}"', 'my.yaml:3: governance.signers." me"'),
    ],
)
def test_name_with_a_space_around_it_is_no_second_name(complaints: Complaints, text: str, where: str) -> None:
    assert complaints(text) == [f"{where}: may not begin or end with a space"]


@pytest.mark.parametrize("name", ["\\tlab", "lab\\u00a0", "l\\u200bab", "lab\\x7f"])
def test_name_has_no_invisible_characters(complaints: Complaints, name: str) -> None:
    (tenant,) = complaints(f'tenants: {{"{name}": {{requests_per_minute: 5}}}}')
    (pattern,) = complaints(f'profiles: {{p: {{tenants: ["{name}"]}}}}')
    assert tenant.endswith(told := "may not contain control or invisible characters")
    assert pattern.endswith(told)


def test_variable_whose_tenant_has_a_space_around_it_is_named(complaints: Complaints) -> None:
    (told,) = complaints("log: {}", {"TENANT_RATE_LIMIT_lab ": "5req/min"})
    assert told.startswith("the environment variable TENANT_RATE_LIMIT_lab  (tenants")
    assert told.endswith("may not begin or end with a space")


def test_a_variable_without_a_tenant_is_refused(loads: Loads) -> None:
    with pytest.raises(ConfigError, match="TENANT_RATE_LIMIT_ "):
        loads("log: {}", {"TENANT_RATE_LIMIT_": "5req/min"})
