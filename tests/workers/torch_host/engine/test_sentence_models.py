"""Embeddings of a worker against sentence-transformers on the same folder: tiny random models of many families."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer

from greenroom.workers.torch_host.engine.embedding import PADDED_MODELS
from tests.later import Later
from tests.workers.torch_host.samples import tiny
from tests.workers.torch_host.test_worker import rig_folder
from tests.workers.torch_host.worker_rig import WorkerRig

sentences, parts = Later("sentence_transformers"), Later("sentence_transformers.sentence_transformer.modules")
torch.set_num_threads(1)
# DeBERTa's own code is compiled in a way that torch warns of.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

WIDTH = 32
POSITIONS = 192
WINDOW = 16
SIZES: Mapping[str, Any] = {
    "vocab_size": tiny.VOCABULARY + 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
DECODER: Mapping[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {"model_type": "bert", **SIZES},
    "roberta": {"model_type": "roberta", **SIZES, "type_vocab_size": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", **SIZES, "type_vocab_size": 1},
    "mpnet": {"model_type": "mpnet", **SIZES},
    "deberta": {"model_type": "deberta", **SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "model_type": "deberta-v2",
        **SIZES,
        "relative_attention": True,
        "position_buckets": 32,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
    },
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": SIZES["vocab_size"],
        "pad_token_id": 2,
        "dim": WIDTH,
        "hidden_dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": POSITIONS,
    },
    "modernbert": {
        "model_type": "modernbert",
        **SIZES,
        "local_attention": WINDOW,
        "global_attn_every_n_layers": 3,
        "cls_token_id": 0,
        "sep_token_id": 1,
    },
    "nomic_bert": {"model_type": "nomic_bert", **SIZES},
    "eurobert": {"model_type": "eurobert", **SIZES},
    "albert": {"model_type": "albert", **SIZES, "embedding_size": 16},
    "electra": {"model_type": "electra", **SIZES, "embedding_size": 16},
    "t5": {
        "model_type": "t5",
        "vocab_size": SIZES["vocab_size"],
        "eos_token_id": 1,
        "pad_token_id": 2,
        "decoder_start_token_id": 2,
        "d_model": WIDTH,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 3,
        "num_heads": 4,
    },
    "gemma": {
        "model_type": "gemma3_text",
        **DECODER,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3": {"model_type": "qwen3", **DECODER},
    "qwen2": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", **DECODER, "sliding_window": WINDOW},
    "llama": {"model_type": "llama", **DECODER, "is_causal": False},
    "camembert": {"model_type": "camembert", **SIZES, "type_vocab_size": 1},
    "ernie": {"model_type": "ernie", **SIZES},
    "gte": {"model_type": "gte", **SIZES},
    "jina_embeddings_v3": {"model_type": "jina_embeddings_v3", **SIZES, "type_vocab_size": 1},
    # These mix neighbouring tokens despite the mask: their inputs are never padded.
    "mobilebert": {
        "model_type": "mobilebert",
        **SIZES,
        "embedding_size": WIDTH,
        "intra_bottleneck_size": WIDTH,
        "true_hidden_size": WIDTH,
    },
    "convbert": {"model_type": "convbert", **SIZES, "embedding_size": WIDTH, "head_ratio": 2, "conv_kernel_size": 3},
}
FAMILIES = {**FAMILIES, **{kind: {**FAMILIES["t5"], "model_type": kind} for kind in ("mt5", "umt5")}}
DECODERS = ("qwen2", "qwen3", "mistral")
LONG = "one two three four five six seven eight nine ten " * 3
TEXTS = ["hi", "the lazy dog", "The capital of France is Paris.", LONG, "the lazy dog jumps", "Köln 你好", LONG[:90]]
# Of a vector's length: some thousand additions in float32, in another order.
TOLERANCE = 1e-5


def make_base(folder: Path, family: str, *, seed: int = 1, side: str = "right", **changes: Any) -> Path:
    """A model of Transformers as its hub has it, without any module of sentence-transformers."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**FAMILIES[family], **changes})
    maker = AutoModelForTextEncoding if family in ("t5", "mt5", "umt5") else AutoModel
    model = maker.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder, side)
    return folder


def save_tokenizer(folder: Path, side: str = "right") -> None:
    """Every text begins with one special token and ends with another; decoders' texts only end with one."""
    tiny.save_tokenizer(folder, None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = [(tiny.BEGIN, 0), (tiny.END, 1)]
    pattern = f"$A {tiny.END}" if side == "left" else f"{tiny.BEGIN} $A {tiny.END}"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(pattern, special_tokens=marks)
    tokenizer.padding_side = side
    tokenizer.model_max_length = POSITIONS - 3
    tokenizer.save_pretrained(folder)


def make_sentences(
    folder: Path,
    family: str,
    *after: torch.nn.Module,
    pooling: str | Sequence[str] = "mean",
    include_prompt: bool = True,
    side: str = "right",
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """The same as sentence-transformers saves it, with these modules behind the pooling."""
    base = make_base(folder.with_name(f"{folder.name}-base"), family, side=side)
    first = parts.Transformer(str(base))
    modules = [first, parts.Pooling(WIDTH, pooling, include_prompt=include_prompt), *after]
    sentences.SentenceTransformer(modules=modules, device="cpu", **more).save(str(folder), create_model_card=False)
    shutil.rmtree(base)
    if settings:
        change(folder / "sentence_bert_config.json", **settings)
    return folder


def change(path: Path, **changes: Any) -> None:
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, **changes}))


def dense(inside: int, outside: int, activation: torch.nn.Module, bias: bool = True) -> parts.Dense:
    torch.manual_seed(inside + outside)
    return parts.Dense(inside, outside, bias=bias, activation_function=activation)


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerRig]:
    with rig_folder() as folder:
        made = WorkerRig(folder)
        yield made
        made.end()


@pytest.fixture
def served(worker: WorkerRig) -> Callable[..., Any]:
    """Embeddings from a folder that is served as an awake slot with these `options`."""

    @contextmanager
    def opened(folder: Path, **options: Any) -> Iterator[Callable[..., Any]]:
        memory = os.memfd_create("greenroom-arena")
        try:
            heard = worker.open("e", folder, memory, **{"embedding": True, "context": None, **options})
            assert heard["ok"], heard
            worker.do("wake", slot="e")

            def ask(inputs: Any, **fields: Any) -> Any:
                status, found = worker.post("e", "/v1/embeddings", {"model": "e", "input": inputs, **fields})
                return [row["embedding"] for row in found["data"]] if status == 200 else found["error"]

            try:
                yield ask
            finally:
                worker.do("close", slot="e")
        finally:
            os.close(memory)

    return opened


def truth(folder: Path, texts: Sequence[str], **how: Any) -> torch.Tensor:
    """Each text alone, so that padding cannot affect the reference."""
    model = sentences.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    found: torch.Tensor = torch.stack([model.encode(text, convert_to_tensor=True, **how) for text in texts])
    return found


def assert_same(vectors: Any, wanted: torch.Tensor) -> None:
    assert isinstance(vectors, list), vectors
    found = torch.tensor(vectors)
    assert found.shape == wanted.shape
    apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert apart.max() < TOLERANCE, apart


def assert_serves(served: Callable[..., Any], folder: Path, texts: Sequence[str] = TEXTS, **how: Any) -> None:
    wanted = truth(folder, texts, **how)
    with served(folder) as ask:
        assert_same(ask(list(texts), **how), wanted)
        for number, text in enumerate(texts[:4]):
            assert_same(ask(text, **how), wanted[number : number + 1])


def test_inputs_are_padded_only_for_families_that_are_compared_here() -> None:
    assert {config["model_type"] for config in FAMILIES.values()} - PADDED_MODELS == {"convbert", "mobilebert"}
    assert {config["model_type"] for config in FAMILIES.values()} >= PADDED_MODELS


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma", *DECODERS}))
def test_encoders_answer_as_sentence_transformers_does(served: Any, tmp_path: Path, family: str) -> None:
    assert_serves(served, make_sentences(tmp_path / "model", family))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_answer_with_their_last_token(served: Any, tmp_path: Path, family: str) -> None:
    folder = make_sentences(tmp_path / "model", family, parts.Normalize(), pooling="lasttoken", side="left")
    assert_serves(served, folder)


@pytest.mark.parametrize(
    "pooling",
    [
        "cls",
        "max",
        "mean_sqrt_len_tokens",
        "weightedmean",
        "lasttoken",
        ("cls", "mean"),
        ("max", "weightedmean", "lasttoken"),
    ],
    ids=str,
)
def test_every_way_of_pooling(served: Any, tmp_path: Path, pooling: Any) -> None:
    assert_serves(served, make_sentences(tmp_path / "model", "bert", pooling=pooling))


def test_pooling_as_older_versions_wrote_it(served: Any, tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "model", "bert")
    old = {
        "word_embedding_dimension": WIDTH,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": True,
        "pooling_mode_mean_sqrt_len_tokens": True,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(old))
    assert_serves(served, folder)


def test_a_model_like_embeddinggemma(served: Any, tmp_path: Path) -> None:
    """Windows that reach both ways, two projections without activation, vectors of length one."""
    after = dense(WIDTH, 64, torch.nn.Identity(), bias=False), dense(64, 24, torch.nn.Identity(), bias=False)
    assert_serves(served, make_sentences(tmp_path / "model", "gemma", *after, parts.Normalize()))


def test_a_model_like_labse(served: Any, tmp_path: Path) -> None:
    after = dense(WIDTH, WIDTH, torch.nn.Tanh()), parts.Normalize()
    assert_serves(served, make_sentences(tmp_path / "model", "bert", *after, pooling="cls"))


@pytest.mark.parametrize("activation", [torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Sigmoid(), torch.nn.SiLU()], ids=str)
def test_activations_behind_a_projection(served: Any, tmp_path: Path, activation: torch.nn.Module) -> None:
    assert_serves(served, make_sentences(tmp_path / "model", "bert", dense(WIDTH, 8, activation)), TEXTS[:2])


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_folder_without_modules(served: Any, tmp_path: Path, family: str) -> None:
    folder = make_base(tmp_path / "model", family, side="left" if family == "qwen3" else "right")
    change(folder / "config.json", architectures=["Qwen3ForCausalLM" if family == "qwen3" else "BertForMaskedLM"])
    assert_serves(served, folder)


def test_weights_without_a_pooler_that_is_not_used(served: Any, tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "model", "bert", pooling="cls")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    assert_serves(served, folder)


def test_texts_in_capitals_are_lowered_where_the_model_says_so(served: Any, tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "model", "bert", settings={"do_lower_case": True})
    assert_serves(served, folder, ["THE LAZY DOG", "the lazy dog"])


# --- prompts --------------------------------------------------------------------------------------------------------


PROMPTS = {"query": "query: ", "document": "the name of it: "}


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "cls", "lasttoken", "max"])
def test_the_default_prompt_stands_before_every_text(served: Any, tmp_path: Path, include: bool, pooling: str) -> None:
    folder = make_sentences(
        tmp_path / "model",
        "bert",
        pooling=pooling,
        include_prompt=include,
        prompts=PROMPTS,
        default_prompt_name="document",
    )
    assert_serves(served, folder, TEXTS[:5])


@pytest.mark.parametrize("side", ["left", "right"])
def test_another_prompt_is_chosen_by_its_name(served: Any, tmp_path: Path, side: str) -> None:
    folder = make_sentences(
        tmp_path / "model", "qwen3", include_prompt=False, side=side, prompts=PROMPTS, default_prompt_name="document"
    )
    assert_serves(served, folder, TEXTS[:5], prompt_name="query")


def test_prompts_are_for_texts_and_must_be_known(served: Any, tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "model", "bert", include_prompt=False, prompts=PROMPTS)
    with served(folder) as ask:
        unknown = ask("hi", prompt_name="title")
        assert unknown["param"] == "prompt_name" and "query" in unknown["message"]
        assert ask("hi", prompt_name=5)["param"] == "prompt_name"
        assert ask([[5, 6]], prompt_name="query")["param"] == "prompt_name"
        plain = ask("hi")
        tokens = AutoTokenizer.from_pretrained(folder)("hi")["input_ids"]
        assert_same(ask([tokens]), torch.tensor(plain))


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"max_seq_length": 20}, {}])
def test_a_text_that_is_too_long_is_refused_or_cut(served: Any, tmp_path: Path, settings: Mapping[str, Any]) -> None:
    folder = make_sentences(tmp_path / "model", "bert", prompts=PROMPTS, settings=settings)
    limit = settings.get("max_seq_length", POSITIONS - 3)
    text = LONG * 4
    wanted = truth(folder, [text, "hi"])
    with served(folder) as ask:
        refused = ask([text, "hi"])
        assert refused["code"] == "context_length_exceeded" and str(limit) in refused["message"]
        assert_same(ask([text, "hi"], truncate=True), wanted)
        assert_same(ask(text, truncate=True, prompt_name="document"), truth(folder, [text], prompt_name="document"))
        assert ask([[5] * (limit + 1)])["code"] == "context_length_exceeded"
        assert len(ask([[5] * (limit + 1)], truncate=True)) == 1
        assert ask("hi", truncate="END")["param"] == "truncate"


def test_shorter_vectors_are_of_length_one_where_whole_ones_are(served: Any, tmp_path: Path) -> None:
    for name, after in (("unit", [parts.Normalize()]), ("free", [])):
        folder = make_sentences(tmp_path / name, "bert", *after)
        change(folder / "config.json", matryoshka_dimensions=[8])
        wanted = truth(folder, TEXTS[:3], truncate_dim=8, normalize_embeddings=bool(after))
        with served(folder) as ask:
            assert_same(ask(TEXTS[:3], dimensions=8), wanted)


def test_vectors_are_as_short_as_the_folder_says(served: Any, tmp_path: Path) -> None:
    assert_serves(served, make_sentences(tmp_path / "model", "bert", parts.Normalize(), truncate_dim=12), TEXTS[:3])


# --- memory ---------------------------------------------------------------------------------------------------------


def test_projections_sleep_and_wake_with_the_model_and_are_counted(worker: WorkerRig, tmp_path: Path) -> None:
    plain = make_sentences(tmp_path / "plain", "bert")
    folder = make_sentences(tmp_path / "model", "bert", dense(WIDTH, 100_000, torch.nn.Tanh()))
    sizes = []
    for one in (plain, folder):
        memory = os.memfd_create("greenroom-arena")
        heard = worker.open("e", one, memory, embedding=True)
        assert heard["ok"], heard
        sizes.append(heard["arena_bytes"])
        if one is folder:
            wanted = truth(folder, ["hi"])
            for _ in range(2):
                worker.do("wake", slot="e")
                _, found = worker.post("e", "/v1/embeddings", {"input": "hi"})
                assert_same([found["data"][0]["embedding"]], wanted)
                worker.do("sleep", slot="e")
            worker.do("close", slot="e")
            # Another worker would adopt the arena with all that is in it.
            again = worker.open("e", folder, memory, True, embedding=True)
            assert again["ok"] and again["read_bytes"] == 0
        worker.do("close", slot="e")
        os.close(memory)
    assert sizes[1] - sizes[0] > 100_000 * WIDTH * 4 - 4 * 2**20


def test_projections_in_half_precision(served: Any, tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "model", "bert", dense(WIDTH, 16, torch.nn.Tanh()))
    wanted = truth(folder, TEXTS[:3])
    with served(folder, dtype="bfloat16") as ask:
        found = torch.tensor(ask(TEXTS[:3]))
    # Numbers with eight bits of mantissa, some dozens of roundings.
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.05


def test_projections_in_a_pickle_are_taken_only_if_allowed(served: Any, worker: WorkerRig, tmp_path: Path) -> None:
    folder = make_sentences(tmp_path / "model", "bert", dense(WIDTH, 16, torch.nn.Tanh()))
    weights = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    assert "allow_pickle" in refusal(worker, folder)
    wanted = truth(folder, TEXTS[:3])
    with served(folder, allow_pickle=True) as ask:
        assert_same(ask(TEXTS[:3]), wanted)


# --- what is refused ------------------------------------------------------------------------------------------------


def refusal(worker: WorkerRig, folder: Path) -> str:
    memory = os.memfd_create("greenroom-arena")
    try:
        heard = worker.open("e", folder, memory, embedding=True)
        if heard["ok"]:
            worker.do("close", slot="e")
        assert not heard["ok"] and heard["kind"] == "bad_model", heard
        return str(heard["message"])
    finally:
        os.close(memory)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    return make_sentences(folder, "bert", dense(WIDTH, 16, torch.nn.Tanh()), parts.Normalize())


def modules(*kinds: str) -> list[dict[str, str]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    found = []
    for number, kind in enumerate(kinds):
        last = kind.rpartition(".")[2]
        whole = kind if "." in kind else f"sentence_transformers.models.{kind}"
        found.append({"idx": number, "name": str(number), "path": paths.get(last, f"{number}_{last}"), "type": whole})
    return found


@pytest.mark.parametrize(
    ("file", "said", "why"),
    [
        ("modules.json", modules("Transformer", "Pooling", "LSTM"), "LSTM"),
        ("modules.json", modules("Transformer", "CNN", "Pooling"), "CNN"),
        ("modules.json", modules("Router"), "Router"),
        ("modules.json", modules("custom_st.Transformer", "Pooling"), "custom_st.Transformer"),
        ("modules.json", modules("Transformer"), "Pooling"),
        ("modules.json", modules("Transformer", "Dense", "Pooling"), "Dense"),
        ("modules.json", {"idx": 0}, "modules.json"),
        ("modules.json", [{"type": 5}], "modules.json"),
        ("modules.json", [*modules("Transformer"), {**modules("Pooling")[0], "path": "../out"}], "../out"),
        ("modules.json", [{**modules("Transformer")[0], "path": "0_Transformer"}, *modules("Pooling")], "0_Tr"),
        ("modules.json", [*modules("Transformer"), {**modules("Pooling")[0], "path": "other/1_Pooling"}], "other/1"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "median"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, "mean"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean"] * 1000}, "1,000"),
        ("1_Pooling/config.json", None, "1_Pooling"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 16, "activation_function": "os.system"}, "os.sys"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 16, "use_residual": True}, "use_residual"),
        ("2_Dense/config.json", {"in_features": 16, "out_features": 16}, "16"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 10**9}, "2_Dense"),
        ("2_Dense/config.json", {"in_features": 32}, "out_features"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 16, "bias": False}, "bias"),
        ("2_Dense/model.safetensors", None, "2_Dense"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"message": {"method": "forward", "method_output_name": "last_hidden_state"}}},
            "message",
        ),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "hidden_act"),
        ("sentence_bert_config.json", {"model_args": 5}, "model_args"),
        ("sentence_bert_config.json", {"model_args": [["x"]]}, "model_args"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}, "default_prompt_name"),
        ("config_sentence_transformers.json", {"prompts": {"a": 5}}, "prompts"),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "title"}, "title"),
        ("config_sentence_transformers.json", "[[", "config_sentence_transformers.json"),
    ],
)
def test_what_cannot_be_done_right_is_refused_by_name(
    worker: WorkerRig, whole: Path, tmp_path: Path, file: str, said: Any, why: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    if said is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(said if isinstance(said, str) else json.dumps(said))
    assert why in refusal(worker, folder)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(worker: WorkerRig, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / "1_Pooling" / "config.json").unlink()
    os.mkfifo(folder / "1_Pooling" / "config.json")
    assert "not a plain file" in refusal(worker, folder)
