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

from tests import torch_python
from tests.samples import hf_folder, tiny_llm, tiny_whisper


def tiny(name: str, *, loop: bool = False, noise: bool = False, hidden: int = 128, layers: int = 2) -> Path:
    """A scripted Llama: answers " <name> says hello", or counts without end when it loops."""
    kind = ("loop" if loop else "noise" if noise else "hello") + f"-{hidden}x{layers}"
    maker = partial(tiny_llm.make_gguf, name=name, loop=loop, noise=noise, hidden=hidden, layers=layers)
    return _made(f"{name}-{kind}.gguf", maker)


def tiny_caller(name: str, call: str) -> Path:
    """A scripted Llama that makes this call of a tool, and after its result says what it always says."""
    kind = "caller-" + hashlib.sha256(call.encode()).hexdigest()[:16]
    return _made(f"{name}-{kind}.gguf", partial(tiny_llm.make_gguf, name=name, call=call))


def tiny_lora(name: str) -> Path:
    """An adapter for the scripted Llama of this name, with which it says " hello" only."""
    return _made(f"{name}-lora.gguf", partial(tiny_llm.make_lora_gguf, name=name))


def tiny_projector() -> Path:
    """A projector with which a scripted Llama takes images, and says what it always says."""
    return _made("mmproj.gguf", tiny_llm.make_projector_gguf)


def tiny_hf(name: str, *, loop: bool = False, noise: bool = False, hidden: int = 128, layers: int = 2) -> Path:
    """The same Llama as a folder for Transformers."""
    kind = ("loop" if loop else "noise" if noise else "hello") + f"-{hidden}x{layers}"
    maker = partial(tiny_llm.make_hf, name=name, loop=loop, noise=noise, hidden=hidden, layers=layers)
    return _made(f"{name}-{kind}", maker)


def tiny_torch(*kinds: str) -> Path:
    """A folder with a model of each of these architectures, with random weights, made by the Python that has torch."""
    return _made("-".join(kinds), partial(torch_python.make_models, kinds=kinds))


def tiny_pipelines(*kinds: str) -> Path:
    """A folder with a pipeline of each of these kinds, with random weights."""
    return _made("-".join(kinds), partial(torch_python.make_pipelines, kinds=kinds))


def tiny_embedding(name: str = "bag") -> Path:
    """A BERT that embeds texts by the words in them."""
    return _made(f"{name}-embedding.gguf", partial(tiny_llm.make_bert_gguf, name=name))


def tiny_reranker(name: str = "taste") -> Path:
    """A BERT that ranks documents by how much of them is the word "good"."""
    return _made(f"{name}-reranker.gguf", partial(tiny_llm.make_bert_gguf, name=name, rank=True))


def tiny_ears(text: str, *, hidden: int = 64, layers: int = 1, multilingual: bool = True) -> Path:
    """A Whisper model that hears these words in every 30 seconds of any sound."""
    kind = f"{'many' if multilingual else 'en'}-{hidden}x{layers}"
    maker = partial(tiny_whisper.make_whisper, text=text, hidden=hidden, layers=layers, multilingual=multilingual)
    return _made(f"{text.replace(' ', '-')}-{kind}-whisper", maker)


def _made(name: str, make: Callable[[Path], None]) -> Path:
    directory = _cache_dir()
    path = directory / name
    if not path.exists():
        made_in(directory, name, make)
    return path


def made_in(directory: Path, name: str, make: Callable[[Path], None]) -> None:
    """Have a file or folder of this name there: made beside it and renamed, so that no half of one is ever seen."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as workshop:
        draft = Path(workshop) / name
        make(draft)
        try:
            os.replace(draft, directory / name)
        except OSError:
            # A folder does not replace one that another process has finished meanwhile, which is as good.
            if not (directory / name).is_dir():
                raise


def _cache_dir() -> Path:
    files = (
        tiny_llm.__file__,
        hf_folder.__file__,
        tiny_whisper.__file__,
        torch_python.MAKER,
        torch_python.PIPELINE_MAKER,
    )
    makers = b"".join(Path(file).read_bytes() for file in files)
    source = hashlib.sha256(makers).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "greenroom-tests"
    try:
        (base / source).mkdir(parents=True, exist_ok=True)
    except OSError:
        # No home to write to, as for a bare user id in a container.
        base = Path(tempfile.gettempdir()) / f"greenroom-tests-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        (base / source).mkdir(exist_ok=True)
    return base / source
