"""A folder as Ollama keeps it: manifests by name, and files named by their hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

LAYER = "application/vnd.ollama.image."
HOST = "registry.ollama.ai"


class OllamaFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)
        (root / "manifests").mkdir()

    def blob(self, content: bytes | Path) -> str:
        """Keep a layer; returns its digest."""
        data = content if isinstance(content, bytes) else content.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        path = self.root / "blobs" / f"sha256-{digest}"
        path.write_bytes(data)
        return f"sha256:{digest}"

    def path_of(self, digest: str) -> Path:
        return self.root / "blobs" / digest.replace(":", "-")

    def manifest(self, name: str, layers: Any, host: str = HOST) -> Path:
        """`name` is NAMESPACE/MODEL/TAG; layers are pairs of a kind and a digest, or anything else as it is."""
        path = self.root / "manifests" / host / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(layers, list):
            layers = {"schemaVersion": 2, "layers": [self._layer(*layer) for layer in layers]}
        path.write_text(layers if isinstance(layers, str) else json.dumps(layers))
        return path

    def _layer(self, kind: str, content: bytes | Path | str) -> dict[str, Any]:
        digest = content if isinstance(content, str) else self.blob(content)
        return {"mediaType": LAYER + kind, "digest": digest, "size": 1}
