"""What the command line says over the configuration file, now and after every reload."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.config.schema import Config

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Overrides:
    """None: the file decides."""

    host: str | None = None
    port: int | None = None
    insecure: bool = False
    state_dir: str | None = None
    log_level: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Overrides:
        return cls(args.host, args.port, args.insecure, args.state_dir, args.log_level)

    def applied(self, config: Config) -> Config:
        from greenroom.config.schema import LogLevel

        server: dict[str, Any] = {"host": self.host, "port": self.port, "insecure": self.insecure or None}
        log = {"level": LogLevel(self.log_level)} if self.log_level else {}
        top: dict[str, Any] = {
            "server": config.server.model_copy(update=_said(server)),
            "log": config.log.model_copy(update=log),
            "state_dir": self.state_dir,
        }
        return config.model_copy(update=_said(top))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, or the file's)")
    parser.add_argument(
        "--port", type=_port, help="port to listen on; 0 takes a free one (default: 8210, or the file's)"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="allow an address that others can reach without any API key"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="where the gateway keeps its lock; one gateway a directory")
    parser.add_argument("--log-level", choices=LEVELS, help="how much is logged (LOG_LEVEL wins)")


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text} is not a port: 0 to 65535")
    return int(text)
