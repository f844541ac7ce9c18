"""Tokenizers made by code, each saved as a folder like those models come in, with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END = "<|end|>"
LINES = [
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat",
    "hello world, how are you? I am fine, thank you. Paris is the capital of France.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "Grüße aus Köln 你好世界 🙂🙃",
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}CALL {{ call.function.arguments | tojson }}\n{% endfor %}{% endfor %}"
    "{% if tools %}TOOLS {{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
    "{% if shouts %}!{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LOOPING = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"


def byte_level(folder: Path, template: str | None = TEMPLATE, special: tuple[str, ...] = ()) -> Path:
    """Like GPT-2's and Llama 3's: every byte is a letter, so that any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[END, *special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    return _saved(tokenizer, folder, template)


def sentencepiece(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Like Llama 2's: spaces are letters, unknown characters are bytes, and a text begins with a hidden space."""
    vocabulary = {END: 0, "<s>": 1, "<unk>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in sorted(set("▁" + "".join(LINES[:3]))):
        vocabulary.setdefault(letter, len(vocabulary))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "a")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([END, "<s>", "<unk>"])
    return _saved(tokenizer, folder, template)


def _saved(tokenizer: Tokenizer, folder: Path, template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
