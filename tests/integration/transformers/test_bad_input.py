"""Folders that are broken, hostile or too large: each is refused with words that help, and nothing of it is left.

All lie in one gateway beside a model in order, whose worker must not mind: a model's files are input like any other.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway
from tests.integration.facts import at_rest, order, pid_of, view
from tests.integration.raw import Answer, chat
from tests.integration.transformers.facts import held, memfds, says
from tests.models import tiny_hf
from tests.torch_python import bring_own_attention, hosted

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
BAD_MODEL = (503, "bad_model")
A_LONG_WAY = 2**50


# --- how to spoil a folder ------------------------------------------------------------------------------------------


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    whole = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def write(folder: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)


def changed(**keys: Any) -> Callable[[Path], None]:
    """One tensor's entry in the header says something else."""

    def spoil(folder: Path) -> None:
        header, data = header_of(folder)
        header[QUERY] |= keys
        write(folder, header, data)

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def endless_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", A_LONG_WAY) + b"{}")


def no_json(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 16) + b"not json at all!" * 2)


def overlapping(folder: Path) -> None:
    header, data = header_of(folder)
    other = next(name for name in header if name.endswith("o_proj.weight"))
    header[QUERY]["data_offsets"] = header[other]["data_offsets"]
    write(folder, header, data)


def one_tensor_less(folder: Path) -> None:
    header, data = header_of(folder)
    header["model.layers.0.self_attn.query.weight"] = header.pop(QUERY)
    write(folder, header, data)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    # What a reader of pickles would run: nothing harmless begins like this.
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


def index_that_leads_out(folder: Path) -> None:
    header, _ = header_of(folder)
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    names = {name: "../../part.safetensors" for name in header if name != "__metadata__"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def config(**keys: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | keys))

    return spoil


def no_config_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@dataclass(frozen=True, slots=True)
class Bad:
    """How the folder is spoilt, and words the refusal must have."""

    spoil: Callable[[Path], None]
    words: tuple[str, ...]


BAD = {
    "no-folder": Bad(shutil.rmtree, ("there is no folder",)),
    "no-weights": Bad(without(WEIGHTS), ("safetensors",)),
    "no-config": Bad(without("config.json"), ("config.json",)),
    "half-config": Bad(no_config_json, ("config.json",)),
    "unknown-architecture": Bad(config(model_type="never-heard-of"), ("never-heard-of",)),
    "truncated": Bad(truncated, (WEIGHTS,)),
    "header-without-end": Bad(endless_header, (WEIGHTS,)),
    "header-no-json": Bad(no_json, (WEIGHTS,)),
    "unknown-dtype": Bad(changed(dtype="F99"), (QUERY, "F99")),
    "wrong-dtype": Bad(changed(dtype="F16"), (QUERY,)),
    "beyond-the-file": Bad(changed(data_offsets=[0, A_LONG_WAY]), (QUERY,)),
    "backwards": Bad(changed(data_offsets=[4096, 0]), (QUERY,)),
    "huge-shape": Bad(changed(shape=[2**31, 2**31]), (QUERY,)),
    "overlapping": Bad(overlapping, (QUERY,)),
    "wrong-shape": Bad(config(hidden_size=256), ("model.embed_tokens.weight", "256")),
    "tensor-missing": Bad(one_tensor_less, (QUERY,)),
    "pickle": Bad(pickled, ("allow_pickle",)),
    "leads-out": Bad(index_that_leads_out, ("..",)),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("bad")
    models = {"good": hosted(tiny_hf("good"))}
    for name, bad in BAD.items():
        spoilt = folder / "models" / name
        shutil.copytree(tiny_hf("good"), spoilt)
        bad.spoil(spoilt)
        # Nothing is declared: what it needs has to be found out from the folder too.
        models[name] = hosted(spoilt, memory_mib=None)
    own = folder / "models" / "own-attention"
    shutil.copytree(tiny_hf("good"), own)
    bring_own_attention(own)
    models |= {
        "own-attention": hosted(own, trust_remote_code=True),
        "unchecked": hosted(own, trust_remote_code=True, skip_check=True),
    }
    async with gateway(folder, models, memory={"spare_worker": False}) as app:
        await says(app, "good")
        yield app


async def refused(app: App, answer: Answer, model: str, *words: str) -> None:
    """A typed error that says which model, what is wrong with it, and no place in a program."""
    assert (answer.status, answer.error["code"]) == BAD_MODEL, answer.body
    assert answer.headers["x-should-retry"] == "false"
    message = answer.error["message"]
    assert model in message and "Traceback" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("name", sorted(BAD))
async def test_bad_folder_is_refused_and_nothing_is_left_of_it(app: App, name: str) -> None:
    memory, claims, pid = memfds(), held(app), await pid_of(app, "good")
    await refused(app, await chat(app, name), name, *BAD[name].words)
    seen = await view(app, name)
    assert (seen["tier"], seen["slots"], seen["memory"]) == ("cold", [], {})
    assert seen["last_error"]["code"] == "bad_model"
    assert (memfds(), held(app)) == (memory, claims)
    await says(app, "good")
    assert await pid_of(app, "good") == pid, "its worker did not mind"
    await at_rest(app)


async def test_a_model_that_answers_otherwise_is_refused_unless_an_operator_wants_it(app: App) -> None:
    memory, claims, pid = memfds(), held(app), await pid_of(app, "good")
    await refused(app, await chat(app, "own-attention"), "own-attention", "answers otherwise", "skip_check")
    assert (memfds(), held(app)) == (memory, claims)
    assert (await chat(app, "unchecked")).status == 200
    await says(app, "good")
    assert await pid_of(app, "good") == pid, "its worker did not mind"


async def test_prepare_of_a_bad_folder_is_refused_too(app: App) -> None:
    memory, claims = memfds(), held(app)
    await refused(app, await order(app, "prepare", "truncated"), "truncated", WEIGHTS)
    assert (memfds(), held(app)) == (memory, claims)
