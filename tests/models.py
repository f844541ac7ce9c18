"""The tiny models tests ask for, made once and kept.

Owns a cache directory of the user's, keyed by the maker's source: changing the maker makes new files. Safe when several
test runs make the same file at once: each writes its own and renames it into place.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests import tiny_llm


def tiny(name: str, *, loop: bool = False, noise: bool = False, hidden: int = 128, layers: int = 2) -> Path:
    """A scripted Llama: answers " <name> says hello", or counts without end when it loops."""
    kind = ("loop" if loop else "noise" if noise else "hello") + f"-{hidden}x{layers}"
    maker = partial(tiny_llm.make_gguf, name=name, loop=loop, noise=noise, hidden=hidden, layers=layers)
    return _made(f"{name}-{kind}.gguf", maker)


def tiny_embedding(name: str = "bag") -> Path:
    """A BERT that embeds texts by the words in them."""
    return _made(f"{name}-embedding.gguf", partial(tiny_llm.make_bert_gguf, name=name))


def tiny_reranker(name: str = "taste") -> Path:
    """A BERT that ranks documents by how much of them is the word "good"."""
    return _made(f"{name}-reranker.gguf", partial(tiny_llm.make_bert_gguf, name=name, rank=True))


def _made(file_name: str, make: Callable[[Path], None]) -> Path:
    directory = _cache_dir()
    path = directory / file_name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as workshop:
            draft = Path(workshop) / file_name
            make(draft)
            os.replace(draft, path)
    return path


def _cache_dir() -> Path:
    source = hashlib.sha256(Path(tiny_llm.__file__).read_bytes()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "greenroom-tests"
    try:
        (base / source).mkdir(parents=True, exist_ok=True)
    except OSError:
        # No home to write to, as for a bare user id in a container.
        base = Path(tempfile.gettempdir()) / f"greenroom-tests-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        (base / source).mkdir(exist_ok=True)
    return base / source
