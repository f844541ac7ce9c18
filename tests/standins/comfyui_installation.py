"""An installation of ComfyUI as far as the engine looks at it: the stand-in, a checkpoint, a workflow."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).parent / "fake_comfyui.py"
INPUTS: dict[str, Any] = {
    "prompt": "6.text",
    "negative_prompt": "7.text",
    "seed": "3.seed",
    "steps": ["3.steps"],
    "guidance_scale": "3.cfg",
    "width": "5.width",
    "height": "5.height",
}
WORKFLOW: dict[str, Any] = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 1,
            "steps": 4,
            "cfg": 7.0,
            "model": ["4", 0],
            "positive": ["6", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        },
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 512, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "ugly", "clip": ["4", 1]}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "x"}},
}


class Installation:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "models" / "checkpoints"
        self.workflow = folder / "workflow.json"
        self.journal = folder / "journal"
        self.checkpoints.mkdir(parents=True)
        (self.checkpoints / "tiny.safetensors").write_bytes(bytes(1024))
        program = f"import runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n"
        (folder / "main.py").write_text(program)
        self.write(WORKFLOW)

    def write(self, workflow: Any) -> None:
        self.workflow.write_text(json.dumps(workflow))

    @property
    def switches(self) -> list[str]:
        return ["--checkpoints", str(self.checkpoints), "--journal", str(self.journal)]

    def model(self, *switches: str, **keys: Any) -> dict[str, Any]:
        return {
            "engine": "comfyui",
            "path": str(self.folder),
            "args": [*self.switches, *switches],
            "workflow": str(self.workflow),
            "inputs": INPUTS,
            "memory_mib": 100,
            "stop_timeout_s": 5,
            **keys,
        }

    def lines(self, *events: str) -> list[dict[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] in events]


@functools.cache
def _shared() -> tuple[tempfile.TemporaryDirectory[str], Installation]:
    """Removed at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="greenroom-comfyui-")
    return folder, Installation(Path(folder.name, "comfy"))


def shared() -> Installation:
    """One for all tests that only run it."""
    return _shared()[1]
