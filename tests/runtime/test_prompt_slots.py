"""Whose prompt lies in which slot: no owner is told to reuse what another left."""

from __future__ import annotations

import asyncio
import random

from greenroom.runtime.prompt_slots import CachePin, Owner, PromptCacheSlots

LAB, SHOP = ("lab", ""), ("shop", "")


def pinned(prompts: PromptCacheSlots, owner: Owner, **more: bool) -> CachePin:
    pin = prompts.pin(owner, **more)
    assert pin is not None
    return pin


def served(prompts: PromptCacheSlots, owner: Owner, **more: bool) -> CachePin:
    pin = pinned(prompts, owner, **more)
    prompts.release(pin)
    return pin


def closed(count: int = 2) -> PromptCacheSlots:
    """A book with a prompt of the lab in its first slot."""
    prompts = PromptCacheSlots(count)
    served(prompts, None)
    served(prompts, LAB)
    return prompts


def test_requests_of_one_owner_are_sent_as_they_are() -> None:
    prompts = PromptCacheSlots(2)
    assert [served(prompts, LAB).fields for _ in range(3)] == [{}, {}, {}] and prompts.is_open


def test_another_owner_waits_for_requests_that_may_be_anywhere_and_reuses_nothing() -> None:
    prompts = PromptCacheSlots(2)
    first = pinned(prompts, LAB)
    assert prompts.pin(SHOP) is None and not prompts.is_sole(LAB)
    prompts.release(first)
    pin = pinned(prompts, SHOP)
    assert pin.fields == {"id_slot": b"%d" % (pin.index or 0), "cache_prompt": b"false"}
    assert served(prompts, LAB).fields == {"id_slot": b"%d" % (1 - (pin.index or 0))}, "the other slot is still its own"


def test_an_owner_gets_its_own_slot_again_and_a_free_one_otherwise() -> None:
    prompts = closed()
    one = pinned(prompts, LAB)
    two = pinned(prompts, LAB)
    assert "cache_prompt" not in one.fields and two.fields["cache_prompt"] == b"false"
    assert one.index != two.index and prompts.pin(LAB) is None, "as many as there are slots"


def test_prompt_of_a_request_that_wants_no_cache_is_reused_by_none() -> None:
    prompts = closed(1)
    assert served(prompts, None).fields["cache_prompt"] == b"false"
    assert served(prompts, LAB).fields["cache_prompt"] == b"false"
    assert "cache_prompt" not in served(prompts, LAB).fields


def test_a_request_in_several_slots_has_all_of_them_and_leaves_none_to_others() -> None:
    prompts = closed()
    running = pinned(prompts, LAB)
    assert prompts.pin(SHOP, spreads=True) is None, "one is in use"
    prompts.release(running)
    whole = pinned(prompts, SHOP, spreads=True)
    assert {whole.index, *whole.erase} == {0, 1} and whole.fields["cache_prompt"] == b"false"
    assert prompts.pin(LAB) is None
    prompts.release(whole)
    assert "cache_prompt" not in served(prompts, SHOP).fields and "cache_prompt" in served(prompts, LAB).fields


def test_the_only_owner_keeps_its_slot_when_it_asks_for_several_answers() -> None:
    prompts = PromptCacheSlots(4)
    anywhere = pinned(prompts, LAB)
    assert prompts.pin(LAB, spreads=True) is None
    prompts.release(anywhere)
    one, two = served(prompts, LAB, spreads=True), served(prompts, LAB, spreads=True)
    assert one.index == two.index and one.fields == two.fields == {"id_slot": b"%d" % (one.index or 0)}
    assert served(prompts, LAB).fields == {} and prompts.is_open


def test_what_is_forgotten_is_reused_by_none_also_if_it_is_just_used() -> None:
    prompts = closed()
    running = pinned(prompts, LAB)
    assert prompts.forget(lambda tenant, tag: tenant == "shop") == []
    assert prompts.forget(lambda tenant, tag: tenant == "lab") == [running.index]
    prompts.release(running)
    assert "cache_prompt" in served(prompts, LAB).fields


async def test_waiting_ends_when_a_request_is_over() -> None:
    prompts = closed(1)
    running = pinned(prompts, LAB)
    waiting = asyncio.create_task(prompts.place(SHOP))
    await asyncio.sleep(0)
    assert not waiting.done()
    prompts.release(running)
    assert (await asyncio.wait_for(waiting, 30)).index == 0


async def test_one_that_needs_all_slots_is_not_overtaken_and_holds_up_none_if_it_leaves() -> None:
    prompts = closed(2)
    running = pinned(prompts, LAB)
    whole = asyncio.create_task(prompts.place(SHOP, spreads=True))
    behind = asyncio.create_task(prompts.place(SHOP))
    await asyncio.sleep(0)
    assert prompts.pin(LAB) is None and not behind.done(), "though a slot is free"
    whole.cancel()
    assert (await asyncio.wait_for(behind, 30)).index == 1 - (running.index or 0)


def test_no_owner_meets_another_whatever_the_order() -> None:
    """A server with slots that keep what they were last sent, and choose any slot for what is not pinned."""
    for seed in range(200):
        order, prompts = random.Random(seed), PromptCacheSlots(4)
        held: list[Owner] = [None] * 4
        running: list[tuple[CachePin, int]] = []
        for _ in range(100):
            busy = {at for _, at in running}
            owner: Owner = order.choice([LAB, LAB, SHOP, ("lab", "tag"), None][: order.choice((2, 5))])
            spreads = order.random() < 0.1
            if len(busy) < 4 and order.random() < 0.6 and (pin := prompts.pin(owner, spreads=spreads)) is not None:
                for index in pin.erase:
                    assert index not in busy
                    held[index] = None
                at = order.choice([n for n in range(4) if n not in busy]) if pin.index is None else pin.index
                assert at not in busy
                assert "cache_prompt" in pin.fields or held[at] in (None, owner), seed
                held[at] = owner
                running.append((pin, at))
            elif running:
                prompts.release(running.pop(order.randrange(len(running)))[0])
