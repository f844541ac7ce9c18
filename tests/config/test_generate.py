"""What is made from the schema is up to date, complete, and true."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.config.generate import (
    BEGIN,
    END,
    FOR_EXAMPLE,
    ROOT,
    example,
    generated,
    main,
    said,
    with_reference,
)
from greenroom.config.kinds import is_section
from greenroom.config.loader import load
from greenroom.config.marks import descriptions
from greenroom.config.schema import (
    ApiKey,
    Company,
    Config,
    Gpu,
    GroupSection,
    MatrixSection,
    Model,
    Quorum,
    Remote,
    Section,
)
from greenroom.config.sections.model import KEYS_OF_ENGINES

from .conftest import Loads


def test_generated_files_are_up_to_date() -> None:
    for name, text in generated(ROOT).items():
        assert (ROOT / name).read_text("utf-8") == text, f"{name}: run python -m greenroom.config.generate"


def test_example_loads_and_its_values_are_the_defaults() -> None:
    config = load(ROOT / "config.example.yaml", {}).config
    assert set(config.models) >= {"chat", "dictation", "large", "whisper", "writer"}
    default = Config(models=config.models, state_dir=config.state_dir, remotes=config.remotes)
    assert config == default
    assert config.remotes == {"claude": Remote(provider="anthropic", api_key_env="ANTHROPIC_API_KEY")}
    for model in config.models.values():
        own = {"path": model.path, "cmd": model.cmd, "workflow": model.workflow, "inputs": model.inputs}
        own |= {"remote": model.remote, "use_model_name": model.use_model_name}
        plain = Model(engine=model.engine, **{key: value for key, value in own.items() if value})
        assert model == plain


def test_example_has_every_key_of_the_schema_active() -> None:
    tree = yaml.safe_load((ROOT / "config.example.yaml").read_text("utf-8"))
    assert list(tree) == list(Config.model_fields)
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            assert list(tree[name]) == list(section.model_fields)
    assert set().union(*tree["models"].values()) == set(Model.model_fields)


def test_example_tells_every_keys_sentence() -> None:
    prose = " ".join(re.sub(r"^\s*#", "", line).strip() for line in example().splitlines())
    prose = re.sub(r"\s+#?\s*", " ", prose)
    sections = [Config, ApiKey, Company, GroupSection, MatrixSection, Gpu, Model, Quorum, Remote]
    sections += [f.annotation for f in Config.model_fields.values() if isinstance(f.annotation, type)]  # type: ignore[misc]
    for section in (s for s in sections if issubclass(s, Section)):
        for key, sentence in descriptions(section).items():
            assert " ".join(sentence.split()) in prose, key


def commented_examples() -> list[str]:
    blocks = re.findall(rf"^( *)# {FOR_EXAMPLE}\n((?:\1# .*\n)+)", example(), flags=re.MULTILINE)
    return ["".join(line.removeprefix(f"{indent}# ") for line in body.splitlines(True)) for indent, body in blocks]


def test_commented_examples_load_and_have_every_key(loads: Loads) -> None:
    keys, _, _, gpus, rules, macros = commented_examples()
    indented = "".join(f"  {line}" for line in keys.splitlines(True))
    config = loads(f"server:\n{indented}\n{gpus}\n{macros}", {"GREENROOM_KEY": "k"})
    assert set().union(*(key.model_fields_set for key in config.server.api_keys)) == set(ApiKey.model_fields)
    assert set().union(*(gpu.model_fields_set for gpu in config.gpus)) == set(Gpu.model_fields)
    assert config.macros
    indented = "".join(f"  {line}" for line in rules.splitlines(True))
    known = "  signers: {alice: null, bob: null}\n  signer_groups: {operators: [alice, bob]}\n"
    (rule,) = loads(f"governance:\n{known}{indented}").governance.rules
    assert rule.model_fields_set == set(Quorum.model_fields)


def test_commented_examples_of_coresidency_load_and_have_every_key(loads: Loads) -> None:
    models = "models: {chat: {path: a.gguf}, whisper: {path: b.gguf}}\n"
    _, *both, _, _, _ = commented_examples()
    groups, matrix = (
        loads(f"{models}scheduler:\n" + "".join(f"  {line}" for line in text.splitlines(True))).scheduler.company
        for text in both
    )
    assert groups and groups.groups and groups.groups["voice"].model_fields_set == set(GroupSection.model_fields)
    assert matrix and matrix.matrix and matrix.matrix.model_fields_set == set(MatrixSection.model_fields)


def test_one_line_samples_load(loads: Loads) -> None:
    lines = re.findall(rf"^( *)# {FOR_EXAMPLE} (.+)\n *(\w+): ", example(), flags=re.MULTILINE)
    assert len(lines) > 15
    for indent, sample, key in lines:
        if len(indent) == 4 and key in Remote.model_fields:
            given = "base_url: https://a, " if key != "base_url" else ""
            given += "cost: {input: 1, output: 1}, " if key == "budget_per_day" else ""
            assert loads(f"remotes: {{r: {{{given}{key}: {sample}}}}}").remotes["r"].model_fields_set >= {key}
        elif len(indent) == 4:
            engine = next((name for name, keys in KEYS_OF_ENGINES.items() if key in keys), "llamacpp")
            needs = "cmd: 'a ${PORT}'" if engine == "command" else "path: q"
            needs += ", workflow: w, inputs: {prompt: 6.text}" if engine == "comfyui" else ""
            text = f"models: {{q: {{engine: {engine}, {needs}, {key}: {sample}}}}}"
            assert loads(text).models["q"].model_fields_set >= {key}
        else:
            sections = {name: field.annotation for name, field in Config.model_fields.items()}
            home = next((name for name, kind in sections.items() if is_section(kind) and key in kind.model_fields), "")
            known = "signers: {alice: null, bob: null}, " if key == "signer_groups" else ""
            models = "\nmodels: {chat: {path: c.gguf}, writer: {path: w.gguf}}" if key == "tasks" else ""
            assert loads(f"{home}: {{{known}{key}: {sample}}}" if indent else f"{key}: {sample}{models}")


@pytest.mark.parametrize(
    "value", [None, True, 5, 1.5, "a", "on", "5", "", "a: b", "a #b", "${x}", "~", [1, "a"], {"a": {}}]
)
def test_value_written_down_reads_back(loads: Loads, value: Any) -> None:
    text = said(value).replace("${", "$${")
    assert loads(f"models: {{q: {{path: q.gguf, metadata: {{v: {text}}}}}}}").models["q"].metadata == {"v": value}


def test_json_schema_says_what_it_is_and_knows_bounds_and_sentences() -> None:
    schema = json.loads((ROOT / "docs/config.schema.json").read_text("utf-8"))
    assert schema["$id"] and schema["$schema"]
    assert schema["title"] == "Greenroom configuration"
    assert schema["additionalProperties"] is False
    port = schema["$defs"]["Server"]["properties"]["port"]
    assert (port["minimum"], port["maximum"], port["default"]) == (0, 65535, 8210)
    for section in schema["$defs"].values():
        for key, value in section.get("properties", {}).items():
            assert value.get("description"), key


def copy_of_root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/configuration.md", tmp_path / "docs")
    return tmp_path


def test_check_fails_until_the_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_of_root(tmp_path)
    assert main(["--check"], root) == 1
    assert "config.example.yaml is out of date" in capsys.readouterr().out
    assert not (root / "config.example.yaml").exists()
    assert main([], root) == 0
    assert "config.example.yaml written" in capsys.readouterr().out
    assert main(["--check"], root) == 0
    assert capsys.readouterr().out == ""
    guide = root / "docs/configuration.md"
    guide.write_text(guide.read_text("utf-8").replace("`8210`", "`8211`"), encoding="utf-8")
    assert main(["--check"], root) == 1


def test_guide_keeps_its_own_words_around_the_reference() -> None:
    renewed = with_reference(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert renewed.startswith(f"before\n{BEGIN}\n\n### ") and renewed.endswith(f"{END}\nafter\n")
    assert "old\n" not in renewed
    with pytest.raises(ValueError, match="needs the lines"):
        with_reference("no markers")
