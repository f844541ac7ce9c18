"""Input beyond what the loaded weights have is refused before it is computed: the model and its neighbours go on.

On a GPU an index beyond a table ends the process with all its models. On a CPU the step fails, which the worker logs:
none of these requests may get that far.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from greenroom.workers.torch_host.engine.model_shape import TokenLimits, token_limits
from greenroom.workers.torch_host.engine.requests import PromptTooLong, Sampling, UnknownToken
from tests.workers.torch_host.engine_rig import ask, generated, prompt, random_model, running, said
from tests.workers.torch_host.samples import tiny
from tests.workers.torch_host.worker_rig import WorkerRig

ROWS = 300
PAD = "<|image_pad|>"
# RoBERTa's positions begin after the id of its padding, which tiny models have as 2 and MPNet always as 1.
POSITIONS = 64
ROBERTA = {"model_type": "xlm-roberta", "max_position_embeddings": POSITIONS, "type_vocab_size": 1}
MPNET = {"model_type": "mpnet", "max_position_embeddings": POSITIONS}
LEFT = {"roberta": POSITIONS - 3, "mpnet": POSITIONS - 2}


def short_of_rows(folder: Path) -> Path:
    """A tokenizer with more entries than the model has rows, the last of them a special one."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tiny.make_model(folder, "llama", vocab_size=ROWS, template=template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [PAD]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    """One worker with a good model and models with small tables."""
    made = tmp_path_factory.mktemp("models")
    models: dict[str, tuple[Path, dict[str, Any]]] = {
        "good": (tiny.make_model(made / "good", "llama", seed=7), {}),
        "short": (short_of_rows(made / "short"), {}),
        "gpt2": (tiny.make_model(made / "gpt2", "gpt2", n_positions=POSITIONS), {}),
        "roberta": (tiny.make_model(made / "roberta", "bert", **ROBERTA), {"embedding": True}),
        "mpnet": (tiny.make_model(made / "mpnet", "bert", **MPNET), {"embedding": True}),
        "bert": (tiny.make_model(made / "bert", "bert", vocab_size=ROWS), {"embedding": True}),
        "filled": (tiny.make_model(made / "filled", "gpt2", vocab_size=ROWS, pad_token_id=380), {"embedding": True}),
    }
    folder = Path(tempfile.mkdtemp(prefix="gr-"))
    rig = WorkerRig(folder)
    memories = {slot: os.memfd_create("greenroom-arena") for slot in models}
    try:
        for slot, (path, options) in models.items():
            heard = rig.open(slot, path, memories[slot], **options)
            assert heard["ok"], heard
            rig.do("wake", slot=slot)
        yield rig
    finally:
        rig.end()
        shutil.rmtree(folder, ignore_errors=True)
        for memory in memories.values():
            os.close(memory)


def test_all_serve_before_anything_bad_is_asked(worker: WorkerRig) -> None:
    assert worker.complete("good")
    assert worker.complete("short", "abc")
    assert worker.complete("gpt2", "abc")
    # Of unequal lengths: the padding of the shorter one must be a known token too.
    for slot in ("roberta", "mpnet", "bert", "filled"):
        assert worker.post(slot, "/v1/embeddings", {"input": ["abc", "a"]})[0] == 200


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


BAD = [
    ("short", "/v1/completions", {"prompt": [5, ROWS], "max_tokens": 4}, "300"),
    ("short", "/v1/completions", {"prompt": [[5], [9, 383]], "max_tokens": 4}, "383"),
    ("short", "/v1/completions", {"prompt": [-1], "max_tokens": 4}, "prompt"),
    ("short", "/v1/completions", {"prompt": [2**63], "max_tokens": 4}, str(2**63)),
    ("short", "/v1/completions", {"prompt": [10**3000], "max_tokens": 4}, "1000000"),
    ("short", "/v1/completions", {"prompt": f"abc{PAD}", "max_tokens": 4}, PAD),
    ("short", "/v1/completions", {"prompt": "the capital of France", "max_tokens": 4}, "299"),
    ("short", "/v1/completions", {"prompt": "abc", "logit_bias": {"300": 5}}, "300"),
    ("short", "/v1/completions", {"prompt": "abc", "logit_bias": {"383": 5}}, "383"),
    ("short", "/v1/chat/completions", chat(PAD), PAD),
    ("short", "/v1/chat/completions", chat("the capital of France"), "299"),
    ("short", "/v1/chat/completions", {**chat("abc"), "logit_bias": {"384": 1}}, "384"),
    ("good", "/v1/completions", {"prompt": [tiny.VOCABULARY + 8], "max_tokens": 4}, "392"),
    ("bert", "/v1/embeddings", {"input": [5, ROWS]}, "300"),
    ("bert", "/v1/embeddings", {"input": [2**64]}, str(2**64)),
    ("bert", "/v1/embeddings", {"input": ["abc", "the capital of France"]}, "299"),
]


@pytest.mark.parametrize(("slot", "path", "body", "says"), BAD, ids=lambda one: str(one)[:40])
def test_a_token_without_a_row_is_refused_by_name(
    worker: WorkerRig, slot: str, path: str, body: dict[str, Any], says: str
) -> None:
    status, heard = worker.post(slot, path, body)
    assert status == 400, heard
    assert says in heard["error"]["message"]
    assert_unharmed(worker)


LONG = [
    ("gpt2", "/v1/completions", {"prompt": [5] * POSITIONS, "max_tokens": 1}),
    ("gpt2", "/v1/completions", {"prompt": "a" * 200, "max_tokens": 1}),
    ("gpt2", "/v1/chat/completions", chat("xyz " * 100)),
    ("roberta", "/v1/embeddings", {"input": [5] * (LEFT["roberta"] + 1)}),
    ("roberta", "/v1/embeddings", {"input": ["abc", "x" * (LEFT["roberta"] + 1)]}),
    ("mpnet", "/v1/embeddings", {"input": [5] * (LEFT["mpnet"] + 1)}),
]


@pytest.mark.parametrize(("slot", "path", "body"), LONG, ids=lambda one: str(one)[:40])
def test_more_tokens_than_positions_are_refused(worker: WorkerRig, slot: str, path: str, body: dict[str, Any]) -> None:
    status, heard = worker.post(slot, path, body)
    assert (status, heard["error"]["code"]) == (400, "context_length_exceeded")
    assert_unharmed(worker)


def test_where_truncate_asks_inputs_are_cut_to_the_positions(worker: WorkerRig) -> None:
    for slot, left in LEFT.items():
        status, heard = worker.post(slot, "/v1/embeddings", {"input": ["x" * 200], "truncate": True})
        assert (status, heard["usage"]["prompt_tokens"]) == (200, left)
        status, heard = worker.post(slot, "/v1/embeddings", {"input": [9_999] * 200, "truncate": True})
        assert (status, heard["error"]["code"]) == (400, "unknown_token")
    assert_unharmed(worker)


def test_the_last_position_can_be_used(worker: WorkerRig) -> None:
    for slot, left in LEFT.items():
        status, heard = worker.post(slot, "/v1/embeddings", {"input": [[5] * left, [6]]})
        assert status == 200, heard
    full = {"prompt": [5] * (POSITIONS - 8), "temperature": 0, "ignore_eos": True}
    status, heard = worker.post("gpt2", "/v1/completions", full)
    assert (status, heard["usage"]["completion_tokens"]) == (200, 8)
    assert_unharmed(worker)


def test_a_schema_is_held_to_with_the_tokens_there_are(worker: WorkerRig) -> None:
    body = {**chat("abc"), "response_format": {"type": "json_object"}, "max_tokens": 24, "seed": 5}
    status, heard = worker.post("short", "/v1/chat/completions", body)
    assert status == 200, heard
    assert heard["choices"][0]["message"]["content"].startswith("{")
    assert_unharmed(worker)


def assert_unharmed(worker: WorkerRig) -> None:
    assert worker.complete("good", "abc")
    assert worker.complete("short", "abc")
    assert "step failed" not in worker.log()
    assert "embedding failed" not in worker.log()


# --- the model's own side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "positions"),
    [
        ("llama", {}, None),
        ("gpt2", {"n_positions": 40}, 40),
        ("llama", {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 40}, 40),
        ("bert", {"max_position_embeddings": 40}, 40),
        ("bert", ROBERTA, LEFT["roberta"]),
        ("bert", MPNET, LEFT["mpnet"]),
    ],
)
def test_limits_are_what_the_tables_have(kind: str, changes: dict[str, Any], positions: int | None) -> None:
    limits = token_limits(random_model(kind, **{"vocab_size": ROWS, **changes}))
    assert (limits.tokens, limits.choices, limits.positions) == (ROWS, ROWS, positions)


def test_the_positions_of_pictures_do_not_count() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tiny.KINDS["gemma3"], "vocab_size": ROWS}
    changes = {"model_type": "gemma3", "text_config": text, "vision_config": vision, "image_token_index": 299}
    assert token_limits(random_model("gemma3", **changes)).positions is None


def test_a_smaller_table_of_one_layer_counts() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(ROWS, 4)
            self.embed_tokens_per_layer = torch.nn.Embedding(ROWS - 9, 4)
            # Neither is a table, whatever it is called.
            self.per_layer_model_projection = torch.nn.Linear(4, 7)
            self.position_projection = torch.nn.Linear(4, 7)
            self.post_norm = torch.nn.LayerNorm(4)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embed_tokens

    assert token_limits(Model()) == TokenLimits(ROWS - 9, ROWS - 9, None)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_projections_of_one_layer_do_not_count(kind: str) -> None:
    small = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": ROWS, "num_kv_shared_layers": 0}
    config = AutoConfig.for_model(**{**tiny.KINDS["gemma3"], **small, "model_type": kind, "vocab_size": ROWS})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert token_limits(model) == TokenLimits(ROWS, ROWS, None)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=3), Sampling(seed=3, top_k=1 << 31)])
def test_a_head_wider_than_the_embedding_never_says_what_cannot_be_read(sampling: Sampling) -> None:
    model = random_model("llama", vocab_size=ROWS)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, ROWS + 100, bias=False)
    # What lies beyond is always the likeliest.
    model.lm_head.weight.data.normal_(0, 0.3)
    model.lm_head.weight.data[ROWS:] *= 30
    assert token_limits(model).choices == ROWS
    with running(model) as engine:
        for length in (1, 7):
            tokens = said(engine, [token % ROWS for token in prompt(length)], 24, sampling).ids
            assert len(tokens) == 24
            assert max(tokens) < ROWS


def test_a_head_narrower_than_the_embedding_penalises_what_it_can() -> None:
    model = random_model("llama", vocab_size=ROWS)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, ROWS - 8, bias=False)
    with running(model) as engine:
        assert (engine.limits.tokens, engine.limits.choices) == (ROWS, ROWS - 8)
        sampling = Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
        answer = said(engine, [5, ROWS - 1, ROWS - 8], 12, sampling)
        assert answer.end.reason == "length"


def test_nothing_unknown_is_taken_into_a_batch() -> None:
    model = random_model("llama", vocab_size=ROWS)
    alone = generated(model, [5, 6, 7], 12)
    with running(model) as engine:
        good, answer = ask([5, 6, 7], 12)
        bad, _ = ask([5, ROWS], 12)
        with pytest.raises(UnknownToken, match=r"300.*299"):
            engine.submit(bad)
        biased, _ = ask([5], 12, Sampling(logit_bias={ROWS: 1.0}))
        with pytest.raises(UnknownToken, match=r"300.*299"):
            engine.submit(biased)
        engine.submit(good)
        assert answer.end.reason == "length"
        assert answer.ids == alone
        assert engine.in_flight == 0


def test_a_context_is_no_longer_than_the_table() -> None:
    with running(random_model("gpt2", n_positions=40), context=512) as engine:
        assert engine.context == 40
        with pytest.raises(PromptTooLong):
            engine.submit(ask([5] * 30, 11)[0])
        assert said(engine, [5] * 30, 10).end.reason == "length"
