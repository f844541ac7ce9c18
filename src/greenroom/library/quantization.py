"""Which files and which type a quantization asks for: other GGUF files of the same model, or a dtype.

Owns the words that callers may use. What is not on disk is refused with what there is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from greenroom.errors import BadRequest, shown
from greenroom.library.records import LibraryRecord, ModelKind

DTYPES: Final = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
_GGUF_NAMES: Final = {"fp16": "f16", "fp32": "f32"}


def choose(
    record: LibraryRecord, quantization: str, records: Iterable[LibraryRecord]
) -> tuple[LibraryRecord, str | None]:
    """The model of the same name with this quantization, and the dtype to load it with if that is what was asked for.

    Raises BadRequest.
    """
    wanted = quantization.lower()
    if record.kind is ModelKind.GGUF:
        alike = [one for one in records if _is_alike(one, record)]
        name = _GGUF_NAMES.get(wanted, wanted)
        found = next((one for one in alike if (one.quantization or "").lower() == name), None)
        if found is None:
            raise _refused(quantization, (one.quantization for one in alike))
        return found, None
    # `awq-4bit` is told by the files as awq, with or without its bits.
    own = (record.quantization or "").lower()
    if own and wanted.split("-")[0] == own.split("-")[0]:
        return record, None
    if wanted in DTYPES and not own:
        return record, DTYPES[wanted]
    raise _refused(quantization, [record.quantization or "fp16, bf16"])


def _is_alike(one: LibraryRecord, other: LibraryRecord) -> bool:
    if one.kind is not ModelKind.GGUF:
        return False
    if other.source.hub_id is not None:
        return one.source.hub_id == other.source.hub_id
    return os.path.dirname(one.path) == os.path.dirname(other.path) and _stem(one) == _stem(other)


def _stem(record: LibraryRecord) -> str:
    """The name of its file without the quantization."""
    name = os.path.basename(record.path).lower()
    return name.replace((record.quantization or "").lower(), "") if record.quantization else name


def _refused(quantization: str, there: Iterable[str | None]) -> BadRequest:
    known = ", ".join(sorted({one for one in there if one})) or "none"
    return BadRequest(
        f"This model is not on disk as {shown(quantization)}; there is {known}. POST /v1/models/download fetches more.",
        param="quantization",
    )
