"""Texts to tokens, and tokens to texts that come out as they were."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.torch_host.text.tokens import HELD_TOKENS_MAX, INLINE_CHARS_MAX, Detokeniser, Speller, TextCodec
from tests.workers.torch_host.samples import tokenizer_folders

TEXTS = [
    "the cat sat",
    " leading and  double  spaces ",
    "Grüße, 你好世界 🙂🙃👩‍👩‍👧",
    "a\n\n\tb",
    "\u200b\ufeffx",
    "naïve café",
]


def pieces(text: TextCodec, tokens: list[int], before: list[int] | None = None) -> list[str]:
    detokeniser = text.detokeniser(before or [])
    return [detokeniser.add(token) for token in tokens] + [detokeniser.end()]


@pytest.mark.parametrize("sample", TEXTS)
def test_byte_level_text_comes_out_as_it_was(byte_text: TextCodec, sample: str) -> None:
    said = pieces(byte_text, byte_text.tokens_of(sample, False))
    assert "".join(said) == sample
    assert not any("\ufffd" in piece for piece in said)


@pytest.mark.parametrize("sample", TEXTS)
def test_sentencepiece_text_comes_out_as_it_was(sentence_text: TextCodec, sample: str) -> None:
    said = pieces(sentence_text, sentence_text.tokens_of(sample, False))
    assert "".join(said) == sample
    assert not any("\ufffd" in piece for piece in said)


def test_a_continuation_keeps_its_space_and_an_answer_does_not_begin_with_one(sentence_text: TextCodec) -> None:
    before, after = sentence_text.tokens_of("the", True), sentence_text.tokens_of("cat", False)
    assert "".join(pieces(sentence_text, after, before)) == " cat"
    assert "".join(pieces(sentence_text, after)) == "cat"


def test_any_tokens_at_all_come_out_like_decoded_at_once(byte_text: TextCodec) -> None:
    draw = random.Random(7)
    for _ in range(200):
        # Whole characters beside each other: what is broken may be replaced differently piece by piece.
        sample = "".join(draw.choice("aé你🙂 \n") for _ in range(draw.randrange(1, 30)))
        raw = sample.encode()
        letters = [byte_text.tokenizer.convert_tokens_to_ids(letter) for letter in byte_letters(raw)]
        assert "".join(pieces(byte_text, letters)) == sample


def test_half_a_character_at_the_end_is_replaced(byte_text: TextCodec) -> None:
    letters = [byte_text.tokenizer.convert_tokens_to_ids(letter) for letter in byte_letters("🙂".encode()[:2])]
    said = pieces(byte_text, letters)
    assert said[:-1] == ["", ""]
    assert "\ufffd" in said[-1]


def test_noise_that_is_never_a_character_is_not_held_for_ever() -> None:
    detokeniser = Detokeniser(lambda tokens: "\ufffd" * len(tokens), frozenset())
    said = [detokeniser.add(7) for _ in range(HELD_TOKENS_MAX)]
    assert said == [""] * (HELD_TOKENS_MAX - 1) + ["\ufffd" * HELD_TOKENS_MAX]


def test_special_tokens_have_no_text_unless_they_are_spoken(byte_text: TextCodec) -> None:
    (end,) = byte_text.stop_tokens
    assert byte_text.detokeniser().add(end) == ""
    assert byte_text.detokeniser(spoken=[end]).add(end) == "<|end|>"


def byte_letters(raw: bytes) -> list[str]:
    """The letters byte-level tokenizers write these bytes with."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in raw]


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
