"""`greenroom trainer`: update all replicas of a model, compare what they serve, and send them prompts. Owns the options
and how reports are printed. What is done is `greenroom.trainer`'s."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import screen
from greenroom.cli.address import KEY_NAME
from greenroom.cli.commands import Subcommand, seconds_above_0
from greenroom.cli.failures import CommandFailed, ExitStatus, WrongUsage

if TYPE_CHECKING:
    from greenroom.trainer import Report, Sign, Trainer

DEFAULT_REPLICAS: Final = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
# Variables of the trainer's pod.
HOST_NAME: Final = "INFERENCE_REPLICAS_HOST"
SERVICE_NAME: Final = "INFERENCE_SERVICE_URL"
REPO_NAME: Final = "MODEL_REPO_ID"
FILE_NAME: Final = "SYNC_STATE_FILE"
EVERY_S: Final = 30.0


def _add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for add in (_add_prompt, _add_update, _add_verify, _add_keep):
        add(commands)


def _run(args: argparse.Namespace) -> int:
    try:
        status: int = args.run_trainer(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        # Their name has no address, or the file of the desired state cannot be written.
        raise CommandFailed(f"the replicas cannot be asked: {error}") from None
    return status


COMMAND = Subcommand("trainer", "Replicas of a model: update all, compare them, ask them.", _add_options, _run)


def _sub(commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(run_trainer=run)
    parser.add_argument(
        "--replica",
        action="append",
        metavar="URL",
        help=f"a replica; may be repeated (default: all addresses of ${HOST_NAME}, or ports 8001 and 8002 here)",
    )
    parser.add_argument("--model", help="which model, where several are under version control")
    parser.add_argument(
        "--api-key-env", metavar="NAME", default=KEY_NAME, help=f"variable with an admin's key (default: {KEY_NAME})"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_update_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "repo_id", nargs="?", help=f"org/name of the hub, or a path below the folders of models (default: ${REPO_NAME})"
    )
    parser.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")
    parser.add_argument(
        "--sync",
        choices=("api", "file"),
        default="api",
        help=f"ask each replica, or write ${FILE_NAME}, which they follow (default: api)",
    )
    parser.add_argument("--sign-key", metavar="FILE", help="key that signs the updates, where replicas want tokens")
    parser.add_argument("--signer", default="alice", metavar="NAME", help="the signer's name (default: alice)")
    parser.add_argument(
        "--away-s",
        type=seconds_above_0,
        default=60.0,
        metavar="S",
        help="a replica silent for so long is lost (default: 60)",
    )


# --- what is done ---------------------------------------------------------------------------------------------------


def _add_prompt(commands: Any) -> None:
    parser = _sub(commands, "prompt", "Send a prompt to every replica and print the answers.", _prompt)
    parser.add_argument("text", help="the prompt")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="length of an answer (default: 64)")


def _prompt(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    answers = _trainer(args).prompt(args.text, max_tokens=args.max_tokens)
    if args.json:
        screen.say_json([asdict(answer) for answer in answers])
    for answer in () if args.json else answers:
        version = "" if answer.model_version is None else f" (version {answer.model_version})"
        screen.say(f"{answer.url}{version}: {answer.message if answer.text is None else answer.text.strip()}")
    return ExitStatus.FAILED if any(answer.text is None for answer in answers) else ExitStatus.OK


def _add_update(commands: Any) -> None:
    parser = _sub(commands, "update", "Let all replicas serve these weights, and compare them.", _update)
    _add_update_options(parser)
    parser.add_argument("--allow-gap", action="store_true", help="let requests wait where both versions do not fit")
    parser.add_argument(
        "--all-or-nothing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the others go back if one replica fails (default)",
    )


def _update(args: argparse.Namespace) -> int:
    trainer, repo_id = _trainer(args), _repo_id(args)
    report = trainer.update(repo_id, args.revision, allow_gap=args.allow_gap, all_or_nothing=args.all_or_nothing)
    return _told(args, report)


def _add_verify(commands: Any) -> None:
    _sub(commands, "verify", "Say what each replica serves; fails unless it is the same for all.", _verify)


def _verify(args: argparse.Namespace) -> int:
    return _told(args, _trainer(args).verify())


def _add_keep(commands: Any) -> None:
    parser = _sub(commands, "keep", "Keep all replicas at these weights, until Ctrl-C or SIGTERM.", _keep)
    _add_update_options(parser)
    parser.add_argument(
        "--every-s",
        type=seconds_above_0,
        default=EVERY_S,
        metavar="S",
        help=f"how often they are compared (default: {EVERY_S:g})",
    )


def _keep(args: argparse.Namespace) -> int:
    """Look again and again. A report is printed when it is another one than before."""
    import signal
    import sys
    import time

    # Nothing has to be tidied up: an update that has begun goes on in its replica.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(ExitStatus.OK))
    trainer, repo_id, last = _trainer(args), _repo_id(args), None
    while True:
        report = _reconciled(trainer, repo_id, args.revision)
        if report != last:
            _told(args, report)
        last = report
        time.sleep(args.every_s)


def _reconciled(trainer: Trainer, repo_id: str, revision: str | None) -> Report:
    from greenroom.trainer import Report

    try:
        return trainer.reconcile(repo_id, revision)
    except (OSError, ValueError) as error:
        # No replica has an address yet, or the file of the desired state cannot be written.
        return Report(False, (), f"The replicas cannot be asked: {error}.")


def _told(args: argparse.Namespace, report: Report) -> int:
    if args.json:
        screen.say_json(report.to_json())
    else:
        screen.say(str(report))
    return ExitStatus.OK if report.ok else ExitStatus.FAILED


# --- what is asked --------------------------------------------------------------------------------------------------


def _trainer(args: argparse.Namespace) -> Trainer:
    """Raises WrongUsage."""
    from greenroom.cli.client import in_utf8
    from greenroom.trainer import Patience, Trainer

    in_utf8(args.model or "")
    key = os.environ.get(args.api_key_env, "").strip() or None
    patience = Patience(away_s=args.away_s) if "away_s" in args else Patience()
    state_file = _state_file() if "sync" in args and args.sync == "file" else None
    replicas, sign = _replicas(args.replica, os.environ), _sign(args)
    try:
        return Trainer(replicas, api_key=key, model=args.model, state_file=state_file, patience=patience, sign=sign)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _sign(args: argparse.Namespace) -> Sign | None:
    if getattr(args, "sign_key", None) is None:
        return None
    from greenroom.features.governance.signing import signer

    return signer(args.sign_key, args.signer)


def _state_file() -> str:
    path = os.environ.get(FILE_NAME)
    if not path:
        raise WrongUsage(f"--sync file needs {FILE_NAME}, the file that the replicas follow")
    return path


def _replicas(said: Sequence[str] | None, environ: Mapping[str, str]) -> Sequence[str] | Callable[[], Sequence[str]]:
    """Raises WrongUsage."""
    host = environ.get(HOST_NAME)
    if said or not host:
        return said or DEFAULT_REPLICAS
    from urllib.parse import urlsplit

    said_url = environ.get(SERVICE_NAME) or "http://service:8000"
    try:
        service = urlsplit(said_url if "://" in said_url else f"http://{said_url}")
        port = service.port or (443 if service.scheme == "https" else 80)
    except ValueError:
        port = 0
    if not port or service.scheme not in ("http", "https"):
        raise WrongUsage(f"{SERVICE_NAME} is no address of a service: {said_url}")
    return lambda: addresses_of(host, port, service.scheme)


def addresses_of(host: str, port: int, scheme: str = "http") -> list[str]:
    """Every address that this name has now, as a URL. Raises OSError if it has none."""
    import socket

    found = {str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return [f"{scheme}://{f'[{one}]' if ':' in one else one}:{port}" for one in sorted(found)]


def _repo_id(args: argparse.Namespace) -> str:
    repo_id: str | None = args.repo_id or os.environ.get(REPO_NAME)
    if not repo_id:
        raise WrongUsage(f"which weights? Name a repository or a path, or set {REPO_NAME}")
    return repo_id
