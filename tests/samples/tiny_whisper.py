"""A tiny Whisper for CTranslate2 that is made in a second and says what it is told to, whatever it hears.

Encoder and attention hold small random weights and are really computed. The feed-forward layer of the decoder is a
table of which token follows which: each token of the script has a direction of its own, and reading it writes the next.
A window of 30 seconds is answered by one segment for each word of the script.

Made with CTranslate2's own description of a Whisper model, so that neither torch nor transformers are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As in the models of OpenAI: text, end, start, languages, tasks, then a timestamp for every fiftieth of a second.
TEXT_TOKENS = 50_257
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su"
)
LANGUAGES = _LANGUAGES.split()
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
TIMESTAMPS = 1_501
FRAMES, POSITIONS, MELS = 1_500, 448, 80
HEADS = 4
# A gate of the table opens for its own token and stays shut for all others, whose directions are orthogonal.
SHARPNESS, THRESHOLD, LOUDNESS = 4.0, 3.0, 40.0
TEMPERATURE = 3.0


def make_whisper(folder: Path, text: str, *, hidden: int = 64, layers: int = 1, multilingual: bool = True) -> None:
    """A folder as faster-whisper reads it. `hidden` is a multiple of 4 and more than twice the words of the text."""
    import ctranslate2

    words = text.split()
    languages = LANGUAGES if multilingual else []
    tokens, merges = _text_tokens(words)
    if multilingual:
        # By this token CTranslate2 tells the models of many languages.
        tokens[-1] = ""
    special = _special_tokens(languages)
    times = [f"<|{step * 0.02:.2f}|>" for step in range(TIMESTAMPS)]
    names = [*tokens, *special, *times]
    ids = {name: number for number, name in enumerate(names)}
    table = {ids[name]: ids[after] for name, after in _script(words, languages)}
    embeddings, following = _embeddings(len(names), hidden, table)
    spec = ctranslate2.specs.WhisperSpec(layers, HEADS, layers, HEADS)
    _fill_encoder(spec.encoder, hidden)
    _fill_decoder(spec.decoder, hidden, embeddings, following)
    spec.register_vocabulary(names)
    spec.config.suppress_ids, spec.config.suppress_ids_begin = [], [ids["<|endoftext|>"]]
    spec.config.lang_ids = [ids[f"<|{one}|>"] for one in languages]
    spec.config.alignment_heads = [[layers - 1, head] for head in range(HEADS)]
    spec.validate()
    spec.optimize(quantization="int8")
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    _write_tokenizer(folder, tokens, merges, [*special, *times])


# --- what follows what ----------------------------------------------------------------------------------------------


def _script(words: Sequence[str], languages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word is a segment of one second. A segment ends and the next begins with timestamps of their own."""
    start = "<|0.00|>"
    yield "<|startoftranscript|>", "<|en|>" if languages else start
    yield "<|en|>", "<|transcribe|>"
    for task in ("<|transcribe|>", "<|translate|>"):
        yield task, start
    yield "<|notimestamps|>", "Ġ" + words[0]
    for second, word in enumerate(words, 1):
        yield start, "Ġ" + word
        yield "Ġ" + word, f"<|{second:.2f}|>"
        start = f"<|{second + 0.02:.2f}|>"
        yield f"<|{second:.2f}|>", "<|endoftext|>" if second == len(words) else start


def _embeddings(count: int, hidden: int, table: dict[int, int]) -> tuple[Any, list[tuple[Any, Any]]]:
    """An embedding for every token, and the pairs of directions that the table turns one into the other."""
    used = sorted({*table, *table.values()})
    assert len(used) < hidden, "make it wider: every token of the script needs a direction of its own"
    rng = np.random.default_rng(7)
    # Orthogonal directions without a mean, which layer norm would take away.
    basis = np.linalg.qr(np.concatenate([np.ones((hidden, 1)), rng.normal(size=(hidden, hidden - 1))], axis=1))[0].T
    directions = dict(zip(used, basis[1:], strict=False))
    embeddings = np.zeros((count, hidden), np.float32)
    for token, direction in directions.items():
        embeddings[token] = direction
    return embeddings, [(directions[token], directions[after]) for token, after in table.items()]


def _text_tokens(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """All bytes, the words of the script letter by letter, then names for what is left of the vocabulary."""
    tokens = list(_byte_letters())
    merges = []
    for word in words:
        known = "Ġ"
        for letter in word:
            if known + letter not in tokens:
                merges.append((known, letter))
                tokens.append(known + letter)
            known += letter
    return [*tokens, *(f"unused{number}" for number in range(len(tokens), TEXT_TOKENS))], merges


def _byte_letters() -> Iterator[str]:
    """The letters that byte-level tokenizers write bytes with: themselves where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    beyond = 0x100
    for byte in range(256):
        yield chr(byte if byte in printable else beyond)
        beyond += byte not in printable


def _special_tokens(languages: Sequence[str]) -> list[str]:
    names = ("endoftext", "startoftranscript", *(languages or ("en",)), *TASKS)
    return [f"<|{name}|>" for name in names]


# --- weights --------------------------------------------------------------------------------------------------------


def _fill_encoder(encoder: Any, hidden: int) -> None:
    rng = np.random.default_rng(1)
    for convolution, width in ((encoder.conv1, MELS), (encoder.conv2, hidden)):
        convolution.weight = _random(rng, hidden, width, 3)
        convolution.bias = np.zeros(hidden, np.float32)
    encoder.position_encodings.encodings = _random(rng, FRAMES, hidden)
    _norm(encoder.layer_norm, hidden)
    for layer in encoder.layer:
        _attention(layer.self_attention, rng, hidden, queries=3)
        _feed_forward(layer.ffn, _random(rng, hidden * 4, hidden), _random(rng, hidden, hidden * 4))


def _fill_decoder(decoder: Any, hidden: int, embeddings: Any, following: list[tuple[Any, Any]]) -> None:
    rng = np.random.default_rng(2)
    decoder.embeddings.weight = embeddings
    decoder.projection.weight = embeddings
    # Tokens say all; their places say nothing.
    decoder.position_encodings.encodings = np.zeros((POSITIONS, hidden), np.float32)
    _norm(decoder.layer_norm, hidden, TEMPERATURE)
    wide = hidden * 4
    for layer in decoder.layer:
        _attention(layer.self_attention, rng, hidden, queries=3, quiet=True)
        _attention(layer.attention, rng, hidden, queries=1, quiet=True)
        _feed_forward(layer.ffn, _random(rng, wide, hidden), np.zeros((hidden, wide), np.float32))
    inner, outer = np.zeros((wide, hidden), np.float32), np.zeros((hidden, wide), np.float32)
    for row, (token, after) in enumerate(following):
        inner[row] = SHARPNESS * token
        outer[:, row] = LOUDNESS * after / np.sqrt(hidden)
    _feed_forward(decoder.layer[-1].ffn, inner, outer)
    decoder.layer[-1].ffn.linear_0.bias[:] = -THRESHOLD * np.sqrt(hidden)


def _attention(attention: Any, rng: Any, hidden: int, *, queries: int, quiet: bool = False) -> None:
    """Keys and values come from the text itself (`queries` is 3) or from the sound (1). `quiet`: adds nothing."""
    _norm(attention.layer_norm, hidden)
    first, *rest = attention.linear
    sizes = [hidden * queries, *([2 * hidden] if queries == 1 else [])]
    for linear, size in zip([first, *rest[:-1]], sizes, strict=True):
        _linear(linear, _random(rng, size, hidden))
    _linear(rest[-1], np.zeros((hidden, hidden), np.float32) if quiet else _random(rng, hidden, hidden))


def _feed_forward(layer: Any, inner: Any, outer: Any) -> None:
    _norm(layer.layer_norm, inner.shape[1])
    _linear(layer.linear_0, inner)
    _linear(layer.linear_1, outer)


def _linear(layer: Any, weight: Any) -> None:
    layer.weight, layer.bias = weight, np.zeros(weight.shape[0], np.float32)


def _norm(layer: Any, hidden: int, scale: float = 1.0) -> None:
    layer.gamma, layer.beta = np.full(hidden, scale, np.float32), np.zeros(hidden, np.float32)


def _random(rng: Any, *shape: int) -> Any:
    return (rng.normal(size=shape) * 0.02).astype(np.float32)


# --- files ----------------------------------------------------------------------------------------------------------


def _write_tokenizer(folder: Path, tokens: list[str], merges: list[tuple[str, str]], added: list[str]) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": TEXT_TOKENS + number, "content": name, "special": not name[2].isdigit(), **plain}
            for number, name in enumerate(added)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: number for number, name in enumerate(tokens)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": MELS}))
