"""Which build this is: with the hot path as machine code, or as Python. For people who read logs and figures."""

from __future__ import annotations

from typing import Final

from greenroom.http import edge

NAME: Final = "pure" if edge.__file__.endswith(".py") else "compiled"
