from __future__ import annotations

import threading

import pytest

from greenroom.workers.torch_host.engine.embedding import TOKENS_MAX, group_by_length
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop
from greenroom.workers.torch_host.engine.requests import PromptTooLong, Vectors
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.engine_rig import WAIT_S, ask, prompt, random_model, running

MEAN = SentenceConfig()
INPUTS = [prompt(length) for length in (9, 3, 30, 9, 17)]


def embedded(engine: EngineLoop, inputs: list[list[int]], skipped: list[int] | None = None) -> Vectors | Exception:
    results: list[Vectors | Exception] = []
    done = threading.Event()

    def on_done(result: Vectors | Exception) -> None:
        results.append(result)
        done.set()

    engine.embed(inputs, on_done, skipped)
    assert done.wait(WAIT_S)
    assert len(results) == 1
    return results[0]


def test_a_model_embeds_or_writes_text_and_says_which() -> None:
    with running(random_model("bert"), cache_tokens=0, sentence=MEAN) as engine, pytest.raises(PromptTooLong):
        engine.submit(ask(prompt(3))[0])
    with running(random_model("llama")) as engine:
        assert isinstance(embedded(engine, INPUTS), PromptTooLong)


def test_an_input_too_long_or_empty_is_said_and_not_computed() -> None:
    with running(random_model("bert"), cache_tokens=0, context=64, sentence=MEAN) as engine:
        assert isinstance(embedded(engine, [prompt(65)]), PromptTooLong)
        assert isinstance(embedded(engine, [prompt(5), []]), PromptTooLong)
        assert isinstance(embedded(engine, []), PromptTooLong)


def test_a_failure_reaches_its_request_and_the_next_is_served() -> None:
    model = random_model("bert")
    with running(model, cache_tokens=0, sentence=MEAN) as engine:
        broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
        assert isinstance(embedded(engine, INPUTS), Exception)
        broken.remove()
        assert isinstance(embedded(engine, INPUTS), list)
        assert engine.in_flight == 0


def test_a_prompt_that_is_all_of_an_input_leaves_its_last_token() -> None:
    with running(random_model("bert"), cache_tokens=0, sentence=SentenceConfig(pooling=("max",))) as engine:
        vectors = embedded(engine, [prompt(5), prompt(3)], [9, 0])
        last = embedded(engine, [prompt(5)], [4])
    assert isinstance(vectors, list) and isinstance(last, list)
    assert vectors[0] == pytest.approx(last[0], abs=1e-4)


@pytest.mark.parametrize(("pads", "count"), [(True, 4), (False, 5)])
def test_groups_are_as_large_as_they_may_be_and_hold_each_input_once(pads: bool, count: int) -> None:
    inputs = [[0] * length for length in (5000, 3, 2000, 2000, 2000, 2000, 8192, 1)]
    groups = group_by_length(inputs, pads)
    assert sorted(number for group in groups for number in group) == list(range(len(inputs)))
    assert all(len(group) * max(len(inputs[number]) for number in group) <= TOKENS_MAX for group in groups)
    assert len(groups) == count
