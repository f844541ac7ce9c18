"""The steps that all parts of a gateway take together: what one of them refuses, none of them does."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from greenroom.app import App
from greenroom.config import loader
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from tests.harness import fake, gateway, write_config
from tests.integration.raw import chat


class Refusing(Part):
    """The last that is asked: all others have drafted what they would do."""

    async def draft(self, new: Config, changes: Changes) -> Apply:
        raise ConfigError("not this one")


async def test_a_configuration_that_one_part_refuses_changes_no_other(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        path, before, parts = tmp_path / "greenroom.yaml", app.config, app.parts
        said = yaml.safe_load(path.read_text())
        said["models"]["b"], said["server"]["api_keys"] = fake("b"), [{"name": "me", "key": "secret"}]
        path.write_text(yaml.safe_dump(said))
        app.parts = (*parts, Refusing())
        with pytest.raises(ConfigError, match="not this one"):
            await app.reload()
        assert app.config is before and app.catalog.find("b") is None
        assert (await chat(app, "nowhere")).status == 404, "no key is asked for"
        app.parts = parts
        await app.reload()
        assert app.catalog.find("b") is not None
        assert (await chat(app, "nowhere")).status == 401


async def test_a_part_that_does_not_open_leaves_none_open(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = write_config(tmp_path, {"a": fake("a")}, server={"port": port, "record_events": str(tmp_path)})
    with pytest.raises(OSError):
        await App.start(loader.load(path).config, path)
    with socket.create_server(("127.0.0.1", port)):
        pass
    # The state directory is free, too.
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        assert (await chat(app, "nowhere")).status == 404
