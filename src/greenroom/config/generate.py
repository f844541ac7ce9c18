"""Writes what is made from the schema: the example, the JSON schema and the reference inside the docs.

`python -m greenroom.config.generate` writes them, with `--check` it only says which are out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from greenroom.config.published.example import example
from greenroom.config.published.reference import json_schema, tables

ROOT = Path(__file__).resolve().parents[3]
GUIDE = "docs/configuration.md"
BEGIN = "<!-- begin of the reference, written by python -m greenroom.config.generate -->"
END = "<!-- end of the reference -->"


def generated(root: Path) -> dict[str, str]:
    """The text each file should have, by its path below the root of the repository."""
    return {
        "config.example.yaml": example(),
        "docs/config.schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
        GUIDE: with_reference((root / GUIDE).read_text(encoding="utf-8")),
    }


def with_reference(guide: str) -> str:
    """The guide with the part between the markers renewed. Raises ValueError if it has lost them."""
    before, _, rest = guide.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{GUIDE} needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def outdated(root: Path) -> list[str]:
    wanted = generated(root)
    return [name for name in wanted if not (root / name).is_file() or (root / name).read_text("utf-8") != wanted[name]]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m greenroom.config.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check_only = parser.parse_args(argv).check
    stale = outdated(root)
    for name, text in generated(root).items():
        if name in stale and not check_only:
            (root / name).write_text(text, encoding="utf-8")
    did = "is out of date; run python -m greenroom.config.generate" if check_only else "written"
    sys.stdout.writelines(f"{name} {did}\n" for name in stale)
    return 1 if stale and check_only else 0


if __name__ == "__main__":
    sys.exit(main())
