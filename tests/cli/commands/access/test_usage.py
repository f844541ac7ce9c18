from __future__ import annotations

from typing import Any

from greenroom.telemetry.activity import FIGURES
from tests.cli.command import Cli
from tests.cli.fake_gateway import Answer, FakeGateway, answer

PATH = "/api/v1/usage"


def used(**known: Any) -> dict[str, Any]:
    counted = ("requests", "refused", "rate_limited", "failed", "aborted", "estimated", "uncounted")
    return {name: 0 if name in counted else None for name in FIGURES} | {"answer_s": 0.0} | known


def usage(*rows: dict[str, Any], total: dict[str, Any], by: tuple[str, ...] = ("key", "model")) -> dict[str, Any]:
    return {"since": 0, "until": 1, "by": list(by), "rows": list(rows), "total": total}


def test_a_table_with_a_row_for_each_group_and_a_total(gateway: FakeGateway, cli: Cli) -> None:
    alice = used(key="alice", model="big model", requests=12, prompt_tokens=3456, completion_tokens=78, answer_s=90.0)
    nobody = used(key=None, model=None, requests=2, refused=2)
    total = used(requests=14, refused=2, prompt_tokens=3456, completion_tokens=78, answer_s=90.0, uncounted=3)
    gateway.on("GET", PATH, answer(usage(alice, nobody, total=total)))
    out, err = cli("usage", "--since", "7d", "--by", "key,model")
    assert out.splitlines() == [
        "KEY    MODEL      REQUESTS  REFUSED  FAILED  ABORTED  PROMPT  CACHED  COMPLETION  GPU  ANSWERS",
        "alice  big_model  12        0        0       0        3456    -       78          -    2m",
        "-      -          2         2        0       0        -       -       -           -    0.0s",
        "total  -          14        2        0       0        3456    -       78          -    2m",
    ]
    assert "of 3 answers no tokens are known" in err
    assert gateway.asked[-1].target == f"{PATH}?since=7d&by=key%2Cmodel"


def test_sound_and_pictures_have_columns_where_there_are_any(gateway: FakeGateway, cli: Cli) -> None:
    row = used(requests=1, audio_s=30.0, pictures=4)
    gateway.on("GET", PATH, answer(usage(row | {"model": "w"}, total=row, by=("model",))))
    titles, *rows = cli("usage").lines
    assert titles.split()[-2:] == ["AUDIO", "PICTURES"] and [line.split()[-2:] for line in rows] == [["30s", "4"]]


def test_json_and_csv_are_what_the_gateway_gave(gateway: FakeGateway, cli: Cli) -> None:
    whole = usage(total=used())
    gateway.on("GET", PATH, answer(whole))
    assert cli("usage", "--json").json == whole
    gateway.on("GET", PATH, Answer(b"model,requests\r\nm,1\r\n", content_type="text/csv"))
    assert cli("usage", "--csv", "--until", "2026-11-02").out == "model,requests\r\nm,1\r\n"
    assert gateway.asked[-1].target == f"{PATH}?since=30d&by=model&until=2026-11-02&format=csv"
