"""The one thing that pyproject.toml cannot say: an optional build whose hot path is machine code.

    GREENROOM_COMPILE=1 pip install .        needs a C compiler and takes some minutes

Everything else is in pyproject.toml. Why, and what it gives: docs/adr/0005-a-compiled-build.md.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Extension

HERE = Path(__file__).resolve().parent
PACKAGE = Path("src", "greenroom")

# What every request runs through, and what is called from there. The rest waits for people, disks and engines.
HOT = (
    "base/names.py",
    "errors.py",
    "core/**/*.py",
    "dialects/dialect.py",
    "dialects/heartbeat.py",
    "engines/usage.py",
    "http/**/*.py",
    "runtime/catalogue.py",
    "runtime/loop.py",
    "runtime/resolver.py",
    "runtime/scheduler_loop.py",
    "runtime/slots.py",
    "api/front.py",
    "serving/admitted.py",
    "serving/answer_facts.py",
    "serving/attempt.py",
    "serving/answer_relays.py",
    "serving/body/media.py",
    "serving/body/peek.py",
    "serving/buffered.py",
    "serving/failover.py",
    "serving/prefix_cache.py",
    "serving/read.py",
    "serving/request.py",
    "serving/request_log.py",
    "serving/requests.py",
    "serving/routes.py",
    "serving/serve.py",
    "serving/sweep.py",
    "telemetry/activity.py",
    "telemetry/metrics.py",
    "access/budgets.py",
    "access/keys.py",
    "access/limits.py",
    "access/client_stats.py",
    "access/shared_window.py",
)
# Only tests and simulations ask for the invariants; code of packages themselves runs only at the start.
NOT_HOT = ("core/invariants.py", "*/__init__.py")
# Nothing outside uses the functions of the one library but Python, by pointers. Without these flags each call between
# two of them is indirect and none is inlined, which makes a request a tenth dearer.
DIRECT_CALLS = ["-fvisibility=hidden", "-fno-plt"]


def is_wanted() -> bool:
    return os.environ.get("GREENROOM_COMPILE") == "1"


def hot_files() -> list[str]:
    found = {path for pattern in HOT for path in PACKAGE.glob(pattern)}
    return sorted(str(path) for path in found if not any(path.match(pattern) for pattern in NOT_HOT))


def build_requirements() -> list[str]:
    """The compiler of types to C, and what the types of the compiled modules and of their imports are made of."""
    if not is_wanted():
        return []
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tools = [name for name in extras["dev"] if name.startswith(("mypy", "types-"))]
    return [*tools, *project["dependencies"], *extras["redis"]]


def extensions() -> list[Extension]:
    # A build asks several times what is needed and how things are called before it builds anything.
    if not is_wanted() or "bdist_wheel" not in sys.argv:
        return []
    from mypyc.build import mypycify

    extensions: list[Extension] = mypycify(hot_files(), group_name="greenroom", opt_level="2", debug_level="0")
    for extension in extensions:
        # They share one list.
        extension.extra_compile_args = [*extension.extra_compile_args, *DIRECT_CALLS]
    return extensions


if __name__ == "__main__":
    from setuptools import setup

    setup(setup_requires=build_requirements(), ext_modules=extensions())
