"""The address of the gateway that a command talks to, and the API key it sends. Owns the options `--url` and
`--api-key-env` and their environment variables. Never connects."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from greenroom.base.plain_file import read_plain, why
from greenroom.cli.failures import WrongUsage

URL_NAME = "GREENROOM_URL"
KEY_NAME = "GREENROOM_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8210"
TOKEN_CHARS_MAX = 32 * 1024


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """`url` is for messages; `prefix` goes before every path."""

    url: str
    scheme: str
    host: str
    port: int
    prefix: str
    key: str | None = field(default=None, repr=False)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def add_options(parser: argparse.ArgumentParser, *, json_help: str | None = None) -> None:
    """Add the options of every command that talks to a gateway."""
    parser.add_argument("--url", help=f"the gateway's address (default: ${URL_NAME} or {DEFAULT_URL})")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help=f"environment variable that holds the API key (default: {KEY_NAME})"
    )
    if json_help is not None:
        parser.add_argument("--json", action="store_true", help=json_help)


def add_token_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of every command that changes models or the configuration."""
    parser.add_argument(
        "--token", metavar="FILE", help="a token that permits it, where operations are signed; - for standard input"
    )


def token_of(args: argparse.Namespace) -> str | None:
    """The token that --token names, as text for a header. Raises WrongUsage."""
    text = None if args.token is None else read_token(args.token)
    if text is not None and (not text.isprintable() or " " in text or text.startswith("{")):
        raise WrongUsage(f"{args.token} holds no token as text; `greenroom token sign` without --json makes one")
    return text


def read_token(path: str) -> str:
    """The token in a file, or on standard input for `-`. Raises WrongUsage."""
    try:
        text = sys.stdin.read(TOKEN_CHARS_MAX) if path == "-" else read_plain(path, TOKEN_CHARS_MAX).decode()
    except (OSError, ValueError) as error:
        raise WrongUsage(f"{path} cannot be read: {why(error)}") from None
    text = text.strip()
    if not text or not text.isascii():
        raise WrongUsage(f"{path} holds no token; `greenroom token sign` makes one")
    return text


def address_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> GatewayAddress:
    """The gateway that the arguments and the environment name. Raises WrongUsage."""
    return parse(args.url or environ.get(URL_NAME) or DEFAULT_URL, _key(args.api_key_env, environ))


def parse(url: str, key: str | None = None) -> GatewayAddress:
    """Read an address such as `http://127.0.0.1:8210`, `box:8210` or `https://models.example.org/llm`."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as reason:
        raise WrongUsage(f"{url} is not an address: {reason}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise WrongUsage(f"{url!r} is not an address; write it like {DEFAULT_URL}")
    if "@" in parts.netloc:
        raise WrongUsage(f"an address holds no name and password; put the key into {KEY_NAME}")
    # OpenAI's clients want an address that ends in /v1; people will give the same one here.
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return GatewayAddress(f"{parts.scheme}://{parts.netloc}{prefix}", parts.scheme, parts.hostname, port, prefix, key)


def _key(name: str | None, environ: Mapping[str, str]) -> str | None:
    if name is not None and not environ.get(name):
        raise WrongUsage(f"the environment variable {name} is not set")
    key = environ.get(name or KEY_NAME, "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise WrongUsage(f"the key in {name or KEY_NAME} has characters that no key has")
    return key
