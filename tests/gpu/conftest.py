"""What needs torch is only collected by a Python that has it: the gateway's own never does."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_torch_*"]
