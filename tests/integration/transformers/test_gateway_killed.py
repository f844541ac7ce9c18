"""The gateway holds the weights of hosted models. When it is killed, they and the workers are gone, by themselves."""

from __future__ import annotations

from pathlib import Path

from tests.harness import gateway_process
from tests.integration.faults import dial
from tests.integration.raw import asking
from tests.models import tiny_hf
from tests.torch_python import hosted


async def test_gateway_killed_leaves_no_worker_and_its_successor_serves(tmp_path: Path) -> None:
    models = {"alpha": hosted(tiny_hf("alpha")), "bravo": hosted(tiny_hf("bravo"))}
    options = {"memory": {"spare_worker": False}}
    for _ in range(2):
        with gateway_process(tmp_path, models, **options) as gate:
            for model in models:
                async with await dial(gate.port) as raw:
                    raw.ask(asking(model))
                    answer = await raw.answer()
                assert answer.status == 200 and model in answer.text
            gate.kill()
            assert gate.nothing_left()
