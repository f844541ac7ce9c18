"""What a Python source says, as a tree."""

from __future__ import annotations

import ast
import gc


def tree_of(source: str) -> ast.Module:
    """Nothing may be collected while Python 3.11 builds a tree: what prints a traceback then parses too, and
    the outer parser takes that for a fault of its own (`AST constructor recursion depth mismatch`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
