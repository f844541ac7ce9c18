"""The worker for torch models, started by path under the Python of its engine.

Owns nothing but the way in: its folder is first on the path of modules, so that `torch_host` is found beside it without
the rest of greenroom, which that Python need not have.
"""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("torch_host.main").main())
