"""GGUF headers: the facts of good files, and one error for everything else, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.engines.estimates import gguf_header, gguf_tensors
from greenroom.engines.estimates.gguf_header import BadModelFile, GgufHeader, is_gguf, read_header, shards
from greenroom.errors import EngineFault
from tests.models import tiny, tiny_embedding, tiny_reranker

# The file is written anew for each example, so it may be shared by them.
HOSTILE = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def header(*keys: bytes, tensors: bytes = b"", tensor_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(tensor_count) + u64(len(keys)) + b"".join(keys) + tensors


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def read(directory: Path, content: bytes) -> GgufHeader:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return read_header(path)


def test_a_scripted_llama_says_what_it_is() -> None:
    found = read_header(tiny("alpha"))
    assert (found.architecture, found.name, found.context_length) == ("llama", "alpha", 4096)
    assert not found.is_embedding and not found.is_reranking
    assert found.file_type == gguf.LlamaFileType.MOSTLY_F16
    assert found.number("attention.head_count_kv") == 2 and found.number("block_count") == 2
    size = tiny("alpha").stat().st_size
    assert size * 0.9 < found.tensor_bytes < size


def test_encoders_are_told_from_rerankers() -> None:
    embedding, reranker = read_header(tiny_embedding()), read_header(tiny_reranker())
    assert (embedding.is_embedding, embedding.is_reranking) == (True, False)
    assert (reranker.is_embedding, reranker.is_reranking) == (False, True)


def test_a_named_pooling_makes_any_model_an_embedding_model(tmp_path: Path) -> None:
    assert read(tmp_path, header(ARCHITECTURE, key("llama.pooling_type", U32, u32(3)))).is_embedding
    assert not read(tmp_path, header(ARCHITECTURE, key("llama.pooling_type", U32, u32(0)))).is_embedding
    assert read(tmp_path, header(key("general.architecture", STRING, text("nomic-bert")))).is_embedding


def test_numbers_may_be_stated_layer_by_layer(tmp_path: Path) -> None:
    heads = key("llama.attention.head_count_kv", ARRAY, u32(U32) + u64(3) + u32(1) + u32(0) + u32(2))
    found = read(tmp_path, header(ARCHITECTURE, heads, key("llama.block_count", U32, u32(3))))
    assert found.per_layer("attention.head_count_kv", 3) == (1, 0, 2)
    assert found.per_layer("attention.head_count_kv", 5) == (1, 0, 2, 0, 0)
    assert found.per_layer("block_count", 2) == (3, 3)
    assert found.number("attention.head_count_kv") == 2 and found.number("missing", 7) == 7


def test_weights_are_counted_by_their_place(tmp_path: Path) -> None:
    names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.2.ffn_up_exps.weight", "output_norm.weight", "v.patch")
    tensors = b"".join(tensor(name, 8, 2, offset=number * 64) for number, name in enumerate(names))
    content = header(ARCHITECTURE, tensors=tensors, tensor_count=len(names))
    found = read(tmp_path, content + bytes(-len(content) % 32 + 64 * len(names))).weights
    assert found.layers == ((64, 0), (0, 0), (0, 64))
    assert (found.input_bytes, found.output_bytes, found.other_bytes) == (64, 64, 64)
    assert (found.embedding_bytes, found.vocabulary, found.has_head) == (64, 2, False)
    assert found.total_bytes == 64 * len(names)


def test_weights_of_a_real_model_add_up_to_its_tensors() -> None:
    found = read_header(tiny("alpha"))
    assert found.weights.has_head and len(found.weights.layers) == 2
    # Each tensor begins at a multiple of 32 bytes.
    assert 0 <= found.tensor_bytes - found.weights.total_bytes < 32 * 21


def test_every_tensor_type_of_the_format_has_its_size() -> None:
    assert {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}.items() <= gguf_tensors.BLOCKS.items()


def test_tensor_bytes_reach_to_the_end_of_the_last_tensor(tmp_path: Path) -> None:
    tensors = tensor("a", 32, 2, kind=8) + tensor("b", 8, offset=96)
    content = header(ARCHITECTURE, tensors=tensors, tensor_count=2)
    padding = -len(content) % 32
    whole = content + bytes(padding + 96 + 32)
    assert read(tmp_path, whole).tensor_bytes == 96 + 32
    with pytest.raises(BadModelFile, match=f"{len(whole) - 1:,} bytes of {len(whole):,}"):
        read(tmp_path, whole[:-1])


def test_all_shards_of_a_split_model_are_named(tmp_path: Path) -> None:
    content = header(ARCHITECTURE, key("split.count", U32, u32(3)))
    path = tmp_path / "big-00001-of-00003.gguf"
    path.write_bytes(content)
    names = [shard.name for shard in shards(path, read_header(path))]
    assert names == [f"big-0000{k}-of-00003.gguf" for k in (1, 2, 3)]
    other = tmp_path / "big.gguf"
    other.write_bytes(content)
    assert shards(other, read_header(other)) == (other,)


def test_is_gguf_looks_at_the_first_bytes_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"GGUF and nothing more")
    assert is_gguf(path)
    path.write_bytes(b"GGU")
    assert not is_gguf(path)
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "missing")
    assert not is_gguf("bad\0name")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "inside its header"),
        (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
        (header(ARCHITECTURE, version=1), "version is 1"),
        (header(ARCHITECTURE, version=0x0300_0000), "version is"),
        (header(), "architecture"),
        (header(key("general.architecture", U32, u32(1))), "architecture"),
        (header(ARCHITECTURE, key("x", 13, b"")), "no type 13"),
        (header(ARCHITECTURE, key("x", ARRAY, u32(ARRAY) + u64(1))), "no type 9"),
        (header(ARCHITECTURE, key("general.alignment", U32, u32(3))), "alignment is 3"),
        (header(ARCHITECTURE, key("general.alignment", U32, u32(2**31))), "alignment is"),
        (header(ARCHITECTURE, tensors=tensor("a", 1, 1, 1, 1, 1), tensor_count=1), "5 dimensions"),
        (header(ARCHITECTURE, tensors=tensor("a", *[2**63] * 4), tensor_count=1), "beyond"),
        (header(ARCHITECTURE, tensors=tensor("a", 1, offset=2**63), tensor_count=1), "beyond"),
        (header(tensor_count=2**60), "tensors"),
        (b"GGUF" + u32(3) + u64(0) + u64(2**64 - 1), "keys"),
        (b"GGUF" + u32(3) + u64(0) + u64(1) + u64(2**64 - 1), "longer than"),
        (header(ARCHITECTURE, key("x", ARRAY, u32(U64) + u64(2**61))), "longer than"),
        (header(ARCHITECTURE, key("x", ARRAY, u32(STRING) + u64(2**61))), "strings"),
        (header(ARCHITECTURE, key("x", ARRAY, u32(STRING) + u64(2) + u64(2**62) + u64(0))), "longer than"),
    ],
)
def test_bad_headers_are_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(BadModelFile, match=reason) as raised:
        read(tmp_path, content)
    assert isinstance(raised.value, EngineFault)
    assert "model.gguf" in raised.value.message


def test_what_is_no_file_is_refused_without_hanging(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, tmp_path / "missing", Path("/dev/zero"), Path("bad\0name")):
        with pytest.raises(BadModelFile):
            read_header(path)
    assert not is_gguf(fifo)


def test_numbers_that_no_model_has_are_not_believed(tmp_path: Path) -> None:
    huge = [key(f"llama.{name}", U64, u64(2**63)) for name in ("block_count", "attention.key_length", "context_length")]
    found = read(tmp_path, header(ARCHITECTURE, *huge))
    assert found.context_length == 0 and found.number("block_count") == 0
    assert found.per_layer("attention.key_length", 3) == (0, 0, 0)


def test_a_large_vocabulary_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    count = 100_000
    tokens = key("tokenizer.ggml.tokens", ARRAY, u32(STRING) + u64(count) + text("word") * count)
    started = time.process_time()
    tracemalloc.start()
    found = read(tmp_path, header(tokens, ARCHITECTURE))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.architecture == "llama"
    # Generous: it takes a twentieth of a second, or a few with the tracing of memory.
    assert time.process_time() - started < 20
    assert peak < gguf_header.HEADER_MAX_BYTES


def test_a_header_as_long_as_the_file_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + u32(3) + u64(0) + u64(2) + ARCHITECTURE + key("x", STRING, u64(2**32)))
        # The bytes it speaks of are there, at no cost on the disk.
        file.truncate(2**33)
    with pytest.raises(BadModelFile, match="longer than"):
        read_header(path)


@HOSTILE
@given(content=st.binary(max_size=400))
def test_any_bytes_give_a_header_or_the_one_error(tmp_path: Path, content: bytes) -> None:
    settle(tmp_path, content)
    settle(tmp_path, b"GGUF" + u32(3) + content)


@HOSTILE
@given(data=st.data())
def test_a_changed_or_cut_model_gives_a_header_or_the_one_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tiny("alpha").read_bytes()[:16_384])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(content) - 8))
        content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    settle(tmp_path, bytes(content[: data.draw(st.integers(0, len(content)))]))


def test_a_model_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = tiny("alpha").read_bytes()
    for end in [*range(0, 12_000, 37), len(content) // 2, len(content) - 64]:
        with pytest.raises(BadModelFile):
            read(tmp_path, content[:end])


def settle(directory: Path, content: bytes) -> None:
    try:
        found = read(directory, content)
    except BadModelFile:
        return
    assert found.architecture and found.tensor_bytes >= 0
