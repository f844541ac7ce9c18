"""How engines are started: the argument list, the environment, and what is said when something is missing."""

import itertools
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Model
from greenroom.core.model import DeviceId
from greenroom.engines.base import LaunchPlace, Split, environment
from greenroom.engines.builtin.command import takes_free_memory
from greenroom.engines.builtin.llamacpp import WORKER, LlamaCppEngine
from greenroom.engines.registry import engine_for, facts_of
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

PLACE = LaunchPlace({}, socket="/run/x.sock")


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
    assert LlamaCppEngine().missing(Model(path=path, program=str(mine))) is None
    gone = LlamaCppEngine().missing(Model(path=path, program=str(tmp_path / "nowhere")))
    assert gone == f"there is no program {tmp_path}/nowhere; correct `program`"


@pytest.mark.parametrize("path", ["/" + "x" * 300 + ".gguf", "/dev/null/m.gguf", "/\0.gguf"])
def test_file_that_cannot_even_be_looked_at_fails_its_own_load_only(path: str) -> None:
    model = Model(path=path)
    assert LlamaCppEngine().estimate(model, 1) is None
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


def test_command_gets_its_port_after_it_was_split() -> None:
    model = Model(
        cmd="serve --name 'two words' --port ${PORT}",
        cmd_stop="stop ${PORT} ${PID}",
        env={"LISTEN": "127.0.0.1:${PORT}"},
        memory_mib=5,
    )
    launch = engine_for(model).launch("m", model, LaunchPlace({}, port=21_007))
    assert launch.command.argv == ("serve", "--name", "two words", "--port", "21007")
    assert launch.command.stop_argv == ("stop", "21007", "${PID}")
    assert launch.command.env["LISTEN"] == "127.0.0.1:21007"


def test_no_check_endpoint_means_being_up_is_enough() -> None:
    model = Model(cmd="serve", check_endpoint="none")
    assert engine_for(model).launch("m", model, LaunchPlace({}, port=1)).check_path is None


def test_engines_do_not_see_the_gateways_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("GREENROOM_API_KEY", "secret")
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = environment(Model(cmd="serve ${PORT}", env={"MINE": "1"}), PLACE)
    assert "secret" not in seen.values()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["MINE"]) == ("1", "1")
    assert "PATH" in seen and seen["VLLM_CPU_KVCACHE_SPACE"] == "2"


# --- on which GPUs --------------------------------------------------------------------------------------------------

ONE = DeviceId("GPU-a")
TWO = DeviceId("GPU-b")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def on(*gpus: DeviceId, **claim: int) -> LaunchPlace:
    """A place with these GPUs; `claim` is MiB by the last letter of their names."""
    return LaunchPlace({DeviceId(f"GPU-{name}"): mib for name, mib in claim.items()}, port=21_007, gpus=gpus)


def llama(folder: Path, place: LaunchPlace, **keys: Any) -> Command:
    return LlamaCppEngine().launch("m", Model(path=str(gguf(folder)), **keys), place).command


def command(place: LaunchPlace, cmd: str = "serve ${PORT}", **keys: Any) -> Command:
    model = Model(cmd=cmd, **keys)
    return engine_for(model).launch("m", model, place).command


FIRST_OF_THE_BUDGET = LaunchPlace({DeviceId("gpu1"): 5}, port=21_007, gpus=(DeviceId("gpu1"),))
ON_HOST = "--n-gpu-layers 0 --no-op-offload"


@pytest.mark.parametrize(
    ("place", "keys", "seen", "layers"),
    [
        pytest.param(on(ONE, TWO, a=4, b=5), {}, "GPU-a,GPU-b", None, id="those that it was given, in their order"),
        pytest.param(FIRST_OF_THE_BUDGET, {}, "1", None, id="a budget in the configuration is known by its number"),
        pytest.param(on(), {}, "", ON_HOST, id="none was given"),
        pytest.param(PLACE, {}, "7", None, id="there are none to plan with"),
        pytest.param(PLACE, {"device": "cpu", "n_gpu_layers": 5}, "", "--n-gpu-layers 0", id="device: cpu hides all"),
        pytest.param(on(), {"device": "cpu", "n_gpu_layers": 5}, "", "--n-gpu-layers 0", id="device: cpu, none given"),
        pytest.param(on(ONE, a=5), {"env": {VISIBLE: "1"}}, "1", None, id="the operator has the last word"),
    ],
)
def test_an_engine_sees_the_gpus_it_was_given(
    place: LaunchPlace,
    keys: dict[str, Any],
    seen: str,
    layers: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE, "7")
    started = llama(tmp_path, place, **keys)
    assert started.env[VISIBLE] == seen
    assert "--n-gpu-layers" not in started.argv if layers is None else layers in " ".join(started.argv)
    of_command = {key: value for key, value in keys.items() if key != "n_gpu_layers"}
    assert command(replace(place, port=1), **of_command).env[VISIBLE] == seen


def test_llama_cpp_is_split_in_proportion_to_its_claim(tmp_path: Path) -> None:
    said = dict(itertools.pairwise(llama(tmp_path, on(ONE, TWO, a=12_000, b=8_000)).argv))
    assert (said["--split-mode"], said["--tensor-split"]) == ("layer", "12000,8000")
    assert "--tensor-split" not in llama(tmp_path, on(ONE, a=12_000)).argv
    assert "--tensor-split" not in llama(tmp_path, on(ONE, TWO)).argv, "nothing was claimed, so it may choose"


def test_types_of_the_kv_cache_are_said(tmp_path: Path) -> None:
    said = dict(itertools.pairwise(llama(tmp_path, PLACE, cache_type_k="q8_0", cache_type_v="q4_0").argv))
    assert (said["--cache-type-k"], said["--cache-type-v"]) == ("q8_0", "q4_0")


def test_command_is_told_its_gpus_where_it_asks() -> None:
    cmd = "vllm serve --tensor-parallel-size ${GPU_COUNT} --port ${PORT} --split ${TENSOR_SPLIT} --on ${GPUS}"
    started = command(on(ONE, TWO, a=3, b=1), cmd, cmd_stop="free ${GPUS}", env={"SHARES": "${TENSOR_SPLIT}"})
    said = dict(itertools.pairwise(started.argv))
    assert (said["--tensor-parallel-size"], said["--split"], said["--on"]) == ("2", "3,1", "GPU-a,GPU-b")
    assert started.stop_argv == ("free", "GPU-a,GPU-b") and started.env["SHARES"] == "3,1"


def test_command_told_of_no_gpu_hears_zero() -> None:
    assert command(LaunchPlace({}, port=1), "serve ${PORT} ${GPU_COUNT} x${GPUS}").argv == ("serve", "1", "0", "x")


@pytest.mark.parametrize(
    ("keys", "how"),
    [
        ({"cmd": "serve ${PORT}"}, None),
        ({"cmd": "serve ${PORT} --tensor-parallel-size ${GPU_COUNT}"}, Split.EQUAL),
        ({"cmd": "serve ${PORT} ${GPU_COUNT} ${TENSOR_SPLIT}"}, Split.PROPORTIONAL),
        ({"cmd": ["serve", "${PORT}", "--gpus=${GPUS}"]}, Split.PROPORTIONAL),
        ({"cmd": "serve ${PORT}", "env": {"SPLIT": "${TENSOR_SPLIT}"}}, Split.PROPORTIONAL),
        ({"path": "/m.gguf"}, Split.PROPORTIONAL),
    ],
)
def test_command_can_be_split_only_if_it_asks_for_its_gpus(keys: dict[str, Any], how: Split | None) -> None:
    model = Model(**keys)
    assert engine_for(model).facts(model).can_split is how


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve Qwen/Qwen3-8B --port 1",
        "/opt/vllm/bin/vllm serve /models/qwen",
        "uv run --with vllm vllm serve x",
        "python -m vllm.entrypoints.openai.api_server --model x",
        "python3 -m sglang.launch_server --model-path x",
        "sglang serve --model-path x",
        "lmdeploy serve api_server x",
        "trtllm-serve x --port 1",
        "docker run --gpus all vllm/vllm-openai:v0.11.0 --model x",
        "docker run --gpus all registry.local:5000/vllm/vllm-openai@sha256:0a1b --model x",
        "podman run docker.io/lmsysorg/sglang@sha256:00 python3 -m sglang.launch_server",
        "text-generation-launcher --model-id x",
    ],
)
def test_programs_that_take_all_free_memory_are_recognised(command: str) -> None:
    assert takes_free_memory(command.split())
    assert facts_of(Model(cmd=f"{command} ${{PORT}}")).sizes_itself


@pytest.mark.parametrize(
    "command",
    [
        "llama-server -m /models/vllm/serve.gguf",
        "vllm bench",
        "python -m http.server",
        "whisper-server --model vllm",
        "",
    ],
)
def test_other_programs_are_not_taken_for_them(command: str) -> None:
    assert not takes_free_memory(command.split())


def test_operator_has_the_last_word_on_whether_an_engine_sizes_itself(tmp_path: Path) -> None:
    known, unknown = Model(cmd="vllm serve x ${PORT}", sizes_itself=False), Model(cmd="x ${PORT}", sizes_itself=True)
    assert not facts_of(known).sizes_itself
    assert facts_of(unknown).sizes_itself
    assert not facts_of(Model(path=str(gguf(tmp_path)))).sizes_itself
