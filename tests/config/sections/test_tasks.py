"""Tasks: read from the configuration or from tasks.yaml beside it; every mistake is named with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.loader import load
from greenroom.errors import ConfigError

MODELS = """\
models:
  large: {path: /m/large.gguf, aliases: [best]}
  small: {path: /m/small.gguf}
"""


def loaded(folder: Path, text: str, tasks: str | None = None) -> dict[str, object]:
    (folder / "greenroom.yaml").write_text(text)
    if tasks is not None:
        (folder / "tasks.yaml").write_text(tasks)
    config = load(folder / "greenroom.yaml", {}).config
    return {name: task.model_dump(exclude_defaults=True) for name, task in config.tasks.items()}


def problems(folder: Path, text: str, tasks: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, tasks)
    return [line.replace(f"{folder}/", "") for line in caught.value.message.splitlines()]


def test_a_task_is_read_from_the_configuration(tmp_path: Path) -> None:
    text = MODELS + "tasks:\n  coding: {candidates: [best, small], pin_primary: true, require: {ctx_size: 8192}}\n"
    assert loaded(tmp_path, text) == {
        "coding": {"candidates": ("best", "small"), "pin_primary": True, "require": {"ctx_size": 8192}}
    }


def test_tasks_are_read_from_a_file_beside_the_configuration_with_its_macros(tmp_path: Path) -> None:
    text = "macros: {budget: 30}\n" + MODELS
    tasks = "tasks:\n  coding: {candidates: [large], budget_s: '${budget}'}\n"
    assert loaded(tmp_path, text, tasks) == {"coding": {"candidates": ("large",), "budget_s": 30.0}}


def test_a_mistake_is_told_with_the_file_it_is_in(tmp_path: Path) -> None:
    tasks = "tasks:\n  coding:\n    candidates: [large]\n    budget: 30\n"
    assert problems(tmp_path, MODELS + "hots: 1\n", tasks) == [
        "greenroom.yaml:4: hots: unknown key, did you mean host?",
        "tasks.yaml:4: tasks.coding.budget: unknown key, did you mean budget_s?",
    ]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("tasks: {}\nmodels: {}\n", "tasks.yaml:2: models: unknown key: tasks.yaml has `tasks` and nothing else"),
        ("tasks: {a: {candidates: []}}\n", "tasks.yaml:1: tasks.a.candidates: may not be empty"),
        ("tasks: {a: {candidates: [nope]}}\n", "tasks.a.candidates[0]: nope: there is no model of this id or alias"),
        ("tasks: {a: {candidates: [org/name]}}\n", "org/name: a model that is only on disk can be no candidate; "),
        ("tasks: {a: {candidates: [other.gguf]}}\n", "other.gguf: a model that is only on disk can be no candidate; "),
        (
            "tasks: {a: {candidates: ['claude:opus']}}\n",
            "with {engine: remote, remote: claude, use_model_name: opus}",
        ),
        ("tasks: {a: {candidates: ['other:opus']}}\n", "other:opus: there is no model of this id or alias"),
        ("tasks: {a: {candidates: [b]}, b: {candidates: [large]}}\n", "b: is a task; name models"),
        ("tasks: {a: {candidates: [large, best]}}\n", "best is the model large, which is named before"),
        ("tasks: {large: {candidates: [large]}}\n", "tasks.large: is already the id of a model"),
        ("tasks: {best: {candidates: [large]}}\n", "tasks.best: is already an alias of a model"),
        ("tasks: {a: {candidates: [large], set_params: {model: x}}}\n", "tasks.a.set_params.model: cannot be set"),
        ("tasks: {a: {candidates: [large], keep_alive_s: -0.5}}\n", "tasks.a.keep_alive_s: is seconds, or -1 to stay"),
        ("tasks: {load: {candidates: [large]}}\n", "is a word of the management API"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(tmp_path: Path, tasks: str, said: str) -> None:
    told = problems(tmp_path, MODELS + "remotes: {claude: {provider: anthropic, api_key_env: K}}\n", tasks)
    assert len(told) == 1 and said in told[0], told


def test_tasks_in_both_files_are_refused(tmp_path: Path) -> None:
    told = problems(tmp_path, MODELS + "tasks: {}\n", "tasks: {}\n")
    assert len(told) == 1 and told[0].startswith("tasks.yaml:1: tasks: are in ")
