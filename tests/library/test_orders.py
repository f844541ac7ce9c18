"""What callers may order, and where it may lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import BadRequest
from greenroom.library.orders import PATTERNS_MAX, DownloadOrder, FetchPlace, OrderRules, place_of, read_order
from greenroom.library.roots import Roots

RULES = OrderRules(hosts=("files.example", "other.example:8443"))


def order(**said: Any) -> DownloadOrder:
    return read_order(RULES, **said)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("org/name", DownloadOrder(repo="org/name")),
        ("gpt2", DownloadOrder(repo="gpt2")),
        ("org/name:Q4_K_M", DownloadOrder(repo="org/name", quantization="Q4_K_M")),
        ("org/name@v1.0", DownloadOrder(repo="org/name", revision="v1.0")),
        ("https://huggingface.co/org/name", DownloadOrder(repo="org/name")),
        ("https://hf.co/org/name/", DownloadOrder(repo="org/name")),
        ("https://huggingface.co/gpt2", DownloadOrder(repo="gpt2")),
        ("https://huggingface.co/org/name/tree/v2", DownloadOrder(repo="org/name", revision="v2")),
        ("https://huggingface.co/gpt2/tree/main", DownloadOrder(repo="gpt2", revision="main")),
        (
            "https://huggingface.co/org/name/resolve/main/a/b%20[1].gguf?download=true",
            DownloadOrder(repo="org/name", revision="main", include=("a/b [[]1].gguf",)),
        ),
        (
            "https://huggingface.co/org/name/blob/refs%2Fpr%2F3/x.gguf",
            DownloadOrder(repo="org/name", revision="refs/pr/3", include=("x.gguf",)),
        ),
        (
            "https://huggingface.co/org/name/tree/refs/pr/3/sub",
            DownloadOrder(repo="org/name", revision="refs/pr/3", include=("sub/*",)),
        ),
        ("https://files.example/a/b.gguf?key=1", DownloadOrder(url="https://files.example/a/b.gguf?key=1")),
        ("HTTPS://Files.example.:443/%61/b%2fc.gguf#x", DownloadOrder(url="https://files.example/a/b%2Fc.gguf")),
        ("https://other.example:8443/b.gguf", DownloadOrder(url="https://other.example:8443/b.gguf")),
    ],
)
def test_names_and_addresses_are_understood(said: str, wanted: DownloadOrder) -> None:
    assert order(model=said) == wanted
    if "://" in said:
        assert order(url=said) == wanted


@pytest.mark.parametrize(
    "said",
    [
        *("", "..", "../x", "a/../b", "a/b/c", "org/..", "org//name", "/etc/passwd", "a--b/c", "-a/b", "a/b.", "a b"),
        *("org/name:", "org/name:..", "org/name@", "org/name@../../x", "org/name\n", "x" * 500),
    ],
)
def test_what_is_no_name_is_refused(said: str) -> None:
    with pytest.raises(BadRequest):
        order(model=said)


@pytest.mark.parametrize(
    "said",
    [
        *("", "file:///etc/passwd", "ftp://files.example/x", "https://", "https://files.example:bad/x", "//x/y"),
        *("http://files.example/x.gguf", "https://elsewhere.example/x.gguf", "https://127.0.0.1/x.gguf"),
        *("https://user:secret@files.example/x", "https://files.example@evil.example/x", "https://other.example/x"),
        *("https://huggingface.co", "https://huggingface.co/datasets/org/name", "https://huggingface.co/a/b/c"),
        *("https://huggingface.co/api/models/org/name", "https://huggingface.co/org/name/resolve/main/../../x"),
        *(
            "https://huggingface.co/org/name/tree/..%2F..",
            "https://huggingface.co:8443/org/name",
            "https://files.exa mple/",
        ),
    ],
)
def test_addresses_of_nothing_that_may_be_fetched_are_refused(said: str) -> None:
    with pytest.raises(BadRequest):
        order(url=said)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"model": "a/b", "url": "https://hf.co/a/b"},
        {"model": "a/b", "quantization": "*"},
        {"model": "a/b", "revision": "../x"},
        {"model": "a/b", "include": ["x"] * (PATTERNS_MAX + 1)},
        {"model": "a/b", "include": [""]},
        {"model": "a/b", "exclude": ["x" * 1000]},
        {"model": "a/b", "destination": ""},
        {"model": "a/b", "destination": "a\0b"},
        {"url": "https://files.example/x.gguf", "quantization": "Q4_0"},
    ],
    ids=str,
)
def test_other_fields_are_checked(said: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        order(**said)


@given(st.text(max_size=60))
def test_no_text_makes_a_name_that_leaves_its_folder(said: str) -> None:
    try:
        found = order(model=said)
    except BadRequest:
        return
    assert found.repo is not None
    for part in (*found.repo.split("/"), *(found.revision or "x").split("/")):
        assert part not in ("", ".", "..")
    assert found.repo.count("/") <= 1


def test_a_mirror_is_the_hub_too() -> None:
    rules = OrderRules.of((), {"HF_ENDPOINT": "http://mirror.lan:8080/"})
    assert read_order(rules, url="http://mirror.lan:8080/org/name").repo == "org/name"
    assert read_order(rules, url="https://huggingface.co/org/name").repo == "org/name"


def test_queries_are_not_shown() -> None:
    assert order(url="https://files.example/b.gguf?secret=1").name == "https://files.example/b.gguf"


# --- places -----------------------------------------------------------------------------------------------------------


def test_the_hubs_cache_is_the_place_of_what_has_no_destination(tmp_path: Path) -> None:
    roots, plain = Roots([str(tmp_path / "a"), str(tmp_path / "b")]), DownloadOrder(repo="a/b")
    cache = str(tmp_path / "b" / "hub")
    assert place_of(plain, roots, cache) == FetchPlace(cache=cache)
    assert place_of(plain, roots, None) == FetchPlace(cache=str(tmp_path / "a"))
    # A cache that is not below a root is not looked at: what lies there would never be found.
    assert place_of(plain, roots, "/cache") == FetchPlace(cache=str(tmp_path / "a"))
    with pytest.raises(BadRequest):
        place_of(plain, Roots(()), "/cache")


def test_a_destination_lies_below_a_root_wherever_links_lead(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other, tmp_path / "out"):
        folder.mkdir()
    (root / "link").symlink_to(tmp_path / "out")
    (root / "fine").symlink_to(other)
    roots = Roots([str(root), str(other)])

    def place(destination: str) -> FetchPlace:
        return place_of(DownloadOrder(repo="a/b", destination=destination), roots, None)

    assert place("new/one") == FetchPlace(folder=f"{root}/new/one", root=str(root))
    assert place(f"{other}/x") == FetchPlace(folder=f"{other}/x", root=str(other))
    assert place("fine/x") == FetchPlace(folder=f"{other}/x", root=str(other))
    for bad in ("link", "link/x", "..", "../out", "/etc", "new/../../out", f"{root}x"):
        with pytest.raises(BadRequest):
            place(bad)
    # Where nothing is a model: the marks of what was fetched, locks, and the hub's blobs, which are models elsewhere.
    (root / "marks").symlink_to(root / ".greenroom")
    for bad in (".greenroom", "marks", "a/.locks/b", "models--org--name/blobs", "models--org--name"):
        with pytest.raises(BadRequest, match="hidden, or in the hub's cache"):
            place(bad)
