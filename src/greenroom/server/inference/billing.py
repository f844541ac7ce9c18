"""What an answer of a remote model has cost, as far as the answer and its end tell.

Owns the rule for requests that ended early or tell no tokens: what a provider may have worked on is counted as it was
expected, of a stream what came, and what it refused is free.
"""

from __future__ import annotations

from greenroom.http.relays.relay import Relay
from greenroom.runtime.remote.spending import Bill
from greenroom.telemetry.activity import Record


def settle(bill: Bill, record: Record, relay: Relay | None) -> None:
    """Enter the cost of a request that has ended."""
    if relay is None or not _has_worked(relay):
        bill.drop()
    elif record.estimated and record.completion_tokens is not None:
        bill.settle_part(record.completion_tokens, relay.total_bytes)
    else:
        bill.settle(record.prompt_tokens, record.completion_tokens, record.cached_tokens or 0)


def _has_worked(relay: Relay) -> bool:
    """True if the provider answered, or had the request and may have begun to when it was left or lost."""
    return relay.was_sent if relay.status == 0 else relay.status == 200
