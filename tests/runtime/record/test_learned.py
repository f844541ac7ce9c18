"""What was learned outlives a restart, belongs to the model that taught it, and never keeps a gateway from starting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.schema import Config
from greenroom.core.events import Learned
from greenroom.core.model import ModelId, MoveKind
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.record import learned as module
from greenroom.runtime.record.learned import FILE_NAME, LearnedTimes, known_loads_s
from greenroom.runtime.scheduler_loop import SchedulerLoop
from tests.full_disk import full_disk
from tests.waiting import until

A, B = ModelId("a"), ModelId("b/with slash")
TIMES = Learned({MoveKind.LOAD: 12.5, MoveKind.WAKE: 0.25}, 3.125)


def catalog(**changed: Any) -> Catalog:
    """Models a and b; `changed` are keys of a."""
    model = {"cmd": "engine --port ${PORT}", "memory_mib": 100}
    found = Catalog()
    found.fill(Config.model_validate({"models": {A: {**model, **changed}, B: model}}))
    return found


class Core:
    """What the scheduler says it has learned."""

    def __init__(self, **times: Learned) -> None:
        self.times = {ModelId(name): learned for name, learned in times.items()}

    def learned(self) -> dict[ModelId, Learned]:
        return self.times


def loop_of(core: Core) -> SchedulerLoop:
    return cast(SchedulerLoop, SimpleNamespace(view=core))


def times_in(folder: Path, core: Core | None = None, models: Catalog | None = None) -> LearnedTimes:
    return LearnedTimes(folder, loop_of(core or Core()), models or catalog())


async def test_times_are_known_after_a_restart(tmp_path: Path) -> None:
    await times_in(tmp_path, Core(a=TIMES)).close()
    later = times_in(tmp_path)
    assert later.recall([A, B, ModelId("stranger")]) == {A: TIMES}
    assert later.recall([B]) == {}
    assert os.listdir(tmp_path) == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [({"cmd": "other --port ${PORT}"}, False), ({"env": {"X": "1"}}, False), ({"ttl_s": 5, "aliases": ["x"]}, True)],
)
async def test_model_that_became_another_does_not_inherit(tmp_path: Path, changed: Any, is_same: bool) -> None:
    await times_in(tmp_path, Core(a=TIMES)).close()
    assert bool(times_in(tmp_path, models=catalog(**changed)).recall([A])) is is_same


async def test_model_that_is_away_for_a_while_is_remembered(tmp_path: Path) -> None:
    await times_in(tmp_path, Core(a=TIMES)).close()
    empty = Catalog()
    empty.fill(Config())
    await times_in(tmp_path, models=empty).close()
    assert times_in(tmp_path).recall([A]) == {A: TIMES}


async def test_only_so_many_models_are_remembered(tmp_path: Path) -> None:
    await LearnedTimes(tmp_path, loop_of(Core(**{A: TIMES, B: TIMES})), catalog(), models_max=1).close()
    assert times_in(tmp_path).recall([A, B]) == {B: TIMES}


async def test_times_are_written_from_time_to_time(tmp_path: Path) -> None:
    core = Core(a=TIMES)
    times = LearnedTimes(tmp_path, loop_of(core), catalog(), write_every_s=0.02)
    times.begin()
    await until(lambda: times_in(tmp_path).recall([A]) == {A: TIMES}, "written")
    core.times[A] = Learned({MoveKind.LOAD: 1.0})
    await until(lambda: times_in(tmp_path).recall([A]) == core.times, "written again")
    await times.close()


async def test_nothing_is_written_while_nothing_is_new(tmp_path: Path) -> None:
    times = times_in(tmp_path, Core(a=TIMES))
    await times.write()
    (tmp_path / FILE_NAME).unlink()
    await times.write()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half a fi",
        "[]",
        "null",
        '{"version": 2, "models": {}}',
        '{"version": 1}',
        '{"version": 1, "models": []}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {"fly": 1}, "service_s": null}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {"load": -1}, "service_s": null}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {"load": NaN}, "service_s": null}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {}, "service_s": "soon"}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {"load": 0}, "service_s": null}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {"load": 1e7}, "service_s": null}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {"load": 1'
        + 400 * "0"
        + '}, "service_s": null}}}',
        '{"version": 1, "models": {"a": {"identity": "x", "moves_s": {}, "service_s": Infinity}}}',
        "[" * 100_000,
    ],
)
async def test_file_that_cannot_be_understood_is_ignored_with_a_warning_and_replaced(
    tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    times = times_in(tmp_path, Core(a=TIMES))
    assert times.recall([A]) == {}
    assert "learned times are ignored" in capfd.readouterr().err
    await times.close()
    assert json.loads((tmp_path / FILE_NAME).read_text())["version"] == 1


async def test_no_time_that_was_learned_spoils_the_file_for_the_others(tmp_path: Path) -> None:
    odd = Learned({MoveKind.LOAD: 0.0, MoveKind.WAKE: 1e9}, 0.000001)
    await times_in(tmp_path, Core(**{A: TIMES, B: odd})).close()
    bounded = Learned({MoveKind.LOAD: module.SECONDS_MIN, MoveKind.WAKE: module.SECONDS_MAX}, module.SECONDS_MIN)
    assert times_in(tmp_path).recall([A, B]) == {A: TIMES, B: bounded}


async def test_file_that_is_not_text_is_ignored(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe\x00")
    assert times_in(tmp_path).recall([A]) == {}


async def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    core = Core(a=TIMES)
    times = times_in(tmp_path, core)
    await times.write()
    core.times[A] = Learned({MoveKind.LOAD: 99.0})
    with full_disk(10):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                await times.write()
    assert times_in(tmp_path).recall([A]) == {A: TIMES}
    assert os.listdir(tmp_path) == [FILE_NAME]
    # Once there is room again, it is written.
    await times.close()
    assert times_in(tmp_path).recall([A]) == core.times


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    assert known_loads_s(tmp_path, {}) == {}
