"""A step that does not fit into device memory is split: only a sequence that does not fit alone is ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.engine.engine_loop import EngineLoop
from greenroom.workers.torch_host.engine.requests import Sampling, Vectors
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.engine_rig import (
    GREEDY,
    WAIT_S,
    Answer,
    ask,
    before_forwards,
    prompt,
    random_model,
    running,
    said,
)

pytestmark = pytest.mark.slow

# Random, with penalties for earlier tokens: a token that is sampled twice would change the answer.
WARM = Sampling(temperature=1.5, seed=7, frequency_penalty=0.7, repetition_penalty=1.2)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model("llama")


@contextmanager
def failing(model: Any, fails: Callable[[torch.Tensor, torch.Tensor], bool], error: Exception = FULL) -> Iterator[None]:
    """The model raises this error at steps for which `fails(ids, positions)` is true."""

    def look(_module: object, _args: object, named: dict[str, Any]) -> None:
        if fails(named["input_ids"], named.get("position_ids")):
            raise error

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def alone(model: Any, prompts: list[list[int]], sampling: Sampling = WARM, tokens: int = 20) -> list[list[int]]:
    with running(model) as engine:
        return [said(engine, one, tokens, sampling, uses_cache=False).ids for one in prompts]


def together(engine: EngineLoop, prompts: list[list[int]], sampling: Sampling = WARM, tokens: int = 20) -> list[Answer]:
    """The answers, of asks that come at once."""
    engine.on_sleep()
    asked = [ask(one, tokens, sampling, uses_cache=False) for one in prompts]
    engine.submit(*(one for one, _ in asked))
    engine.on_wake()
    answers = [answer for _, answer in asked]
    assert all(answer.end for answer in answers)
    return answers


def is_prefill(ids: torch.Tensor) -> bool:
    return ids.shape[0] == 1 and ids.shape[1] > 1


def test_prompts_that_do_not_fit_together_are_computed_apart(llama: Any) -> None:
    prompts = [prompt(length) for length in (5, 20, 11, 17, 8)]
    wanted = alone(llama, prompts)
    with running(llama) as engine, failing(llama, lambda ids, _: ids.numel() > 24):
        answers = together(engine, prompts)
        assert [answer.end.reason for answer in answers] == ["length"] * 5
        assert [answer.ids for answer in answers] == wanted
        assert engine.in_flight == 0


def test_a_prompt_that_does_not_fit_is_computed_in_smaller_pieces(llama: Any) -> None:
    prompts = [prompt(200)]
    wanted = alone(llama, prompts)
    with running(llama) as engine, failing(llama, lambda ids, _: ids.numel() > 24):
        answers = together(engine, prompts)
        assert [answer.ids for answer in answers] == wanted


def test_steps_do_not_run_out_of_memory_again_and_again(llama: Any) -> None:
    failures = 0

    def fails(ids: torch.Tensor, _: object) -> bool:
        nonlocal failures
        failures += ids.numel() > 64
        return ids.numel() > 64

    with running(llama) as engine, failing(llama, fails):
        # Known to be quick, so that pieces would be as long as they may be.
        together(engine, [prompt(500)], tokens=1)
        assert failures < 6


@pytest.mark.parametrize("error", [FULL, ValueError("this prompt cannot be computed")])
def test_only_the_prompt_at_fault_is_ended(llama: Any, error: Exception) -> None:
    prompts = [prompt(length) for length in (5, 20, 11, 17, 8)]
    wanted = alone(llama, prompts)
    bad = [9, 390, 9]

    def fails(ids: torch.Tensor, at: torch.Tensor) -> bool:
        return bool(((ids == 390) & (at == 1)).any())

    with running(llama) as engine, failing(llama, fails, error):
        answers = together(engine, [*prompts[:2], bad, *prompts[2:]])
        ended = answers.pop(2)
        assert ended.end.reason == "error"
        # The original error may name files and other processes: it is only logged.
        assert ended.end.error and str(error) not in ended.end.error
        assert ended.end.is_memory is (error is FULL)
        assert [answer.ids for answer in answers] == wanted
        assert said(engine, prompts[0], 20, WARM).ids == wanted[0]
        assert engine.in_flight == 0


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_that_does_not_fit_is_decoded_in_parts(llama: Any, rows: int) -> None:
    prompts = [prompt(length) for length in (5, 20, 11, 17, 8, 6)]
    wanted = alone(llama, prompts)
    with running(llama) as engine, failing(llama, lambda ids, _: ids.shape[0] > rows):
        answers = together(engine, prompts)
        assert [answer.end.reason for answer in answers] == ["length"] * 6
        assert [answer.ids for answer in answers] == wanted
    assert engine.in_flight == 0


def test_only_the_answer_at_fault_is_ended(llama: Any) -> None:
    prompts = [prompt(length) for length in (5, 20, 11, 17, 8)]
    wanted = alone(llama, prompts)
    long = prompt(300)
    with running(llama) as engine:
        with failing(llama, lambda ids, at: not is_prefill(ids) and bool((at >= 300).any())):
            answers = together(engine, [*prompts[:2], long, *prompts[2:]])
            ended = answers.pop(2)
            assert ended.end.reason == "error"
            assert ended.end.is_memory
            assert [answer.ids for answer in answers] == wanted
        # Nothing is left of it: as many as before are computed together.
        forwards: list[int] = []
        with before_forwards(llama, forwards.append):
            assert [answer.ids for answer in together(engine, prompts)] == wanted
        assert max(forwards[-10:]) == len(prompts)


def test_an_answer_goes_on_where_choosing_failed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is computed again; nothing counts twice that was chosen once."""
    sampling = Sampling(temperature=1.5, seed=7, frequency_penalty=0.7, logprobs=2)
    prompts = [prompt(length) for length in (5, 20, 11)]
    wanted = alone(llama, prompts, sampling)
    calls, plain = iter(range(10_000)), torch.Tensor.topk

    def topk(self: torch.Tensor, *args: Any, **more: Any) -> Any:
        if next(calls) % 3 == 1:
            raise FULL
        return plain(self, *args, **more)

    with running(llama) as engine:
        monkeypatch.setattr(torch.Tensor, "topk", topk)
        answers = together(engine, prompts, sampling)
        assert [answer.end.reason for answer in answers] == ["length"] * 3
        assert [answer.ids for answer in answers] == wanted


def test_inputs_that_do_not_fit_together_are_embedded_apart() -> None:
    bert = random_model("bert")
    inputs = [prompt(length) for length in (5, 20, 11, 17, 8)]
    with running(bert, cache_tokens=0, sentence=SentenceConfig()) as engine:
        wanted = embedded(engine, inputs)
        with failing(bert, lambda ids, _: ids.shape[0] > 1):
            found = embedded(engine, inputs)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-5, rtol=1e-4)


def embedded(engine: EngineLoop, inputs: list[list[int]]) -> Vectors:
    return engine.embed(inputs, [0] * len(inputs)).result(WAIT_S)


def test_what_greedy_answers_say_does_not_change(llama: Any) -> None:
    prompts = [prompt(length) for length in (30, 31, 32)]
    wanted = alone(llama, prompts, GREEDY)
    with running(llama) as engine, failing(llama, lambda ids, _: ids.numel() > 40):
        assert [answer.ids for answer in together(engine, prompts, GREEDY)] == wanted
