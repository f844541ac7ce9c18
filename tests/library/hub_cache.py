"""Repositories in the layout of the hub's cache, written by hand: blobs by their hash, snapshots of links, refs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def repository(cache: Path, hub_id: str) -> Path:
    return cache / f"models--{hub_id.replace('/', '--')}"


def add_snapshot(
    cache: Path, hub_id: str, commit: str, files: Mapping[str, Path | bytes], *, refs: tuple[str, ...] = ("main",)
) -> Path:
    """A snapshot with these files, as the hub's own client leaves it. Returns its folder."""
    repo = repository(cache, hub_id)
    folder = repo / "snapshots" / commit
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        blob = repo / "blobs" / hashlib.sha256(data).hexdigest()
        if not blob.exists():
            blob.write_bytes(data)
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        path = repo / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return folder


def folder_files(folder: Path) -> dict[str, Path | bytes]:
    """The files of a folder, to make a snapshot of."""
    return {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}


def put(path: Path, model: Path) -> Path:
    """Copy a model there, as a person would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if model.is_dir():
        shutil.copytree(model, path)
    else:
        shutil.copyfile(model, path)
    return path
