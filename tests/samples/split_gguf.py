"""A GGUF file in two parts, as llama.cpp's own tool splits one."""

from __future__ import annotations

from pathlib import Path

import gguf


def split_gguf(path: Path, first: Path, second: Path) -> None:
    """All keys in the first file, tensors in both, in the second three keys only."""
    source = gguf.GGUFReader(path)
    writers = [gguf.GGUFWriter(first, "llama"), gguf.GGUFWriter(second, "", use_temp_file=False)]
    for name in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"):
        writers[0].add_uint32(f"llama.{name}", int(source.fields[f"llama.{name}"].parts[-1][0]))
    for number, writer in enumerate(writers):
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in list(source.tensors)[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
