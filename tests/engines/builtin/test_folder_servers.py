"""vLLM and SGLang: their command lines, what their folder tells, what they are given, and how a wake is proved."""

from __future__ import annotations

import itertools
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.config.schema import Ability, Config, Model
from greenroom.core.model import DeviceId, ModelId, Need
from greenroom.engines.base import CacheFigures, Launch, LaunchPlace, ProcessEngine, Split, equal_counts
from greenroom.engines.builtin.sglang import SglangEngine
from greenroom.engines.builtin.vllm import VllmEngine, utilization
from greenroom.engines.estimates.hf_folder import CONTEXT_MIB
from greenroom.engines.registry import engine_for
from greenroom.errors import LoadFailed
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.memory.needs import Needs, Subject
from tests.samples.hf_folder import write_json, write_safetensors

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1_000,
    "max_position_embeddings": 8_192,
    "torch_dtype": "float16",
}
MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with 16 MiB of weights."""
    there = tmp_path / "model"
    there.mkdir()
    write_json(there / "config.json", SHAPE)
    write_safetensors(there / "model.safetensors", {"w": np.zeros(8 * MIB, np.float16)})
    return there


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def model(engine: str, folder: Path, **keys: Any) -> Model:
    return Model(engine=engine, path=str(folder), **{"program": str(program(folder.parent, engine)), **keys})


def on(*gpus: DeviceId, mib: int = 10_000, total: int = 20_000, free: int = 16_000) -> LaunchPlace:
    count = len(gpus)
    claim = dict.fromkeys(gpus, mib)
    return LaunchPlace(claim, 21_007, "/run/x.sock", gpus, (total,) * count, (free,) * count)


def started(said: Model, place: LaunchPlace) -> Launch:
    engine = engine_for(said)
    assert isinstance(engine, ProcessEngine)
    return engine.launch("org/name", said, place)


def words(launch: Launch) -> dict[str, str]:
    return dict(itertools.pairwise((*launch.command.argv, "")))


# --- command lines ------------------------------------------------------------------------------------------------


def test_keys_become_arguments_of_vllm_and_extra_ones_come_last(folder: Path) -> None:
    keys = {"ctx_size": 2_048, "concurrency": 3, "dtype": "float16", "quantization": "fp8", "trust_remote_code": True}
    launch = started(model("vllm", folder, **keys, args=("--seed", "1")), on(A))
    said, argv = words(launch), launch.command.argv
    assert argv[1:5] == ("serve", str(folder), "--uds", "/run/x.sock")
    assert (said["--served-model-name"], said["--max-model-len"], said["--max-num-seqs"]) == ("org/name", "2048", "3")
    assert (said["--dtype"], said["--quantization"], said["--tensor-parallel-size"]) == ("float16", "fp8", "1")
    assert {"--trust-remote-code", "--enable-sleep-mode", "--enable-prefix-caching"} <= set(argv)
    assert argv[-2:] == ("--seed", "1") and launch.check_path == "/health"
    assert launch.command.env["VLLM_SERVER_DEV_MODE"] == "1" and launch.command.env["HF_HUB_OFFLINE"] == "1"
    assert launch.command.env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert launch.command.env["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_vllm_fetches_media_from_listed_hosts_alone(folder: Path) -> None:
    argv = started(model("vllm", folder, media_hosts=("a.example.org", "b.example.org")), on(A)).command.argv
    at = argv.index("--allowed-media-domains")
    assert argv[at + 1 : at + 3] == ("a.example.org", "b.example.org") and argv[at + 3].startswith("--")
    assert words(started(model("vllm", folder), on(A)))["--allowed-media-domains"].endswith(".invalid"), "none"


def test_keys_become_arguments_of_sglang(folder: Path) -> None:
    launch = started(model("sglang", folder, ctx_size=2_048, concurrency=3), on(A, B))
    said, argv = words(launch), launch.command.argv
    assert argv[1:4] == ("serve", "--model-path", str(folder))
    assert (said["--host"], said["--port"], said["--tp-size"]) == ("127.0.0.1", "21007", "2")
    assert (said["--context-length"], said["--max-running-requests"]) == ("2048", "3")
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics"} <= set(argv)
    assert "--trust-remote-code" not in argv


def test_prefixes_are_not_kept_where_the_operator_says_so(folder: Path) -> None:
    said = model("vllm", folder, prefix_caching=False)
    argv = started(said, on(A)).command.argv
    assert "--no-enable-prefix-caching" in argv and "--enable-prefix-caching" not in argv
    assert not engine_for(said).facts(said).keeps_prefixes
    assert "--disable-radix-cache" in started(model("sglang", folder, prefix_caching=False), on(A)).command.argv


def test_environment_of_the_operator_wins(folder: Path) -> None:
    launch = started(model("vllm", folder, env={"HF_HUB_OFFLINE": "0"}), on(A))
    assert launch.command.env["HF_HUB_OFFLINE"] == "0"


def test_on_the_host_nothing_is_said_of_gpus_and_the_cache_has_its_size(folder: Path) -> None:
    for place, keys in ((LaunchPlace({}, 1, "/s", None), {}), (on(A), {"device": "cpu"})):
        argv = started(model("vllm", folder, ctx_size=1_024, concurrency=2, **keys), place).command.argv
        assert not {"--enable-sleep-mode", "--gpu-memory-utilization", "--tensor-parallel-size"} & set(argv)
        # 2 × 1,024 tokens of 4 layers, each 2 × 64 numbers of two bytes.
        assert words_of(argv)["--kv-cache-memory-bytes"] == "2M"
    assert "--device" in started(model("sglang", folder, device="cpu"), on(A)).command.argv


def words_of(argv: tuple[str, ...]) -> dict[str, str]:
    return dict(itertools.pairwise(argv))


# --- the claim is the truth ---------------------------------------------------------------------------------------


def test_share_of_the_gpu_is_the_claim_without_the_context(folder: Path) -> None:
    share = float(words(started(model("vllm", folder), on(A)))["--gpu-memory-utilization"])
    assert share == pytest.approx((10_000 - CONTEXT_MIB) / 20_000, abs=0.0001)


def test_share_is_never_more_than_the_claim_on_any_gpu() -> None:
    place = LaunchPlace({A: 10_000, B: 10_000}, gpus=(A, B), total_mib=(20_000, 40_000))
    share = utilization(place)
    assert share is not None and share * 40_000 + CONTEXT_MIB <= 10_000


def test_without_a_claim_no_share_is_said(folder: Path) -> None:
    place = LaunchPlace({}, 1, "/s", (A,), (20_000,), (20_000,))
    assert "--gpu-memory-utilization" not in started(model("vllm", folder), place).command.argv
    assert "--mem-fraction-static" not in started(model("sglang", folder), place).command.argv


def test_sglang_counts_by_what_is_free_and_without_what_is_beside_its_pools(folder: Path) -> None:
    engine, said = SglangEngine(), model("sglang", folder)
    share = engine.static_share(said, on(A, mib=10_000, free=16_000))
    whole = engine.static_share(said, on(A, mib=16_000, free=16_000))
    assert share is not None and whole is not None and share < 10_000 / 16_000 < whole < 1
    parts = {part.what: part.gpu_mib for part in engine.estimate(said, 1).parts}  # type: ignore[union-attr]
    beside = sum(parts[what] for what in ("compute buffers", "graphs", "context"))
    assert share * 16_000 == pytest.approx(10_000 - beside, abs=2)


async def test_measured_memory_does_not_raise_the_need_of_what_fills_its_claim(folder: Path) -> None:
    """Otherwise each start would be given what the last one took beyond its share, and take more."""
    needs, said = Needs(gpus={A: "fake"}), model("vllm", folder)
    subject = Subject(ModelId("m"), said, VllmEngine())
    need, _ = needs.need_of(subject)
    needs.measured(subject, {A: need.gpu_mib + 700})
    assert needs.account_of(subject).need == need
    await needs.close()


def test_over_several_gpus_a_context_and_buffers_are_planned_on_each(folder: Path) -> None:
    said, engine = model("vllm", folder, cache_tokens=8 * MIB), VllmEngine()
    one, two = engine.estimate(said, 1), engine.estimate(said, 2)
    assert one is not None and two is not None and two.need.gpu_mib - one.need.gpu_mib > CONTEXT_MIB
    needs = Needs(gpus={A: "fake", B: "fake"})
    catalog = Catalog(needs)
    for usable, planned, count in ((one.need.gpu_mib, one, 1), (one.need.gpu_mib - 1, two, 2)):
        needs.usable_mib = {A: usable, B: usable}
        (spec,) = catalog.fill(Config(models={"m": said}))
        asleep = engine.estimate_asleep(said, count)
        assert spec.need == planned.need and asleep is not None and spec.need_asleep == asleep.need
        assert needs.account_of(catalog.find("m")).need == planned.need  # type: ignore[arg-type]
    declared = said.model_copy(update={"memory_mib": 7_000})
    (spec,) = catalog.fill(Config(models={"m": declared}))
    assert spec.need.gpu_mib == 7_000, "what the operator says is what it gets"


def test_models_on_several_named_gpus_are_planned_for_all_of_them(folder: Path) -> None:
    engine, needs = VllmEngine(), Needs(gpus={A: "fake", B: "fake"})
    needs.usable_mib = {A: 80_000, B: 80_000}
    said = model("vllm", folder, devices=("gpu0", "gpu1"))
    (spec,) = Catalog(needs).fill(Config(models={"m": said}))
    ready, asleep = engine.estimate(said, 2), engine.estimate_asleep(said, 2)
    assert ready is not None and asleep is not None
    assert (spec.need, spec.need_asleep) == (ready.need, asleep.need), "although one could hold it"
    declared = said.model_copy(update={"memory_mib": 7_000})
    (spec,) = Catalog(needs).fill(Config(models={"m": declared}))
    assert (spec.need.gpu_mib, spec.need_asleep) == (7_000, asleep.need)


async def test_need_that_was_raised_counts_wherever_it_ran_since(folder: Path) -> None:
    needs = Needs(gpus={A: "small", B: "large"})
    subject = Subject(ModelId("m"), model("vllm", folder), VllmEngine())
    need, _ = needs.need_of(subject)
    least = Need(need.gpu_mib + 5_000, need.host_mib)
    needs.no_memory(subject, least, {A: need.gpu_mib})
    assert needs.need_of(subject) == (least, "raised")
    # It fills what it is given, so that says nothing about its need.
    needs.measured(subject, {B: need.gpu_mib})
    assert needs.need_of(subject) == (least, "raised")
    needs.no_memory(subject, Need(need.gpu_mib + 9_000, 0), {A: 1_000, B: 1_000})
    assert needs.need_of(subject)[0].gpu_mib == need.gpu_mib + 9_000, "nor over how many it was spread"
    await needs.close()


# --- what its folder tells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"args": ("--kv-offloading-backend", "native", "--kv-offloading-size", "32")}, "--kv-offloading-backend"),
        ({"args": ("--kv-offloading-size=32",)}, "--kv-offloading-size"),
        ({"args": ("--kv_offloading_s", "32")}, "--kv_offloading_s"),
        ({"args": ("--kv-transfer-config.kv_connector", "X"), "isolate_tenants": "off"}, "--kv-transfer-config"),
        ({"args": ("--no-enable-sleep-mode",)}, "--no-enable-sleep-mode"),
        ({"env": {"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments: True"}}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_vllm_is_not_put_to_sleep_where_it_would_not_wake(folder: Path, keys: dict[str, Any], named: str) -> None:
    said = model("vllm", folder, **keys)
    facts = VllmEngine().facts(said)
    assert not facts.can_sleep and facts.kept_awake_by is not None and facts.kept_awake_by.startswith(named)
    assert "--enable-sleep-mode" not in started(said, on(A)).command.argv


def test_other_arguments_do_not_keep_vllm_awake(folder: Path) -> None:
    said = model(
        "vllm", folder, args=("--kv-cache-dtype", "fp8"), env={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    )
    assert VllmEngine().facts(said).can_sleep


def test_abilities_follow_the_folder_and_the_arguments(folder: Path) -> None:
    engine = VllmEngine()
    write_json(folder / "config.json", {**SHAPE, "vision_config": {"depth": 2}})
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools }}{% endif %}")
    sees = engine.facts(model("vllm", folder)).abilities
    assert sees == {Ability.CHAT, Ability.COMPLETIONS, Ability.VISION}, "without a parser it finds no tool calls"
    calls = engine.facts(model("vllm", folder, args=("--tool-call-parser", "hermes"))).abilities
    assert calls == {*sees, Ability.TOOLS}
    embeds = model("vllm", folder, category="embedding")
    assert engine.facts(embeds).abilities == {Ability.EMBEDDINGS} and not engine.facts(embeds).keeps_prefixes
    assert words(started(embeds, on(A)))["--runner"] == "pooling"


def test_estimate_has_weights_and_a_context_for_each_request(folder: Path) -> None:
    said = model("vllm", folder, ctx_size=8_192, concurrency=4)
    estimate = VllmEngine().estimate(said, 1)
    assert estimate is not None
    parts = {part.what: (part.gpu_mib, part.host_mib) for part in estimate.parts}
    assert parts["weights"] == (16, 0)
    assert parts["KV cache"] == (4 * 8_192 * 4 * 2 * 64 * 2 // MIB, 0)
    assert "host copy" not in parts
    fewer = VllmEngine().estimate(model("vllm", folder, cache_tokens=8_192, concurrency=4), 1)
    assert fewer is not None and fewer.need.gpu_mib == estimate.need.gpu_mib - 3 * parts["KV cache"][0] // 4


def test_asleep_the_weights_count_on_the_host_and_sglang_has_them_there_when_ready(folder: Path) -> None:
    for engine, is_copied in ((VllmEngine(), False), (SglangEngine(), True)):
        said = model(engine.name, folder)
        ready, asleep, on_two = (
            engine.estimate(said, 1),
            engine.estimate_asleep(said, 1),
            engine.estimate_asleep(said, 2),
        )
        assert ready is not None and asleep is not None
        assert {part.what: part.host_mib for part in asleep.parts}["weights"] == 16
        assert any(part.what == "host copy" and part.host_mib == 16 for part in ready.parts) is is_copied
        assert 0 < asleep.need.gpu_mib < ready.need.gpu_mib
        assert on_two is not None and on_two.need.gpu_mib > 2 * asleep.need.gpu_mib - 1, "a context on each GPU"
        assert on_two.need.host_mib > asleep.need.host_mib


def test_latent_attention_keeps_one_vector_for_all_heads(folder: Path) -> None:
    write_json(folder / "config.json", {**SHAPE, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 64})
    estimate = VllmEngine().estimate(model("vllm", folder, cache_tokens=MIB), 1)
    assert estimate is not None
    assert {part.what: part.gpu_mib for part in estimate.parts}["KV cache"] == 4 * (32 + 16) * 2


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
def test_files_that_cannot_be_read_are_counted_by_their_size_and_never_raise(folder: Path, spoil: str) -> None:
    (folder / spoil).write_bytes(b"\xff" * 100)
    said = model("vllm", folder)
    estimate = VllmEngine().estimate(said, 1)
    assert estimate is not None and estimate.need.gpu_mib > 0
    assert VllmEngine().facts(said).abilities is not None
    (folder / "model.safetensors").unlink()
    assert VllmEngine().estimate(said, 1) is None and VllmEngine().estimate_asleep(said, 1) is None


# --- what is missing ----------------------------------------------------------------------------------------------


def test_it_is_said_what_to_type(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    said = Model(engine="vllm", path=str(folder))
    why = VllmEngine().missing(said)
    assert why is not None and "vllm/bin/pip install vllm" in why and "`python`" in why
    with pytest.raises(LoadFailed, match="pip install vllm"):
        VllmEngine().launch("m", said, on(A))
    gone = str(tmp_path / "gone")
    assert VllmEngine().missing(Model(engine="vllm", path="/", program=gone)) == (
        f"there is no program {gone}; correct `program`"
    )
    assert "correct `python`" in (VllmEngine().missing(Model(engine="vllm", path="/", python=gone)) or "")
    bare = venv(tmp_path / "bare")
    lacks = VllmEngine().missing(Model(engine="vllm", path="/", python=str(bare)))
    assert lacks == f"vllm is not installed in {bare}; type: {bare} -m pip install vllm"


def venv(home: Path) -> Path:
    """A closed environment without packages, as files tell."""
    (home / "bin").mkdir(parents=True)
    (home / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (home / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    return program(home / "bin", "python")


def test_program_on_path_and_a_python_are_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found, python = program(tmp_path, "vllm"), program(tmp_path, "python9")
    assert VllmEngine().launch("m", Model(engine="vllm", path=str(folder)), on(A)).command.argv[0] == str(found)
    by_python = Model(engine="sglang", path=str(folder), python=str(python))
    argv = SglangEngine().launch("m", by_python, on(A)).command.argv
    assert argv[:4] == (str(python), "-m", "sglang.launch_server", "--model-path")


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="there is no folder"):
        VllmEngine().launch("m", model("vllm", tmp_path / "gone"), on(A))


# --- the proof of a wake ------------------------------------------------------------------------------------------


class Calls:
    """A server that answers as told; `said` has bodies by path."""

    def __init__(self, **said: bytes) -> None:
        self.notes: dict[str, float] = {}
        self.said = {
            "/v1/models": b'{"data": [{"id": "m"}]}',
            "/v1/completions": completion(-0.5),
            "/is_sleeping": b'{"is_sleeping": false}',
            **said,
        }

    async def __call__(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        return 200, self.said.get(target.partition("?")[0], b"")


def completion(logprob: float | None) -> bytes:
    return json.dumps({"choices": [{"text": " a", "logprobs": {"token_logprobs": [logprob]}}]}).encode()


async def test_wake_is_proved_by_a_token_as_likely_as_before(folder: Path) -> None:
    engine, said, calls = VllmEngine(), model("vllm", folder), Calls()
    calls.said["/is_sleeping"] = b'{"is_sleeping": true}'
    await engine.sleep(said, calls)
    calls.said["/is_sleeping"] = b'{"is_sleeping": false}'
    calls.said["/v1/completions"] = completion(-0.51)
    await engine.wake(said, calls)
    calls.said["/v1/completions"] = completion(-10.4)
    with pytest.raises(LoadFailed, match="other weights"):
        await engine.wake(said, calls)


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[" * 100_000, b'{"is_sleeping": 1}', b"{}", b"null"])
async def test_garbage_is_no_proof(folder: Path, garbage: bytes) -> None:
    for path in ("/is_sleeping", "/v1/models", "/v1/completions"):
        calls = Calls()
        calls.said[path] = garbage
        with pytest.raises(LoadFailed):
            await VllmEngine().wake(model("vllm", folder), calls)


async def test_token_without_a_number_is_no_proof(folder: Path) -> None:
    for answer in (completion(None), completion(float("nan")), b'{"choices": []}'):
        calls = Calls()
        calls.said["/v1/completions"] = answer
        with pytest.raises(LoadFailed):
            await SglangEngine().wake(model("sglang", folder), calls)


async def test_vector_of_other_weights_is_no_proof(folder: Path) -> None:
    said, calls, engine = model("sglang", folder, embedding=True), Calls(), SglangEngine()
    calls.said["/v1/embeddings"] = b'{"data": [{"embedding": [0.025, 0.5]}]}'
    await engine.sleep(said, calls)
    calls.said["/v1/embeddings"] = b'{"data": [{"embedding": [0.0251, 0.5]}]}'
    await engine.wake(said, calls)
    calls.said["/v1/embeddings"] = b'{"data": [{"embedding": [-0.011, 0.5]}]}'
    with pytest.raises(LoadFailed, match="other weights"):
        await engine.wake(said, calls)


async def test_model_that_embeds_is_proved_by_a_vector(folder: Path) -> None:
    said, calls = model("vllm", folder, embedding=True), Calls()
    calls.said["/v1/embeddings"] = b'{"data": [{"embedding": [0.25, 0.5]}]}'
    await VllmEngine().wake(said, calls)
    calls.said["/v1/embeddings"] = b'{"data": []}'
    with pytest.raises(LoadFailed, match="without a token"):
        await VllmEngine().wake(said, calls)


@pytest.mark.parametrize(("heads", "counts"), [(32, (2, 4, 8)), (12, (2, 4)), (14, (2,)), (15, ()), (None, (2, 4, 8))])
def test_heads_say_over_how_many_gpus_it_can_be_spread(
    folder: Path, heads: int | None, counts: tuple[int, ...]
) -> None:
    write_json(folder / "config.json", {**SHAPE, "num_attention_heads": heads})
    facts = VllmEngine().facts(model("vllm", folder))
    assert (facts.can_split, equal_counts(facts)) == (Split.EQUAL if counts else None, counts)


# --- figures of its cache -----------------------------------------------------------------------------------------

ANY = Model.model_validate({"engine": "vllm", "path": "/m"})


def test_figures_are_summed_over_their_labels() -> None:
    text = (
        b'# HELP vllm:kv_cache_usage_perc x\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        b'vllm:prefix_cache_queries_total{a="}{ 1"} 1e3 1700000000\nvllm:prefix_cache_queries_total{a="b"} 24.0\n'
        b"vllm:prefix_cache_queries_created 5\n"
    )
    assert VllmEngine().cache_figures(text, ANY) == CacheFigures(0.5, 1_024, 0)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"1.5", b"0x1", b"", b"e", b"1" * 500, b"\xff"])
def test_figures_that_make_no_sense_are_none(value: bytes) -> None:
    assert VllmEngine().cache_figures(b"vllm:kv_cache_usage_perc " + value + b"\n", ANY) is None
    assert SglangEngine().cache_figures(b"\xff" * 1_000, ANY) is None


def test_the_size_of_a_cache_is_told_in_tokens() -> None:
    used = b"vllm:kv_cache_usage_perc 0.5\n"
    info = b'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="%d",num_gpu_blocks="100"} 1.0\n'
    found = VllmEngine().cache_figures(used + info % 0 + info % 1, ANY)
    assert found is not None and found.kv_tokens == 3_200, "of both engines"
    for bad in (b'vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0\n', b"vllm:cache_config_info 1\n"):
        found = VllmEngine().cache_figures(used + bad, ANY)
        assert found is not None and found.kv_tokens is None
    text = b'sglang:token_usage 0.5\nsglang:max_total_num_tokens{tp_rank="0"} 4096.0\n'
    assert SglangEngine().cache_figures(text, ANY) == CacheFigures(0.5, 0, 0, 4_096)
