"""`${…}` in all its places."""

from __future__ import annotations

import pytest

from greenroom.config import macros
from greenroom.config.reader import Value

from .conftest import Complaints, Loads


def test_macro_is_put_into_a_text(loads: Loads) -> None:
    config = loads("""\
        macros: {dir: /m, n: 7, x: 1.5, yes: true}
        models:
          q: {path: "${dir}/q-${n}-${x}-${yes}.gguf"}
        """)
    assert config.models["q"].path == "/m/q-7-1.5-true.gguf"


def test_value_that_is_a_macro_keeps_its_type(loads: Loads) -> None:
    config = loads("""\
        macros: {n: 8192, flag: true, words: [--a, b], map: {k: [1, "${n}"]}, none: null, same: "${words}"}
        models:
          q:
            path: /q.gguf
            ctx_size: ${n}
            pinned: ${flag}
            args: ${same}
            metadata: ${map}
            threads: ${none}
        """)
    model = config.models["q"]
    assert (model.ctx_size, model.pinned, model.args, model.threads) == (8192, True, ("--a", "b"), None)
    assert model.metadata == {"k": [1, 8192]}
    assert config.macros["words"] == ["--a", "b"]


def test_macro_may_use_macros_defined_before_it_only(loads: Loads, complaints: Complaints) -> None:
    assert loads("macros: {a: x, b: '${a}y', c: '${b}${a}'}\nlog: {}\n").macros["c"] == "xyx"
    assert complaints("macros:\n  b: ${a}y\n  a: x\n") == [
        "my.yaml:2: macros.b: ${a} is not known; macros are defined under macros, before their first use"
    ]
    assert complaints("macros:\n  aa: ${aa}y\n")[0].startswith("my.yaml:2: macros.aa: ${aa} is not known")


def test_macros_may_stand_below_what_uses_them(loads: Loads) -> None:
    assert loads("models: {q: {path: '${d}/q.gguf'}}\nmacros: {d: /m}\n").models["q"].path == "/m/q.gguf"


def test_environment_is_put_in_as_text_and_numbers_are_read_from_it(loads: Loads) -> None:
    environ = {"PORT_": "8080", "KEY": "0123", "NAME": "${n} $${ # : {"}
    config = loads(
        """\
        macros: {n: 1, m: "${env.KEY}"}
        server:
          port: ${env.PORT_}
          api_keys:
            - name: ${env.NAME}
              key: ${env.KEY}
        state_dir: /${m}
        """,
        environ,
    )
    assert config.server.port == 8080
    assert config.server.api_keys[0].key == "0123"
    # What a variable holds is never looked into again.
    assert config.server.api_keys[0].name == "${n} $${ # : {"
    assert config.state_dir == "/0123"


def test_environment_in_comments_is_not_looked_at(loads: Loads) -> None:
    assert loads("log: {} # ${env.NO_SUCH} ${what}\n")


@pytest.mark.parametrize(
    ("value", "environ", "told"),
    [
        ("${env.HUGE_TOKEN}", {}, "the environment variable HUGE_TOKEN is not set"),
        (
            "${env.HUGE_TOKEM}",
            {"HUGE_TOKEN": "a"},
            "the environment variable HUGE_TOKEM is not set, did you mean HUGE_TOKEN?",
        ),
        ("${env.A}", {"A": "a\nb"}, "the environment variable A holds a line break or bytes that are no text"),
        ("${env.A}", {"A": "a\0b"}, "the environment variable A holds a line break or bytes that are no text"),
        ("${env.A}", {"A": "a\udcff"}, "the environment variable A holds a line break or bytes that are no text"),
        ("${contxt}", {}, "${contxt} is not known, did you mean ${context}?"),
        ("${port}", {}, "${port} is not known, did you mean ${PORT}?"),
        ("${MODEL-ID}", {}, "${MODEL-ID} is not known, did you mean ${MODEL_ID}?"),
        ("${HOME:-x}", {}, "${HOME:-x} is not known; macros are defined under macros, before their first use"),
        ("a ${open", {}, "${ is never closed by }; write $${ for a plain ${"),
        ("a ${list} b", {}, "${list} is a list, which cannot be part of a text; use it as a whole value"),
        ("a ${map} b", {}, "${map} is a mapping, which cannot be part of a text; use it as a whole value"),
        ("a ${none} b", {}, "${none} is nothing, which cannot be part of a text; use it as a whole value"),
        ("${PORT}", {}, "${PORT} can be used only in args, cmd, cmd_stop, env of a model"),
        ("${PID}", {}, "${PID} can be used only in cmd_stop of a model"),
        ("${port_in_a_macro}", {}, "${PORT} can be used only in args, cmd, cmd_stop, env of a model"),
    ],
)
def test_reference_that_cannot_be_followed_is_told(
    complaints: Complaints, value: str, environ: dict[str, str], told: str
) -> None:
    text = f"""\
        macros: {{context: 1, list: [a], map: {{a: b}}, none: null, port_in_a_macro: "--port ${{PORT}}"}}
        models:
          q:
            path: /q.gguf
            name: {value}
        """
    assert complaints(text, environ) == [f"my.yaml:5: models.q.name: {told}"]


def test_places_filled_at_the_start_are_kept_where_they_can_be_filled(loads: Loads) -> None:
    config = loads("""\
        macros: {serve: "s --port ${PORT} --name ${MODEL_ID}"}
        models:
          a/b:
            cmd: ${serve} --x
            cmd_stop: [stop, "${PID}", "${PORT}"]
            env: {P: "${PORT}"}
          c: {path: /c.gguf, args: ["--x=${PORT}"], description: "I am ${MODEL_ID}."}
        """)
    assert config.models["a/b"].cmd == "s --port ${PORT} --name a/b --x"
    assert config.models["a/b"].cmd_stop == ("stop", "${PID}", "${PORT}")
    assert config.models["a/b"].env == {"P": "${PORT}"}
    assert config.models["c"].args == ("--x=${PORT}",)
    assert config.models["c"].description == "I am c."


def test_pid_is_refused_in_cmd_and_model_id_outside_models(complaints: Complaints) -> None:
    assert complaints("models:\n  q:\n    cmd: a ${PORT} ${PID}\nstate_dir: /${MODEL_ID}\n") == [
        "my.yaml:3: models.q.cmd: ${PID} can be used only in cmd_stop of a model",
        "my.yaml:4: state_dir: ${MODEL_ID} can be used only inside a model",
    ]


def test_escape_gives_a_plain_one_that_is_not_expanded_again(loads: Loads) -> None:
    config = loads("macros: {m: '$${a} $$ $'}\nmodels: {q: {path: /q.gguf, name: '${m} $${b} $$${c}'}}\n")
    assert config.models["q"].name == "${a} $$ $ ${b} $${c}"


@pytest.mark.parametrize(
    "cmd", ["a ${PORT} $${PORT}", "a ${PORT} ${fake}", "a ${PORT} ${half}{PORT}", "a ${PORT} ${env.F}"]
)
def test_text_that_a_start_would_take_for_a_place_to_fill_is_refused(complaints: Complaints, cmd: str) -> None:
    text = f"macros: {{fake: '$${{PORT}}', half: $}}\nmodels:\n  q:\n    cmd: {cmd}\n"
    assert complaints(text, {"F": "${PORT}"}) == [
        "my.yaml:4: models.q.cmd: ${PORT} is filled at the start and cannot be escaped here"
    ]


@pytest.mark.parametrize(
    ("macro", "cmd", "line"),
    [("x", "a ${PORT} ${env.X}", "4: models.q.cmd"), ("${env.X} ${PORT}", "a ${m}", "1: macros.m")],
)
def test_a_place_to_fill_beside_a_mistake_is_no_mistake(
    complaints: Complaints, macro: str, cmd: str, line: str
) -> None:
    text = f"macros: {{m: '{macro}'}}\nmodels:\n  q:\n    cmd: {cmd}\n"
    assert complaints(text, {}) == [f"my.yaml:{line}: the environment variable X is not set"]


def test_places_for_gpus_are_kept_for_the_start_of_a_command(loads: Loads) -> None:
    config = loads("""\
        models:
          a: {cmd: "s ${PORT} ${GPUS} ${GPU_COUNT}", cmd_stop: "t ${GPUS}", env: {SPLIT: "${TENSOR_SPLIT}"}}
        """)
    model = config.models["a"]
    assert (model.cmd, model.cmd_stop) == ("s ${PORT} ${GPUS} ${GPU_COUNT}", "t ${GPUS}")
    assert model.env == {"SPLIT": "${TENSOR_SPLIT}"}


def test_places_for_gpus_stand_nowhere_else(complaints: Complaints) -> None:
    assert complaints("models: {q: {path: /q.gguf, args: ['${GPUS}']}}\n") == [
        "my.yaml:1: models.q.args[0]: ${GPUS} can be used only in cmd, cmd_stop, env of a model"
    ]


@pytest.mark.parametrize("name", ["PORT", "PID", "GPUS", "MODEL_ID", "env.A", "1a", "a b", "a" * 65, '""'])
def test_name_that_no_macro_can_have_is_refused(complaints: Complaints, name: str) -> None:
    (told,) = complaints(f"macros:\n  {name}: x\n")
    assert "cannot be a macro" in told or "a macro's name is made of" in told


def test_keys_are_not_expanded(loads: Loads) -> None:
    config = loads("macros: {m: x}\nmodels: {q: {path: /q.gguf, set_params: {'${m}': '${m}'}}}\n")
    assert config.models["q"].set_params == {"${m}": "x"}


def test_macros_of_the_wrong_shape_are_left_to_the_schema(complaints: Complaints) -> None:
    assert complaints("macros: [a]\n") == ["my.yaml:1: macros: a mapping (key: value) is wanted"]


@pytest.mark.parametrize("shape", ["'${{a{0}}}${{a{0}}}'", "['${{a{0}}}', '${{a{0}}}']"])
def test_macros_that_grow_without_end_are_refused(complaints: Complaints, shape: str) -> None:
    rows = "".join(f"  a{n}: {shape.format(n - 1)}\n" for n in range(1, 60))
    assert complaints(f"macros:\n  a0: xxxxxxxxxx\n{rows}") == ["my.yaml:1: macros: expand to more than 8 MiB"]


def test_wrong_item_inside_a_macro_is_told_where_it_is_used(complaints: Complaints) -> None:
    assert complaints("macros: {words: [a, 5]}\nmodels:\n  q:\n    path: /q.gguf\n    args: ${words}\n") == [
        "my.yaml:5: models.q.args: text is wanted, not 5; put it in quotes"
    ]


def test_tree_without_references_is_unchanged() -> None:
    tree: dict[str, Value] = {"a": [1, None, True, {"b": "$x {y} $"}]}
    assert macros.expand(tree, {}) == (tree, ())
