from __future__ import annotations

import random

import pytest

from greenroom.workers.torch_host.text.tokens import HELD_TOKENS_MAX, Detokeniser, TextCodec

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
