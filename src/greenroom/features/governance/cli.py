"""`greenroom token` makes keys, signs tokens for operations and checks them; `greenroom audit` checks the audit log.
Both work without a gateway: keys stay where their holders are. `token` prints the token as text, for `--token`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus, WrongUsage

if TYPE_CHECKING:
    from greenroom.features.governance.tokens import Presented


# Those of the configuration, whose schema is too slow to import for a list of commands.
OPERATIONS: Final = (
    *("model-load", "model-unload", "cache-flush", "model-update", "model-download", "model-delete", "config-reload"),
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for add in (_add_keygen, _add_sign, _add_cosign, _add_verify):
        add(commands)


def _sub(commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


TOKEN = Subcommand("token", "Sign operations: make keys and tokens, add signatures, check.", _add_options)


# --- keys -------------------------------------------------------------------------------------------------------------


def _add_keygen(commands: Any) -> None:
    about = "Make a key: a signer's own (Ed25519), or with --shared the secret of tokens by HMAC."
    parser = _sub(commands, "keygen", about, _keygen)
    parser.add_argument("file", metavar="FILE", help="where the key is written; must not exist")
    parser.add_argument("--signer", default="alice", metavar="NAME", help="the signer's name (default: alice)")
    parser.add_argument("--shared", action="store_true", help="a shared key for governance.key_path")


def _keygen(args: argparse.Namespace) -> None:
    from greenroom.features.governance import signing
    from greenroom.features.governance.keyset import key_id, read_shared_key

    try:
        public = None if args.shared else signing.new_private_key(args.file)
        if args.shared:
            signing.new_shared_key(args.file)
    except OSError as error:
        raise CommandFailed(f"{args.file} cannot be written: {error.strerror or error}") from None
    id = key_id(read_shared_key(args.file) if public is None else bytes.fromhex(public))
    if public is None:
        screen.say(f"governance:\n  key_path: {args.file}")
    else:
        screen.say(f"governance:\n  signers:\n    {args.signer}: {public}")
    screen.hint(f"\n{args.file} holds the secret; the lines above are for the configuration")
    screen.hint(f"its id is {id}; `greenroom check` shows it too")


# --- signing ----------------------------------------------------------------------------------------------------------


def _add_sign(commands: Any) -> None:
    parser = _sub(commands, "sign", "Sign one operation, and print its token.", _sign)
    parser.add_argument("operation", choices=OPERATIONS, metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument("model", nargs="?", help="as the call names it; none where it names none")
    parser.add_argument("--body", metavar="JSON", help='the call\'s fields, such as \'{"evict":["x"]}\' (default: {})')
    parser.add_argument("--no-body", action="store_true", help="bind no body; only for a shared key")
    parser.add_argument(
        "--signers", metavar="NAMES", help="all that will sign, separated by commas (default: the signer)"
    )
    parser.add_argument("--nonce", help="a text that is used once (default: made up)")
    parser.add_argument("--issued-at", type=int, metavar="S", help="seconds since 1970 (default: now)")
    _add_key_options(parser)


def _add_key_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", required=True, metavar="FILE", help="the signer's private key, or the shared key")
    parser.add_argument("--signer", default="alice", metavar="NAME", help="the signer's name (default: alice)")
    parser.add_argument("--json", action="store_true", help="print the token as JSON, for the field of a body")


def _sign(args: argparse.Namespace) -> None:
    from greenroom.features.governance import signing, tokens
    from greenroom.features.governance.canonical_json import sha256_of
    from greenroom.features.governance.keyset import read_shared_key

    signers = tuple(args.signers.split(",")) if args.signers else (args.signer,)
    body = None if args.no_body else sha256_of(_body(args.body))
    issued_at = int(time.time()) if args.issued_at is None else args.issued_at
    fields = tokens.unsigned(args.operation, args.model, issued_at, signers, args.nonce or signing.new_nonce(), body)
    if signing.is_private_key(args.key):
        if body is None or args.signer not in signers:
            raise WrongUsage("a signer's own key binds the body, and --signers names the signer too")
        _say(signing.by_signer(fields, args.signer, signing.read_private_key(args.key)), args.json)
        return
    _say(signing.by_shared_key(fields, read_shared_key(args.key)), args.json)


def _add_cosign(commands: Any) -> None:
    parser = _sub(commands, "cosign", "Add a signature to a token that names its signer, and print it.", _cosign)
    parser.add_argument("token", metavar="FILE", help="the token; - for standard input")
    _add_key_options(parser)


def _cosign(args: argparse.Namespace) -> None:
    from greenroom.features.governance import signing

    value = _presented(args).value
    if not isinstance(value, Mapping):
        raise WrongUsage("a JWT has one signature")
    _say(signing.cosigned(value, args.signer, signing.read_private_key(args.key)), args.json)


def _body(text: str | None) -> dict[str, Any]:
    from greenroom.features.governance.canonical_json import NotCanonical, canonical, read

    try:
        value = {} if text is None else read(text.encode("utf-8", "replace"))
        canonical(value)
    except NotCanonical as error:
        raise WrongUsage(f"--body: {error}") from None
    if not isinstance(value, dict):
        raise WrongUsage("--body must be an object")
    value.pop("verifiedOpToken", None)
    return value


def _say(token: Mapping[str, Any], as_json: bool) -> None:
    from greenroom.features.governance.tokens import as_text

    if as_json:
        screen.say_json(token)
    else:
        screen.say(as_text(token))


# --- looking ----------------------------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    parser = _sub(commands, "verify", "Show what a token says, and check its signatures by a configuration.", _verify)
    parser.add_argument("token", metavar="FILE", help="the token; - for standard input")
    parser.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    parser.add_argument("--body", metavar="JSON", help="the call's fields, to compare with the token's hash")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _verify(args: argparse.Namespace) -> None:
    from greenroom.config import loader
    from greenroom.features.governance.canonical_json import sha256_of
    from greenroom.features.governance.keyset import load_keys

    section = loader.load(loader.find(args.config)).config.governance
    presented = _presented(args)
    token = presented.token
    proven = sorted(load_keys(section).proven(presented))
    if args.body is not None and token.body_sha256 != sha256_of(_body(args.body)):
        raise CommandFailed("the token was signed for another body")
    left_s = round(token.issued_at + section.window_s - time.time())
    if args.json:
        screen.say_json({"operation": token.operation, "modelId": token.model, "signers": proven, "left_s": left_s})
        return
    screen.say(f"{token.operation} of {token.model or 'no model'}, proven by {', '.join(proven)}")
    screen.say(f"valid for {left_s} s, once" if left_s > 0 else "expired")


def _presented(args: argparse.Namespace) -> Presented:
    from greenroom.features.governance.canonical_json import NotCanonical, read
    from greenroom.features.governance.tokens import read_token

    text = address.read_token(args.token)
    try:
        return read_token(read(text.encode()) if text.startswith("{") else text)
    except NotCanonical as error:
        raise CommandFailed(f"the token cannot be read: {error}") from None


# --- audit ------------------------------------------------------------------------------------------------------------


def _add_audit_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    about = "Check the chain of hashes, and name the first bad line."
    verify = commands.add_parser("verify", help=about, description=about, allow_abbrev=False)
    verify.add_argument("file", nargs="?", metavar="FILE", help="the log (default: that of the configuration)")
    verify.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    verify.add_argument(
        "--head", metavar="HASH", help="a last line's hash that was kept elsewhere; must be in the chain"
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")


def _audit(args: argparse.Namespace) -> int:
    from greenroom.base.plain_file import why
    from greenroom.features.governance.audit import verify

    path = Path(args.file) if args.file else _configured(args.config)
    try:
        found = verify(path, args.head)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{path} cannot be read: {why(error)}") from None
    if args.json:
        screen.say_json({"ok": found.problem is None, **asdict(found)})
        return ExitStatus.OK if found.problem is None else ExitStatus.FAILED
    if found.problem is not None:
        raise CommandFailed(f"{path}: line {found.bad_line}: {found.problem}")
    screen.say(f"{path}: {found.lines} lines, none changed; head {found.head}")
    for line in found.cut:
        screen.note(f"line {line} was cut by a crash; the line after it says so")
    screen.hint("keep the head elsewhere: `greenroom audit verify --head HASH` then finds lines taken from the end")
    return ExitStatus.OK


def _configured(file: str | None) -> Path:
    from greenroom.config import loader

    config = loader.load(loader.find(file)).config
    return Path(config.governance.audit_path or Path(config.state_dir) / "governance" / "audit.jsonl")


AUDIT = Subcommand("audit", "Verify the audit log of signed operations.", _add_audit_options, _audit)
