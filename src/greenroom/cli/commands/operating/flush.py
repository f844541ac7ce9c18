"""`greenroom flush`: empty the caches of prompts, of all models or one, of all tenants or one, or of a tag."""

from __future__ import annotations

import argparse

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus

PATH = "/v1/cache/flush"
FLUSH_MAX_S = 120.0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="its id or an alias (default: all models)")
    parser.add_argument("--tenant", help="only what this tenant's requests left")
    parser.add_argument("--tag", help="only what requests with this X-Cache-Tag left")
    address.add_token_option(parser)
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    named = {"tag": args.tag, "tenant": args.tenant, "model": args.model}
    scope = next((scope for scope, value in named.items() if value is not None), "all")
    fields = {"scope": scope, "modelId": args.model, "tenantId": args.tenant, "tag": args.tag}
    # Only what is said: this is the body that a token is signed for.
    body = {key: value for key, value in fields.items() if value is not None}
    client = Client(address.address_of(args))
    answer = client.post(PATH, body, answer_max_s=FLUSH_MAX_S, token=address.token_of(args))
    if args.json:
        screen.say_json(answer)
    elif answer["flushed"]:
        removed = answer["entriesRemoved"]
        screen.say("flushed" if removed is None else f"flushed: {removed:,} entries removed")
    if not answer["flushed"]:
        raise CommandFailed(answer["reason"])
    return ExitStatus.OK


COMMAND = Subcommand("flush", "Empty the caches of prompts: of a model, a tenant, a tag, or all.", _add_options, _run)
