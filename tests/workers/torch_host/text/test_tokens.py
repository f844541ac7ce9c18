from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.torch_host.text.tokens import INLINE_CHARS_MAX, Speller, TextCodec
from tests.workers.torch_host.samples import tokenizer_folders


async def test_a_long_text_is_encoded_beside_the_loop_and_is_the_same(byte_text: TextCodec) -> None:
    text = "the quick brown fox " * 20_000
    assert len(text) > INLINE_CHARS_MAX
    encoding = asyncio.create_task(byte_text.encode(text, False, 1_000_000, "prompt"))
    turns = 0
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 2, "the loop went on meanwhile"
    assert byte_text.decode(await encoding) == text


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(byte_text: TextCodec) -> None:
    with pytest.raises(ApiError, match="characters"):
        await byte_text.encode("x" * 10_000_000, False, 100, "prompt")


async def test_text_that_is_no_unicode_is_refused(byte_text: TextCodec) -> None:
    with pytest.raises(ApiError):
        await byte_text.encode("\ud800", False, 100, "prompt")


def test_every_token_that_ends_an_answer_is_known(tmp_path: Path) -> None:
    folder = tokenizer_folders.byte_level(tmp_path / "m", special=("<|eot|>", "<|eom|>"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": True}))
    assert TextCodec.load(folder).stop_tokens == {0, 1, 2}


def test_a_tokenizer_file_that_cuts_and_fills_up_is_told_not_to(tmp_path: Path) -> None:
    folder = tokenizer_folders.byte_level(tmp_path / "m")
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    said["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    said["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": tokenizer_folders.END,
    }
    path.write_text(json.dumps(said))
    text = TextCodec.load(folder)
    assert (
        text.decode(text.tokens_of("the cat sat on the mat and the dog", True)) == "the cat sat on the mat and the dog"
    )


@pytest.mark.parametrize("sample", ["the cat", "Grüße 你好 🙂", "a\n b"])
def test_tokens_are_spelled_by_their_bytes(byte_text: TextCodec, sentence_text: TextCodec, sample: str) -> None:
    for text, before in ((byte_text, ""), (sentence_text, " ")):
        speller = Speller(text.tokenizer)
        raw = b"".join(speller.spell(token)[1] for token in text.tokens_of(sample, False))
        assert raw.decode() == before + sample
        assert speller.spell(10_000_000) == ("", b"")


def test_a_special_token_is_spelled_as_it_is_written(byte_text: TextCodec) -> None:
    assert byte_text.speller.spell(0) == ("<|end|>", b"<|end|>")
