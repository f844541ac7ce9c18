"""Where files of models may lie: below the folders an operator names, once every link on the way is resolved.

Owns one check, made before anything of a model is read for a load. Looks at names only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from greenroom.errors import OutsideRoots
from greenroom.runtime.catalogue import Entry


def check_roots(entry: Entry, roots: Sequence[str]) -> None:
    """Raises OutsideRoots for a model with a file that lies elsewhere. Blocks for as long as its disk does."""
    if not roots or entry.config.path is None:
        return
    allowed = [os.path.realpath(root) for root in roots]
    for file in (Path(entry.config.path), *entry.engine.files(entry.config)):
        whole = os.path.realpath(file)
        if not any(os.path.commonpath((whole, root)) == root for root in allowed):
            raise OutsideRoots(
                f"{entry.id}: {file} lies outside of model_roots ({', '.join(roots)}) once links are resolved. Move it "
                "there, or add its folder to model_roots in the configuration."
            )
