"""Renders the folders of deploy/kubernetes as kustomize does, as far as they use it; refuses what it does not know.

For machines without kustomize. Where it is at hand, a test compares the two. Names of generated maps have no hash.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"

Object = dict[str, Any]
KNOWN = {"apiVersion", "kind", "namespace", "labels", "resources", "components", "configMapGenerator", "patches"}
WITHOUT_NAMESPACE = {"Namespace"}


def render(folder: Path) -> list[Object]:
    """The objects of a base, an overlay or a component."""
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(said) <= KNOWN, f"{folder}: {set(said) - KNOWN}"
    objects = [one for name in said.get("resources", ()) for one in _resource(folder / name)]
    objects += [_config_map(folder, given) for given in said.get("configMapGenerator", ())]
    for name in said.get("components", ()):
        objects += render(folder / name)
    for patch in said.get("patches", ()):
        objects = _patched(objects, yaml.safe_load((folder / patch["path"]).read_text()))
    for one in objects:
        if "namespace" in said and one["kind"] not in WITHOUT_NAMESPACE:
            one["metadata"]["namespace"] = said["namespace"]
        for labels in said.get("labels", ()):
            one["metadata"]["labels"] = {**one["metadata"].get("labels", {}), **labels["pairs"]}
    return objects


def _resource(path: Path) -> list[Object]:
    return render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))


def _config_map(folder: Path, given: Object) -> Object:
    data = {name: (folder / name).read_text() for name in given.get("files", ())}
    for name in given.get("envs", ()):
        lines = (line for line in (folder / name).read_text().splitlines() if line and not line.startswith("#"))
        data.update(line.split("=", 1) for line in lines)
    assert set(given) <= {"name", "files", "envs"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": given["name"]}, "data": data}


def _patched(objects: list[Object], patch: Object) -> list[Object]:
    def is_meant(one: Object) -> bool:
        return one["kind"] == patch["kind"] and one["metadata"]["name"] == patch["metadata"]["name"]

    assert any(map(is_meant, objects)), f"nothing to patch: {patch}"
    if patch.get("$patch") == "delete":
        return [one for one in objects if not is_meant(one)]
    return [_merged(one, patch) if is_meant(one) else one for one in objects]


def _merged(old: Any, new: Any) -> Any:
    """Lists are replaced: no patch of ours touches a list that is there already."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    assert not isinstance(old, list)
    return new


def real_kustomize() -> list[str] | None:
    """The command that renders a folder, if there is one."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        known = subprocess.run(["kubectl", "kustomize", "--help"], capture_output=True, check=False).returncode == 0
        return ["kubectl", "kustomize"] if known else None
    return None
