"""Files of models lie below the folders that the operator names, or are not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.schema import Config, Model
from greenroom.errors import OutsideRoots
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.moves.admission import check_roots


def entry(**keys: str) -> Entry:
    catalog = Catalog()
    catalog.fill(Config(models={"m": Model(**keys)}))  # type: ignore[arg-type]
    (only,) = catalog
    return only


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    (tmp_path / "roots").mkdir()
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "roots"


def folder(base: Path) -> Path:
    path = base / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_without_roots_files_lie_anywhere(tmp_path: Path) -> None:
    check_roots(entry(path=str(folder(tmp_path))), ())


def test_files_below_a_root_are_served_also_through_links_that_stay_below(roots: Path) -> None:
    model = folder(roots)
    (roots / "blob").write_text("weights")
    (model / "model.safetensors").symlink_to("../blob")
    check_roots(entry(path=str(model)), (str(roots),))
    check_roots(entry(cmd="serve ${PORT}"), (str(roots),))


@pytest.mark.parametrize("name", ["m.gguf", "model"])
def test_a_path_that_only_begins_like_a_root_lies_outside(roots: Path, name: str) -> None:
    with pytest.raises(OutsideRoots, match="lies outside of the roots"):
        check_roots(entry(path=f"{roots}2/{name}"), (str(roots),))
    with pytest.raises(OutsideRoots):
        check_roots(entry(path=f"{roots}/../{name}"), (str(roots),))


def test_a_link_that_leads_out_is_refused_for_the_folder_and_for_each_file(roots: Path) -> None:
    (roots / "link").symlink_to(folder(roots.parent / "elsewhere"))
    with pytest.raises(OutsideRoots, match=r"m: .*link"):
        check_roots(entry(path=str(roots / "link")), (str(roots),))
    model = folder(roots)
    (model / "model.safetensors").symlink_to(roots.parent / "elsewhere" / "model" / "config.json")
    with pytest.raises(OutsideRoots, match=r"model\.safetensors"):
        check_roots(entry(path=str(model)), (str(roots),))


def test_a_root_that_is_a_link_itself_is_what_it_leads_to(roots: Path) -> None:
    (roots.parent / "alias").symlink_to(roots)
    check_roots(entry(path=str(folder(roots))), (str(roots.parent / "alias"),))


def test_modules_of_an_embedding_model_lie_below_a_root_too(roots: Path) -> None:
    model = folder(roots)
    outside = roots.parent / "elsewhere" / "2_Dense"
    outside.mkdir()
    (outside / "model.safetensors").write_text("weights")
    (model / "2_Dense").symlink_to(outside)
    catalog = Catalog()
    catalog.fill(Config(models={"m": Model(path=str(model), embedding=True)}))
    (only,) = catalog
    with pytest.raises(OutsideRoots, match="2_Dense"):
        check_roots(only, (str(roots),))
