"""How engines are started: the argument list, the environment, and what is said when something is missing."""

import itertools
import stat
from pathlib import Path

import pytest

from greenroom.config.schema import Model
from greenroom.core.model import Need
from greenroom.engines.base import Ability, Place, environment
from greenroom.engines.llamacpp import WORKER, LlamaCppEngine
from greenroom.engines.registry import engine_for
from greenroom.errors import LoadFailed

PLACE = Place({}, socket="/run/x.sock")


def gguf(folder: Path, name: str = "m.gguf", mib: int = 10) -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(mib * 1024 * 1024)
    return path


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_engine_is_inferred_from_file_or_command(tmp_path: Path) -> None:
    assert engine_for(Model(path=str(gguf(tmp_path)))).name == "llamacpp"
    assert engine_for(Model(cmd="serve ${PORT}")).name == "command"


def test_llama_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    binary = program(tmp_path, "llama-server")
    launch = LlamaCppEngine().launch("m", Model(path=str(gguf(tmp_path))), PLACE)
    assert launch.command.argv[0] == str(binary)


def test_embedded_build_is_used_without_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = LlamaCppEngine().launch("m", Model(path=str(gguf(tmp_path))), PLACE)
    assert launch.command.argv[1] == str(WORKER)
    assert launch.check_path == "/health"


def test_configured_program_wins_and_must_exist(tmp_path: Path) -> None:
    mine = program(tmp_path, "my-server")
    path = str(gguf(tmp_path))
    assert LlamaCppEngine().launch("m", Model(path=path, program=str(mine)), PLACE).command.argv[0] == str(mine)
    with pytest.raises(LoadFailed, match="nowhere"):
        LlamaCppEngine().launch("m", Model(path=path, program=str(tmp_path / "nowhere")), PLACE)


@pytest.mark.parametrize("path", ["/" + "x" * 300 + ".gguf", "/dev/null/m.gguf", "/\0.gguf"])
def test_file_that_cannot_even_be_looked_at_fails_its_own_load_only(path: str) -> None:
    model = Model(path=path)
    assert LlamaCppEngine().need(model) == Need(0, 0)
    with pytest.raises(LoadFailed, match="there is no file"):
        LlamaCppEngine().launch("m", model, PLACE)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"gone\.gguf"):
        LlamaCppEngine().launch("m", Model(path=str(tmp_path / "gone.gguf")), PLACE)


def test_model_keys_become_arguments_and_extra_ones_come_last(tmp_path: Path) -> None:
    model = Model(
        path=str(gguf(tmp_path)),
        ctx_size=2048,
        n_gpu_layers=7,
        flash_attn="on",
        parallel=3,
        threads=2,
        embedding=True,
        args=("--rope-scaling", "none"),
    )
    argv = LlamaCppEngine().launch("org/name", model, PLACE).command.argv
    said = dict(itertools.pairwise(argv))
    assert said["--alias"] == "org/name" and said["--host"] == "/run/x.sock"
    assert (said["--ctx-size"], said["--n-gpu-layers"], said["--flash-attn"]) == ("2048", "7", "on")
    assert (said["--parallel"], said["--threads"], said["--ubatch-size"]) == ("3", "2", "2048")
    assert "--embedding" in argv and argv[-2:] == ("--rope-scaling", "none")


def test_need_is_declared_or_estimated_from_the_file(tmp_path: Path) -> None:
    engine, path = LlamaCppEngine(), str(gguf(tmp_path, mib=100))
    assert engine.need(Model(path=path, memory_mib=77, host_memory_mib=5)) == Need(77, 5)
    assert engine.need(Model(path=path)) == Need(111, 0)
    assert engine.need(Model(path=path, n_gpu_layers=0)) == Need(0, 111)
    assert engine.need(Model(path=str(tmp_path / "gone.gguf"))) == Need(0, 0)


def test_all_parts_of_a_split_file_count(tmp_path: Path) -> None:
    first = gguf(tmp_path, "big-00001-of-00002.gguf", mib=50)
    gguf(tmp_path, "big-00002-of-00002.gguf", mib=50)
    assert LlamaCppEngine().need(Model(path=str(first))) == Need(111, 0)


def test_abilities_follow_the_mode(tmp_path: Path) -> None:
    engine, path = LlamaCppEngine(), str(gguf(tmp_path))
    assert engine.abilities(Model(path=path)) == {Ability.CHAT, Ability.COMPLETIONS}
    assert engine.abilities(Model(path=path, embedding=True)) == {Ability.EMBEDDINGS}
    assert engine.abilities(Model(path=path, reranking=True)) == {Ability.RERANK}


def test_command_gets_its_port_after_it_was_split() -> None:
    model = Model(
        cmd="serve --name 'two words' --port ${PORT}",
        cmd_stop="stop ${PORT} ${PID}",
        env={"LISTEN": "127.0.0.1:${PORT}"},
        memory_mib=5,
    )
    launch = engine_for(model).launch("m", model, Place({}, port=21_007))
    assert launch.command.argv == ("serve", "--name", "two words", "--port", "21007")
    assert launch.command.stop_argv == ("stop", "21007", "${PID}")
    assert launch.command.env["LISTEN"] == "127.0.0.1:21007"


def test_no_check_endpoint_means_being_up_is_enough() -> None:
    model = Model(cmd="serve", check_endpoint="none")
    assert engine_for(model).launch("m", model, Place({}, port=1)).check_path is None


def test_engines_do_not_see_the_gateways_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("GREENROOM_API_KEY", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = environment(Model(cmd="serve ${PORT}", env={"MINE": "1"}))
    assert "secret" not in seen.values()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["MINE"]) == ("1", "1")
    assert "PATH" in seen
