"""`greenroom estimate`: the memory a model will need, part by part, compared with what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed
from greenroom.errors import ConfigError, ProbeFailed

if TYPE_CHECKING:
    from greenroom.config.schema import Config, Model
    from greenroom.core.model import DeviceId
    from greenroom.engines.estimates.estimate import Estimate
    from greenroom.runtime.memory.needs import Account, Subject

TITLES = ("GPU MiB", "host MiB", "part")
# More GPUs than any machine has.
GPUS_MAX = 1_024


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PATH|MODEL", help="a .gguf file, a folder with config.json, or a model's id")
    parser.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    parser.add_argument("--ctx", type=_number, metavar="TOKENS", help="assume a context of this length")
    parser.add_argument("--gpus", type=_gpu_count, metavar="N", help="assume this many GPUs; 0: on the host")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    from greenroom.runtime.memory.needs import Needs

    config = _config(args)
    subject = _with_context(_subject(args.model, config), args.ctx)
    needs = Needs(_book(config), _kinds(config, args.gpus))
    gpus = min(1, len(needs.gpus)) if args.gpus is None else args.gpus
    account, parts = needs.account_of(subject), needs.estimate_of(subject, gpus)
    if parts is None and not (account.need.gpu_mib or account.need.host_mib):
        raise CommandFailed(f"{args.model}: neither its files nor its name say what it needs; give memory_mib")
    _say(subject, account, parts, as_json=args.json)


COMMAND = Subcommand(
    "estimate",
    "Show what memory a model will need, part by part, from its file or folder. Starts nothing.",
    add_options,
    run,
)


# --- what is asked about ----------------------------------------------------------------------------------------------


def _config(args: argparse.Namespace) -> Config:
    """The configuration; an empty one if there is none and a path is asked about."""
    from greenroom.config import loader
    from greenroom.config.schema import Config

    try:
        return loader.load(loader.find(args.config)).config
    except ConfigError:
        if args.config is not None or not Path(args.model).exists():
            raise
        return Config()


def _subject(name: str, config: Config) -> Subject:
    from greenroom.core.model import ModelId
    from greenroom.engines.registry import engine_for
    from greenroom.runtime.memory.needs import Subject

    model_id, model = next(
        ((key, model) for key, model in config.models.items() if name in (key, *model.aliases)), (name, None)
    )
    model = model or _model_of(Path(name))
    return Subject(ModelId(model_id), model, engine_for(model))


def _model_of(path: Path) -> Model:
    """The model as if configured with nothing but its path."""
    from greenroom.config.schema import Model

    if path.is_dir():
        return Model(cmd=("serve", "--port", "${PORT}", str(path.absolute())))
    if path.is_file():
        return Model(engine="llamacpp", path=str(path))
    raise CommandFailed(f"there is no model {path} in the configuration, and no such file or folder")


def _with_context(subject: Subject, ctx: int | None) -> Subject:
    """The model with this context: the last option on a command line wins."""
    from dataclasses import replace

    from greenroom.config.kinds import words

    if ctx is None:
        return subject
    model, more = subject.config, ("--ctx-size", str(ctx))
    changed = {"cmd": (*words(model.cmd), *more)} if model.cmd else {"args": (*model.args, *more)}
    return replace(subject, config=model.model_copy(update=changed))


def _book(config: Config) -> Any:
    from greenroom.runtime.memory.book import MemoryNeedsStore

    return MemoryNeedsStore(Path(config.state_dir).expanduser(), lambda what, error: screen.note(f"{what}: {error}"))


def _kinds(config: Config, gpus: int | None) -> dict[DeviceId, str]:
    """The GPUs by id, with the kind of each: measurements are kept by kind."""
    from greenroom.core.model import DeviceId
    from greenroom.runtime.memory.probes import open_probe

    try:
        probe, seen = open_probe(config)
    except ProbeFailed as error:
        screen.note(error.message)
        return {}
    probe.close()
    found = {DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus}
    if gpus is None:
        return found
    # As many as asked for: the real ones, then made-up ones of an unknown kind.
    return dict([*found.items(), *((DeviceId(f"gpu{number}"), "") for number in range(gpus))][:gpus])


# --- what is said -----------------------------------------------------------------------------------------------------


def _say(subject: Subject, account: Account, estimate: Estimate | None, *, as_json: bool) -> None:
    if as_json:
        screen.say_json(_json(subject, account, estimate))
        return
    if estimate is not None:
        rows = [(f"{part.gpu_mib:,}", f"{part.host_mib:,}", part.what) for part in estimate.parts]
        total = (f"{estimate.need.gpu_mib:,}", f"{estimate.need.host_mib:,}", f"together, from: {estimate.source}")
        screen.say_table(TITLES, [*rows, total])
    for line in _lines(account):
        screen.say(line)


def _lines(account: Account) -> Sequence[str]:
    need = account.need
    lines = [f"planned with: {need.gpu_mib:,} MiB of GPU, {need.host_mib:,} MiB of host memory ({account.source})"]
    measured, error = account.measured, account.estimate_error
    if measured is not None and measured.is_seen:
        host = "" if measured.host_mib is None else f", {measured.host_mib:,} MiB of host memory"
        lines.append(f"measured: {measured.gpu_mib:,} MiB of GPU{host}")
    if error is not None:
        lines.append(f"the estimate is {abs(error):.1%} {'above' if error >= 0 else 'below'} what was measured")
    return lines


def _json(subject: Subject, account: Account, estimate: Estimate | None) -> dict[str, Any]:
    measured = account.measured if account.measured is not None and account.measured.is_seen else None
    return {
        "model": subject.id,
        "engine": subject.engine.name,
        "need": {"gpu_mib": account.need.gpu_mib, "host_mib": account.need.host_mib, "source": account.source},
        "estimate": estimate and _estimate_json(estimate),
        "measured": measured and {"gpu_mib": measured.gpu_mib, "host_mib": measured.host_mib},
        "estimate_error": account.estimate_error,
    }


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    parts = [{"part": one.what, "gpu_mib": one.gpu_mib, "host_mib": one.host_mib} for one in estimate.parts]
    need = estimate.need
    return {"source": estimate.source, "parts": parts, "gpu_mib": need.gpu_mib, "host_mib": need.host_mib}


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def _gpu_count(text: str) -> int:
    count = _number(text)
    if count > GPUS_MAX:
        raise argparse.ArgumentTypeError(f"no machine has {count:,} GPUs; at most {GPUS_MAX:,}")
    return count
