from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.engine.batch_scheduler import PrefillLimits
from greenroom.workers.torch_host.engine.block_manager import BlockManager
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop
from greenroom.workers.torch_host.engine.requests import PromptTooLong, Sampling
from greenroom.workers.torch_host.engine.sequence import Sequence
from greenroom.workers.torch_host.failures import Failure, Stuck, is_fatal
from tests.workers.torch_host.engine_rig import (
    WAIT_S,
    Answer,
    Flat,
    ask,
    before_forwards,
    generated,
    kv_of,
    prompt,
    random_model,
    running,
    said,
    together,
)
from tests.workers.torch_host.samples.tiny import CONTEXT, ENCODERS, KINDS

DECODERS = [kind for kind in KINDS if kind not in ENCODERS]


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model("llama")


@pytest.fixture
def engine(llama: Any) -> Iterator[EngineLoop]:
    with running(llama) as engine:
        yield engine


@pytest.mark.parametrize("kind", DECODERS)
def test_a_batch_says_what_transformers_itself_would_say_to_each_alone(kind: str) -> None:
    model = random_model(kind)
    prompts = [prompt(length) for length in (1, 16, 33, 50)]
    alone = [generated(model, one, 12) for one in prompts]
    with running(model) as engine:
        answers = together(engine, prompts, 12)
        assert [answer.end.reason for answer in answers] == ["length"] * len(prompts)
        assert [answer.ids for answer in answers] == alone


def test_more_than_the_batch_holds_wait_and_all_are_answered(llama: Any) -> None:
    prompts = [prompt(3 + 5 * number) for number in range(9)]
    with running(llama, batch_max=3) as engine:
        alone = [said(engine, one, 9, uses_cache=False).ids for one in prompts]
        answers = together(engine, prompts, 9, uses_cache=False)
        assert [answer.end.reason for answer in answers] == ["length"] * 9
        assert [answer.ids for answer in answers] == alone


def test_a_long_prompt_is_computed_in_pieces_and_short_ones_together(llama: Any) -> None:
    long, *short = prompt(200), prompt(7), prompt(8), prompt(9)
    want = [generated(random_model("llama"), one, 8) for one in (long, *short)]
    forwards: list[int] = []
    prefill = PrefillLimits(tokens_max=48, tokens_first=48)
    with running(llama, prefill=prefill) as engine, before_forwards(llama, forwards.append):
        engine.on_sleep()
        asked = [ask(one, 8) for one in (long, *short)]
        for one, _ in asked:
            engine.submit(one)
        engine.on_wake()
        assert [answer.ids for _, answer in asked if answer.end] == want
        # Four full chunks of the long prompt; then its rest and all short prompts in one step.
        assert [tokens for tokens in forwards if tokens > 8] == [48, 48, 48, 48, 8 + 7 + 8 + 9]


def test_on_a_slow_device_pieces_become_as_small_as_they_must(llama: Any) -> None:
    want = generated(random_model("llama"), prompt(200), 8)
    forwards: list[int] = []
    prefill = PrefillLimits(tokens_first=64, step_s=1e-6)
    with running(llama, prefill=prefill) as engine, before_forwards(llama, forwards.append):
        asked, answer = ask(prompt(200), 8)
        engine.submit(asked)
        assert answer.end.reason == "length" and answer.ids == want
        assert [tokens for tokens in forwards if tokens > 1] == [64, 32, 32, 32, 32, 8]


def test_a_stop_token_ends_the_answer_and_is_not_handed_on(engine: EngineLoop) -> None:
    whole = said(engine, prompt(10), 12).ids
    answer = said(engine, prompt(10), 12, stop=[whole[5]])
    assert answer.end.reason == "stop"
    assert answer.ids == whole[: whole.index(whole[5])]


def test_an_answer_of_no_tokens_at_all_only_computes_the_prompt(engine: EngineLoop) -> None:
    answer = said(engine, prompt(40), 0)
    assert (answer.end.reason, answer.ids) == ("length", [])
    assert said(engine, prompt(40), 1).cached_tokens == 32


def test_a_cancelled_answer_ends_at_once_and_its_neighbours_go_on(engine: EngineLoop) -> None:
    alone = said(engine, prompt(12), 60).ids
    leaving, left = ask(prompt(20), 400)
    staying, stayed = ask(prompt(12), 60)

    def leave(_token: object) -> None:
        leaving.cancelled = len(left.tokens) >= 3

    left.on_each = leave
    engine.submit(leaving)
    engine.submit(staying)
    assert left.end.reason == "cancelled"
    # The step in flight at the cancellation may still deliver its token, and no more.
    assert 3 <= len(left.tokens) <= 4
    assert stayed.end.reason == "length"
    assert stayed.ids == alone
    assert engine.in_flight == 0


def test_cancelled_while_waiting_for_a_place_never_begins(llama: Any) -> None:
    with running(llama, batch_max=1) as engine:
        first, heard = ask(prompt(4), 200)
        second, unheard = ask(prompt(5), 200)
        engine.submit(first)
        heard.begun()
        engine.submit(second)
        second.cancelled = True
        assert unheard.end.reason == "cancelled"
        assert unheard.ids == []
        assert heard.end.reason == "length"


def test_what_can_never_fit_is_refused_at_the_door(engine: EngineLoop) -> None:
    with pytest.raises(PromptTooLong, match="512"):
        engine.submit(ask(prompt(500), 100)[0])
    with pytest.raises(PromptTooLong):
        engine.submit(ask([], 10)[0])
    with pytest.raises(PromptTooLong):
        engine.submit(ask(prompt(5), 10)[0], ask(prompt(500), 100)[0])
    assert engine.in_flight == 0


def test_kv_memory_that_is_full_makes_sequences_wait_and_not_fail(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    prompts = [prompt(40, seed) for seed in range(6)]
    with running(llama) as roomy:
        alone = [said(roomy, one, 60, uses_cache=False).ids for one in prompts]
    # Enough blocks for two and a half of them at full length.
    with running(llama, cache_tokens=256, context=256) as engine:
        answers = together(engine, prompts, 60)
        assert [answer.end.reason for answer in answers] == ["length"] * 6
        assert [answer.ids for answer in answers] == alone
        assert "sequence preempted" in caplog.text
        assert engine.kv_used == 0


def test_a_sequence_that_fills_all_memory_alone_is_answered(llama: Any) -> None:
    with running(llama, cache_tokens=64, context=512) as engine:
        assert engine.context == 64
        assert len(said(engine, prompt(10), 54).ids) == 54


def test_a_preempted_answer_with_a_seed_goes_on_as_if_nothing_had_happened(llama: Any) -> None:
    warm = Sampling(temperature=1.5, seed=7, frequency_penalty=0.5)
    prompts = [prompt(40, seed) for seed in range(4)]
    with running(llama) as roomy:
        alone = [said(roomy, one, 60, warm).ids for one in prompts]
    with running(llama, cache_tokens=256, context=256) as engine:
        assert [answer.ids for answer in together(engine, prompts, 60, warm)] == alone


def test_a_prefix_seen_before_is_not_computed_again(llama: Any, engine: EngineLoop) -> None:
    shared = prompt(70)
    first = said(engine, [*shared, 11, 12])
    forwards: list[int] = []
    with before_forwards(llama, forwards.append):
        second = said(engine, [*shared, 11, 12])
    assert second.ids == first.ids
    assert first.cached_tokens == 0
    assert second.cached_tokens == 64
    assert [tokens for tokens in forwards if tokens > 1] == [72 - 64]


def test_what_was_reused_is_known_before_the_first_token(engine: EngineLoop) -> None:
    said(engine, prompt(40), 1)
    made, answer = ask(prompt(40), 1)
    known: list[int | None] = []
    answer.on_each = lambda token: known.append(made.cached_tokens)
    engine.submit(made)
    assert answer.end
    assert known == [32]


def test_those_submitted_together_all_have_their_places_before_one_of_them_speaks(engine: EngineLoop) -> None:
    asked = [ask(prompt(20, seed), 1) for seed in range(5)]
    known: list[list[int | None]] = []
    for _, answer in asked:
        answer.on_each = lambda token: known.append([one.cached_tokens for one, _ in asked])
    engine.submit(*(one for one, _ in asked))
    assert all(answer.end for _, answer in asked)
    assert known == [[0] * 5] * 5


def test_what_a_sequence_left_behind_itself_is_not_counted_as_reused() -> None:
    blocks = BlockManager(cache_tokens=256, block_bytes=1)
    made, _ = ask(prompt(64))
    sequence = Sequence(made, on_end=lambda: None)
    assert blocks.allocate(sequence, spare=0)
    sequence.computed = 48
    blocks.free(sequence)
    assert blocks.allocate(sequence, spare=0)
    assert sequence.computed == 48, "it finds what it had computed"
    assert made.cached_tokens == 0


def test_the_answer_itself_is_cached_for_the_next_turn(engine: EngineLoop) -> None:
    opening = prompt(30)
    answer = said(engine, opening, 40).ids
    again = said(engine, [*opening, *answer, 17], 5)
    assert again.cached_tokens == (30 + 40 - 1) // 16 * 16
    assert again.ids == said(engine, [*opening, *answer, 17], 5, uses_cache=False).ids


@pytest.mark.parametrize("other", [{"tenant": "b", "tag": "x"}, {"tenant": "a", "tag": "y"}, {"uses_cache": False}])
def test_a_prefix_is_only_found_by_its_own_tenant_and_tag(engine: EngineLoop, other: dict[str, Any]) -> None:
    said(engine, prompt(50), tenant="a", tag="x")
    assert said(engine, prompt(50), **other).cached_tokens == 0
    assert said(engine, prompt(50), tenant="a", tag="x").cached_tokens == 48


def test_flush_forgets_by_tenant_and_by_tag_and_says_how_much(engine: EngineLoop) -> None:
    for tenant, tag in (("a", "x"), ("a", "y"), ("b", "x")):
        said(engine, prompt(40), 4, tenant=tenant, tag=tag)
    block_bytes = 16 * 3 * 2 * (2 * 16) * 4
    assert engine.flush("a", "x") == (32, 2 * block_bytes)
    assert said(engine, prompt(40), 4, tenant="a", tag="x").cached_tokens == 0
    assert said(engine, prompt(40), 4, tenant="a", tag="y").cached_tokens == 32
    assert engine.flush(None, "x") == (64, 4 * block_bytes)
    assert engine.flush("nobody", None) == (0, 0)
    assert engine.flush(None, None) == (32, 2 * block_bytes)


def test_flush_in_the_middle_of_an_answer_changes_nothing_for_it(engine: EngineLoop) -> None:
    alone = said(engine, prompt(60), 100, uses_cache=False).ids
    said(engine, prompt(60), 1)
    made, answer = ask(prompt(60), 100)
    engine.submit(made)
    answer.begun()
    engine.flush(None, None)
    assert answer.end.reason == "length"
    assert answer.ids == alone
    engine.flush(None, None)
    assert engine.kv_used == 0


def test_the_same_seed_says_the_same_whatever_is_around(engine: EngineLoop) -> None:
    warm = Sampling(temperature=1.3, top_p=0.9, seed=1234)
    alone = said(engine, prompt(9), 30, warm).ids
    asked = [ask(prompt(9), 30, warm), *(ask(prompt(4 + n), 30, Sampling(temperature=1.0, top_k=n)) for n in range(5))]
    for one, _ in asked:
        engine.submit(one)
    assert asked[0][1].end.reason == "length"
    assert asked[0][1].ids == alone
    assert said(engine, prompt(9), 30, Sampling(temperature=1.3, top_p=0.9, seed=1235)).ids != alone


def test_without_a_seed_answers_differ(engine: EngineLoop) -> None:
    warm = Sampling(temperature=1.5)
    assert said(engine, prompt(9), 30, warm).ids != said(engine, prompt(9), 30, warm).ids


def test_logprobs_tell_the_chosen_token_and_the_likeliest(engine: EngineLoop) -> None:
    answer = said(engine, prompt(9), 5, Sampling(temperature=0.0, logprobs=3))
    for token in answer.tokens:
        assert token.logprob is not None
        assert token.top[0] == (token.id, pytest.approx(token.logprob))
        assert [value for _, value in token.top] == sorted((value for _, value in token.top), reverse=True)
        assert len(token.top) == 3
    assert said(engine, prompt(9), 5, Sampling(temperature=0.0, logprobs=0)).tokens[0].top == ()
    assert said(engine, prompt(9), 5).tokens[0].logprob is None


class Only:
    """Allows these tokens, one after the other, then is done."""

    def __init__(self, tokens: list[int], fails_at: int | None = None) -> None:
        self.tokens, self.accepted, self.fails_at = tokens, list[int](), fails_at

    def fill(self, row: torch.Tensor) -> None:
        if len(self.accepted) == self.fails_at:
            raise ValueError("no such grammar")
        row.zero_()
        token = self.tokens[len(self.accepted)]
        row[token // 32] = 1 << (token % 32) if token % 32 < 31 else -(1 << 31)

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    @property
    def is_done(self) -> bool:
        return len(self.accepted) == len(self.tokens)


def test_a_constraint_says_what_may_come_and_when_it_is_over(engine: EngineLoop) -> None:
    wanted = [31, 63, 5, 380, 64]
    free, unbound = ask(prompt(8), 20)
    bound, answer = ask(prompt(8), 20, constraint=Only(wanted))
    warm, sampled = ask(prompt(8), 20, Sampling(temperature=2.0, top_k=5), constraint=Only(wanted))
    for one in (free, bound, warm):
        engine.submit(one)
    assert (answer.end.reason, answer.ids) == ("stop", wanted)
    assert (sampled.end.reason, sampled.ids) == ("stop", wanted)
    assert unbound.end.reason == "length"
    assert unbound.ids == said(engine, prompt(8), 20).ids


def test_a_constraint_that_fails_ends_its_own_answer_only(engine: EngineLoop) -> None:
    bad, ended = ask(prompt(8), 20, constraint=Only([31, 63, 5], fails_at=2))
    good, answer = ask(prompt(9), 20)
    engine.submit(bad)
    engine.submit(good)
    assert ended.end.reason == "error"
    assert "no such grammar" in (ended.end.error or "")
    assert answer.end.reason == "length"


def test_a_listener_that_fails_does_not_take_others_along(engine: EngineLoop) -> None:
    bad, broken = ask(prompt(8), 20)

    def fail(_token: object) -> None:
        raise RuntimeError("nobody home")

    broken.on_each = fail
    good, answer = ask(prompt(9), 20)
    engine.submit(bad)
    engine.submit(good)
    assert answer.end.reason == "length"
    assert broken.end.reason == "cancelled"


def test_an_error_in_a_step_ends_those_concerned_and_the_model_serves_on(llama: Any, engine: EngineLoop) -> None:
    def fail_at_decoding(tokens: int) -> None:
        if tokens == 1:
            raise ValueError("a bad step")

    with before_forwards(llama, fail_at_decoding):
        answer = _submitted(engine)
        assert answer.end.reason == "error"
    assert "failed at this request (ValueError)" in (answer.end.error or "")
    assert said(engine, prompt(8)).end.reason == "length"
    assert engine.in_flight == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_lost_device_is_reported_only_to_requests_that_may_have_caused_it(is_first: bool, llama: Any) -> None:
    """The process ends: requests that were told nothing are sent again by the gateway, to another one."""
    told: list[BaseException] = []
    ended = threading.Event()

    def on_fatal(error: BaseException, say: Callable[[], None]) -> None:
        told.append(error)
        if is_first and len(told) == 1:
            say()
        if len(told) == 2:
            ended.set()

    awake = threading.Event()

    def fail(_tokens: int) -> None:
        awake.wait(WAIT_S)
        raise RuntimeError("CUDA error: an illegal memory access")

    with running(llama, on_fatal=on_fatal, batch_max=1) as engine, before_forwards(llama, fail):
        engine.on_sleep()
        (one, computed), (other, waiting) = ask(prompt(8)), ask(prompt(9))
        engine.submit(one, other)
        engine.on_wake()
        awake.set()
        # By the step that failed, and by the thread that ends with it.
        assert ended.wait(WAIT_S)
        late, unheard = ask(prompt(10))
        engine.submit(late)
        if is_first:
            assert "failed at this request" in (computed.end.error or "")
        assert (bool(computed.ends), waiting.ends, unheard.ends) == (is_first, [], [])
        with pytest.raises(Failure) as refused:
            engine.on_wake()
        assert is_fatal(refused.value)
    assert told[0] is told[1]


def test_a_request_that_may_have_ended_the_thread_is_not_sent_again(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is a mistake of ours that this request brings to light, it would end the next process as well."""
    with running(llama) as engine:
        # A mistake of ours cannot be had otherwise.
        monkeypatch.setattr(engine._block_manager, "allocate", _raises(AssertionError("the books do not agree")))
        assert "process has failed" in (_submitted(engine).end.error or "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_thread_is_told_if_requests_cannot_end(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = threading.Event()

    def on_fatal(error: BaseException, say: Callable[[], None]) -> None:
        heard.set()
        say()

    with running(llama, on_fatal=on_fatal) as engine:
        assert engine._scheduler is not None
        # A mistake of ours cannot be had otherwise.
        for name in ("step", "end_all"):
            monkeypatch.setattr(engine._scheduler, name, _raises(AssertionError("the books do not agree")))
        engine.submit(ask(prompt(8))[0])
        assert heard.wait(WAIT_S)


def test_asks_wait_for_a_sleeping_model_and_can_be_cancelled_there(engine: EngineLoop) -> None:
    engine.on_sleep()
    waiting, answer = ask(prompt(8))
    leaving, left = ask(prompt(9))
    engine.submit(waiting)
    engine.submit(leaving)
    leaving.cancelled = True
    assert left.end.reason == "cancelled"
    assert answer.ends == []
    engine.on_wake()
    assert answer.end.reason == "length"


def test_sleep_ends_unfinished_requests_and_forgets_the_cache(llama: Any) -> None:
    kv = kv_of(llama, 4096)
    with running(llama, kv=kv) as engine:
        _check_forgets(engine, kv)


def _check_forgets(engine: EngineLoop, kv: Flat) -> None:
    said(engine, prompt(60), 2)
    made, answer = ask(prompt(8), 450)
    engine.submit(made)
    answer.begun()
    engine.on_sleep()
    assert answer.end.reason == "error"
    assert "sleep" in (answer.end.error or "")
    kv.tensor.fill_(255)
    engine.on_wake()
    again = said(engine, prompt(60), 2)
    assert again.cached_tokens == 0
    assert engine.kv_used == 0


def test_a_thread_that_does_not_obey_is_stuck_and_the_process_with_it(llama: Any) -> None:
    is_computing, may_end = threading.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        is_computing.set()
        assert may_end.wait(WAIT_S)

    with running(llama, switch_timeout_s=1.0) as engine:
        hook = llama.register_forward_pre_hook(stand_still)
        one, answer = ask(prompt(5))
        engine.submit(one)
        assert is_computing.wait(WAIT_S)
        try:
            with pytest.raises(Stuck, match="did not stop within") as caught:
                engine.on_sleep()
        finally:
            hook.remove()
            may_end.set()
        assert is_fatal(caught.value)
        assert answer.end.reason == "error"


def test_compute_time_is_shared_out_among_those_computed_together(engine: EngineLoop) -> None:
    answer = said(engine, prompt(30), 20)
    assert 0 < answer.end.compute_s < WAIT_S


def test_the_context_can_be_filled_to_the_last_token(engine: EngineLoop) -> None:
    model = random_model("llama")
    assert said(engine, prompt(480), CONTEXT - 480).ids == generated(model, prompt(480), CONTEXT - 480)


def _raises(error: Exception) -> Any:
    def fail(*_args: object, **_named: object) -> None:
        raise error

    return fail


def _submitted(engine: EngineLoop) -> Answer:
    made, answer = ask(prompt(8), 20)
    engine.submit(made)
    return answer
