from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.asks import TooLong, Vectors
from greenroom.workers.torch_host.batching import Batching
from greenroom.workers.torch_host.embedding import TOKENS_MAX, grouped, pooling_of
from tests.workers.torch_host.performing import WAIT_S, ask, performing, prompt, random_model, said


def embedded(batching: Batching, inputs: list[list[int]]) -> Vectors | Exception:
    results: list[Vectors | Exception] = []
    done = threading.Event()

    def on_done(result: Vectors | Exception) -> None:
        results.append(result)
        done.set()

    batching.embed(inputs, on_done)
    assert done.wait(WAIT_S)
    assert len(results) == 1
    return results[0]


@torch.no_grad()
def hidden(model: Any, tokens: list[int]) -> torch.Tensor:
    """What Transformers itself computes for one input alone, with its own attention."""
    base = model.base_model
    states: torch.Tensor = base(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return states


def unit(vector: torch.Tensor) -> list[float]:
    return (vector / vector.norm()).tolist()  # type: ignore[no-any-return]


INPUTS = [prompt(length) for length in (9, 3, 30, 9, 17)]


@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "qwen3"])
@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_inputs_of_any_length_together_give_what_each_gives_alone(kind: str, pooling: Any) -> None:
    model = random_model(kind)
    alone = [hidden(model, one) for one in INPUTS]
    pick = {"mean": lambda one: one.mean(0), "last": lambda one: one[-1], "first": lambda one: one[0]}[pooling]
    with performing(model, cache_tokens=0, embeds_only=True, pooling=pooling) as batching:
        vectors = embedded(batching, INPUTS)
        assert isinstance(vectors, list)
        for vector, one in zip(vectors, alone, strict=True):
            assert vector == pytest.approx(unit(pick(one)), abs=1e-4)
        assert batching.in_flight == 0


def test_a_model_that_only_embeds_continues_no_text() -> None:
    with performing(random_model("bert"), cache_tokens=0, embeds_only=True) as batching, pytest.raises(TooLong):
        batching.submit(ask(prompt(3))[0])


def test_a_model_that_answers_embeds_beside_it() -> None:
    model = random_model("llama")
    with performing(model) as batching:
        alone = said(batching, prompt(12), 40).ids
        made, answer = ask(prompt(12), 40)
        batching.submit(made)
        assert isinstance(embedded(batching, INPUTS), list)
        assert answer.end.reason == "length"
        assert answer.ids == alone


def test_an_input_too_long_or_empty_is_said_and_not_computed() -> None:
    with performing(random_model("llama"), context=64) as batching:
        assert isinstance(embedded(batching, [prompt(65)]), TooLong)
        assert isinstance(embedded(batching, [prompt(5), []]), TooLong)
        assert isinstance(embedded(batching, []), TooLong)


def test_a_failure_reaches_whoever_asked_and_the_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with performing(random_model("llama")) as batching:
        monkeypatch.setattr(batching._embedder, "vectors", lambda inputs: 1 / 0)
        assert isinstance(embedded(batching, INPUTS), Exception)
        monkeypatch.undo()
        assert isinstance(embedded(batching, INPUTS), list)


def test_groups_are_as_large_as_they_may_be_and_hold_everybody_once() -> None:
    inputs = [[0] * length for length in (5000, 3, 2000, 2000, 2000, 2000, 8192, 1)]
    groups = grouped(inputs)
    assert sorted(number for group in groups for number in group) == list(range(len(inputs)))
    assert all(len(group) * max(len(inputs[number]) for number in group) <= TOKENS_MAX for group in groups)
    assert len(groups) == 4


def test_pooling_is_what_the_models_folder_says(tmp_path: Path) -> None:
    config = random_model("bert").config
    assert pooling_of(tmp_path, config) == "mean"
    decoder = random_model("llama").config
    decoder.architectures = ["LlamaForCausalLM"]
    assert pooling_of(tmp_path, decoder) == "last"
    (tmp_path / "1_Pooling").mkdir()
    for key, pooling in (("pooling_mode_cls_token", "first"), ("pooling_mode_lasttoken", "last")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({key: True, "pooling_mode_mean_tokens": False}))
        assert pooling_of(tmp_path, config) == pooling
