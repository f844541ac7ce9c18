"""The program against a hub that misbehaves, with the real huggingface_hub."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standins.standin_hub import StandinHub, standin_hub
from tests.waiting import PATIENCE_S, until_now
from tests.workers.fetching.fetcher import Fetcher, environment, fetch

REPO = "org/name"
TOKEN = "hf_secretsecretsecret"
FILES = {
    "model.safetensors": random.Random(1).randbytes(300_000),
    "pytorch_model.bin": b"pickle" * 1000,
    "config.json": b'{"model_type": "llama"}',
    "empty.txt": b"",
    "onnx/model.onnx": random.Random(2).randbytes(50_000),
}
WANTED = [name for name in FILES if name != "pytorch_model.bin"]


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    with standin_hub() as hub:
        hub.repos[REPO] = dict(FILES)
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def last(reports: list[dict[str, Any]]) -> dict[str, Any]:
    assert reports, "it said nothing"
    return reports[-1]


def completed(reports: list[dict[str, Any]]) -> None:
    assert last(reports)["event"] == "done", reports


def failed(reports: list[dict[str, Any]]) -> str:
    assert last(reports)["event"] == "error", reports
    return str(last(reports)["code"])


def whole(cache: Path, names: list[str] = WANTED, files: dict[str, bytes] = FILES) -> None:
    """The cache has exactly these files, right and once."""
    snapshot = next((cache / "models--org--name" / "snapshots").iterdir())
    found = {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}
    assert found == {name: files[name] for name in names}
    assert len(list((cache / "models--org--name" / "blobs").iterdir())) == len(names)


def named_right(folder: Path, files: dict[str, bytes]) -> None:
    """Whatever has a real name has its right content."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            assert path.read_bytes() == files[str(path.relative_to(folder))]


def test_repository_lies_in_the_cache_as_huggingface_hub_has_it(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    reports = fetch(hub, tmp_path, repo=REPO, cache=str(cache))
    completed(reports)
    assert reports[0]["commit"] == hub.commit(REPO)
    whole(cache)
    # Without asking for a byte, the package finds it.
    code = "import huggingface_hub as h, sys; print(h.snapshot_download(sys.argv[1], cache_dir=sys.argv[2]))"
    env = environment(hub, tmp_path) | {"HF_HUB_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-c", code, REPO, str(cache)], env=env, capture_output=True, text=True)
    assert out.stdout.strip() == last(reports)["path"]


def test_files_that_are_here_are_not_fetched_again(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    fetch(hub, tmp_path, repo=REPO, cache=str(cache))
    sent = hub.sent
    reports = fetch(hub, tmp_path, repo=REPO, cache=str(cache))
    assert (last(reports)["event"], hub.sent) == ("done", sent)
    assert sum(reports[-2]["files"].values()) == sum(len(FILES[name]) for name in WANTED)


def test_plain_folder_has_the_files_and_nothing_else(hub: StandinHub, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine"
    completed(fetch(hub, tmp_path, repo=REPO, folder=str(folder), root=str(tmp_path / "models")))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {name: FILES[name] for name in WANTED}
    sent = hub.sent
    hub.repos[REPO]["config.json"] = b"{}"
    completed(fetch(hub, tmp_path, repo=REPO, folder=str(folder)))
    assert (folder / "config.json").read_bytes() == b"{}"
    assert hub.sent == sent + 2


def test_names_that_begin_alike_do_not_harm_each_other(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos[REPO] = files = {
        name: name.encode() for name in ("LICENSE", "LICENSE.txt", "LICENSE.txt.part", "a/LICENSE")
    }
    folder = tmp_path / "f"
    completed(fetch(hub, tmp_path, repo=REPO, folder=str(folder)))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == files


@pytest.mark.slow
def test_parts_of_an_older_content_go_when_the_new_one_is_there(hub: StandinHub, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    hub.faults.cut = 99
    assert failed(fetch(hub, tmp_path, repo=REPO, folder=str(folder), include=["*.safetensors"])) == "hub_unreachable"
    assert list(folder.glob(".model.safetensors.*.part"))
    hub.repos[REPO]["model.safetensors"], hub.faults.cut = b"new", 0
    completed(fetch(hub, tmp_path, repo=REPO, folder=str(folder), include=["*.safetensors"]))
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("where", ["cache", "folder"])
def test_names_that_begin_with_a_dot_are_not_fetched(hub: StandinHub, tmp_path: Path, where: str) -> None:
    planted = (
        ".greenroom/00",
        "a/.greenroom/00",
        ".GreenRoom/00",
        "\uff0egreenroom/00",
        "\u2024greenroom/00",
        "a/.. /b",
    )
    own = (".greenroom.lock", f".a.gguf.{'0' * 16}.whole", ".gitattributes", ".no_exist/x")
    hub.repos[REPO] = {name: name.encode() for name in (*planted, *own, "a.gguf", "a/b.gguf")}
    asked = {"repo": REPO, where: str(tmp_path / "f"), "include": ["*"]}
    reports = fetch(hub, tmp_path, **asked)
    completed(reports)
    place = Path(last(reports)["path"])
    assert {str(path.relative_to(place)) for path in place.rglob("*")} == {"a.gguf", "a", "a/b.gguf"}
    assert failed(fetch(hub, tmp_path, url=f"{hub.url}/x/.greenroom", folder=str(tmp_path / "g"))) == "bad_url"


@pytest.mark.parametrize(
    ("where", "names"), [("folder", ("a.bin", "a.bin/b.bin")), ("cache", ("z", "z/y/x/w")), ("folder", ("a/b", "a/b"))]
)
def test_files_that_cannot_lie_beside_each_other_are_refused_before_anything_is_written(
    hub: StandinHub, tmp_path: Path, where: str, names: tuple[str, str]
) -> None:
    hub.repos[REPO] = {"0": b"0", "1": b"1"}
    hub.listed = {number: {"rfilename": name} for number, name in zip("01", names, strict=True)}
    reports = fetch(hub, tmp_path, repo=REPO, **{where: str(tmp_path / "f")})
    assert failed(reports) == "bad_repo" and names[0] in last(reports)["message"]
    assert not (tmp_path / "f").exists()


def test_a_folder_at_the_name_of_a_file_is_told_before_anything_is_written(hub: StandinHub, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    (folder / "model.safetensors").mkdir(parents=True)
    assert failed(fetch(hub, tmp_path, repo=REPO, folder=str(folder))) == "disk_error"
    assert list(folder.iterdir()) == [folder / "model.safetensors"] and hub.sent == 0


# --- faults that pass -------------------------------------------------------------------------------------------------


# Each starts a program that imports the hub's package for half a second.
FAULTS_THAT_PASS = [
    {"refuse": 2, "refuse_with": 429, "retry_after": "0"},
    {"stall": 1},
    {"wrong_size": 1},
    {"html": 1},
    {"cut": 1, "no_ranges": True},
    {"cut": 1, "wrong_range": 1},
    {"api_refuse": 1, "api_with": 429, "retry_after": "0"},
]


@pytest.mark.parametrize(
    "fault",
    [
        {"refuse": 3},
        {"cut": 4},
        {"wrong_hash": 1},
        {"api_refuse": 2},
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS_THAT_PASS),
    ],
    ids=str,
)
def test_faults_that_pass_are_outlived(hub: StandinHub, cache: Path, tmp_path: Path, fault: dict[str, Any]) -> None:
    for name, value in fault.items():
        setattr(hub.faults, name, value)
    reports = fetch(hub, tmp_path, repo=REPO, cache=str(cache), stall_s=0.5)
    completed(reports)
    whole(cache)


def test_retry_after_is_obeyed(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.faults.refuse, hub.faults.refuse_with, hub.faults.retry_after = 1, 429, "1"
    began = time.monotonic()
    completed(fetch(hub, tmp_path, repo=REPO, cache=str(cache), include=["config.json"]))
    assert time.monotonic() - began >= 1.0


FAULTS_THAT_STAY = [
    ({"refuse": 99}, "hub_error"),
    ({"refuse": 99, "refuse_with": 429, "retry_after": "0"}, "hub_busy"),
    ({"refuse": 99, "refuse_with": 404}, "file_not_found"),
    ({"stall": 99}, "stalled"),
    ({"wrong_size": 99}, "wrong_size"),
    ({"html": 99}, "not_the_file"),
    ({"gated_bytes": True}, "gated"),
    ({"api_refuse": 99, "api_with": 429, "retry_after": "0"}, "hub_busy"),
    ({"api_refuse": 99, "api_with": 500}, "hub_error"),
    ({"redirect": "ftp://127.0.0.1"}, "bad_url"),
    ({"redirect_api": "http://127.0.0.1:9/api/models/org/name"}, "redirect_refused"),
]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"refuse": 99, "refuse_with": 403}, "not_authorised"),
        ({"wrong_hash": 99}, "wrong_hash"),
        ({"gated": True}, "gated"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in FAULTS_THAT_STAY),
    ],
    ids=str,
)
def test_faults_that_stay_are_typed_and_name_nothing(
    hub: StandinHub, cache: Path, tmp_path: Path, fault: dict[str, Any], code: str
) -> None:
    for name, value in fault.items():
        setattr(hub.faults, name, value)
    stall_s = 0.2 if "stall" in fault else 20.0
    assert failed(fetch(hub, tmp_path, repo=REPO, cache=str(cache), stall_s=stall_s, backoff_s=0.01)) == code
    assert not (cache / "models--org--name" / "snapshots").exists()
    blobs = cache / "models--org--name" / "blobs"
    for blob in blobs.iterdir() if blobs.exists() else ():
        data = blob.read_bytes()
        assert blob.suffix == ".part" or blob.name in (hashlib.sha256(data).hexdigest(), _git(data))
    # What was fetched so far is of use.
    hub.faults.__init__()  # type: ignore[misc]
    completed(fetch(hub, tmp_path, repo=REPO, cache=str(cache)))
    whole(cache)


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_a_hub_that_is_not_there_is_told(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.port = 9
    assert failed(fetch(hub, tmp_path, repo=REPO, cache=str(cache))) == "hub_unreachable"


@pytest.mark.parametrize(
    ("asked", "code"), [({"repo": "org/other"}, "repo_not_found"), ({"revision": "v9"}, "revision_not_found")]
)
def test_what_the_hub_does_not_have(
    hub: StandinHub, cache: Path, tmp_path: Path, asked: dict[str, str], code: str
) -> None:
    assert failed(fetch(hub, tmp_path, **{"repo": REPO, "cache": str(cache), **asked})) == code


@pytest.mark.parametrize(
    "said",
    [
        {"rfilename": "../../etc/passwd"},
        {"rfilename": "/etc/passwd"},
        {"rfilename": "a/./b"},
        {"rfilename": "a\\..\\b"},
        {"rfilename": "a\nb"},
        {"rfilename": ""},
        {"rfilename": "a/\uff0e\uff0e/b"},
        {"rfilename": "\u200c.greenroom/00"},
        {"rfilename": "x" * 220},
        {"size": None, "lfs": None},
        {"size": -1, "lfs": None},
        {"size": True, "lfs": None},
        {"size": 2**60, "lfs": None},
        {"lfs": [1, 2]},
        {"lfs": {"size": 1, "sha256": "../../x", "pointerSize": 1}},
        {"lfs": None, "blobId": "x"},
    ],
    ids=str,
)
def test_what_a_hub_says_of_files_is_checked(
    hub: StandinHub, cache: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    hub.listed["model.safetensors"] = said
    assert failed(fetch(hub, tmp_path, repo=REPO, cache=str(cache))) == "bad_repo"
    assert not cache.exists()


def _gzipped(mib: int) -> bytes:
    return gzip.compress(b"[" + b" " * (mib * 2**20) + b"]", 1)


def _many(field: str) -> bytes:
    return json.dumps({"sha": "0" * 40, "siblings": [{"rfilename": "a"}], field: [0] * 2_000_000}).encode()


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        pytest.param(lambda: _gzipped(1500), {"Content-Encoding": "gzip"}, "not_the_file", id="gzip of 1.5 GB"),
        pytest.param(lambda: b"[" + b" " * (40 * 2**20), {}, "bad_repo", id="40 MiB", marks=pytest.mark.slow),
        pytest.param(lambda: _many("tags"), {}, "bad_repo", id="2 million values"),
        pytest.param(lambda: b"[" * 1_000_000, {}, "bad_repo", id="deep", marks=pytest.mark.slow),
        pytest.param(lambda: b'{"siblings": {}}', {}, "bad_repo", id="no list", marks=pytest.mark.slow),
        pytest.param(lambda: b"[1e999]", {}, "bad_repo", id="no object", marks=pytest.mark.slow),
        pytest.param(lambda: b"<h1>", {"Content-Type": "text/html"}, "bad_repo", id="a page", marks=pytest.mark.slow),
    ],
)
def test_the_answer_about_a_repository_is_bounded(
    hub: StandinHub, cache: Path, tmp_path: Path, body: Callable[[], bytes], headers: dict[str, str], code: str
) -> None:
    hub.faults.api_body, hub.faults.api_headers = body(), headers
    assert failed(fetch(hub, tmp_path, memory_max=2**30, repo=REPO, cache=str(cache))) == code


@pytest.mark.parametrize("part", ["head", pytest.param("body", marks=pytest.mark.slow)])
def test_a_hub_that_answers_by_bits_holds_no_place(hub: StandinHub, cache: Path, tmp_path: Path, part: str) -> None:
    hub.faults.drips = part
    assert failed(fetch(hub, tmp_path, repo=REPO, cache=str(cache), stall_s=0.2)) == "stalled"


def test_a_file_that_comes_bit_by_bit_does_not_hold_the_place(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.repos[REPO] = {"a.gguf": b"a" * 4096 * 50_000}
    hub.faults.drip_s = 0.2
    assert failed(fetch(hub, tmp_path, repo=REPO, cache=str(cache), stall_s=0.3)) == "stalled"


# --- which files ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quantization_picks_gguf_files_and_include_adds_to_them(hub: StandinHub, tmp_path: Path) -> None:
    names = ["m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m-iq4_xs.gguf", "mmproj.gguf", "config.json"]
    hub.repos[REPO] = {name: name.encode() for name in names}

    def got(number: int, **order: Any) -> set[str]:
        folder = tmp_path / str(number)
        reports = fetch(hub, tmp_path, repo=REPO, folder=str(folder), **order)
        return {path.name for path in folder.iterdir()} if last(reports)["event"] == "done" else {failed(reports)}

    assert got(1, quantization="q4_k_m") == {"m-Q4_K_M.gguf"}
    assert got(2, quantization="Q4_0") == {"m-Q4_0.gguf"}
    assert got(3, quantization="Q4_K") == {"m-Q4_K_M.gguf"}
    assert got(4, quantization="Q4_0", include=["mmproj*"]) == {"m-Q4_0.gguf", "mmproj.gguf"}
    assert got(5, include=["*.gguf"], exclude=["m-*"]) == {"mmproj.gguf"}
    assert got(6, quantization="Q9") == {"no_such_quantization"}
    assert got(7, include=["*.nothing"]) == {"no_files"}


def test_pickles_come_where_there_is_nothing_better_or_by_name(hub: StandinHub, tmp_path: Path) -> None:
    completed(fetch(hub, tmp_path, repo=REPO, folder=str(tmp_path / "a"), include=["*.bin"]))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["pytorch_model.bin"]
    del hub.repos[REPO]["model.safetensors"]
    fetch(hub, tmp_path, repo=REPO, folder=str(tmp_path / "b"))
    assert (tmp_path / "b" / "pytorch_model.bin").exists()


# --- where files may go -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_links_do_not_lead_out_of_a_root(hub: StandinHub, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "out").symlink_to(elsewhere)
    (root / "in").mkdir()
    (root / "in" / "onnx").symlink_to(elsewhere)
    for folder in (root / "out", root / "out" / "deeper", root / ".." / "elsewhere", root / "in"):
        assert failed(fetch(hub, tmp_path, repo=REPO, folder=str(folder), root=str(root))) == "outside_root"
    assert list(elsewhere.iterdir()) == []


def test_a_repository_in_a_folder_passes_for_no_other_one(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    """The library tells models of the hub by such folders."""
    planted = f"models--org--other/snapshots/{'a' * 40}/model.gguf"
    hub.repos[REPO] = {planted: b"weights", "model.gguf": b"weights"}
    asked = {"repo": REPO, "folder": str(tmp_path / "f")}
    assert failed(fetch(hub, tmp_path, **asked)) == "bad_repo"
    assert not (tmp_path / "f").exists() and hub.sent == 0
    completed(fetch(hub, tmp_path, **asked, exclude=["models--*"]))
    # In a snapshot of the cache it is a folder of this repository.
    completed(fetch(hub, tmp_path, repo=REPO, cache=str(cache)))


def test_no_byte_is_asked_for_without_room(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.listed["model.safetensors"] = {"lfs": {"size": 10**15, "sha256": "0" * 64, "pointerSize": 1}}
    assert failed(fetch(hub, tmp_path, repo=REPO, cache=str(cache))) == "disk_full"
    assert hub.sent == 0


# --- the token, and other hosts ---------------------------------------------------------------------------------------


def test_token_opens_the_hub_and_never_leaves_it(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.token = TOKEN
    with standin_hub() as elsewhere:
        elsewhere.plain = {f"/org/name/resolve/{hub.commit(REPO)}/{name}": data for name, data in FILES.items()}
        hub.faults.redirect = elsewhere.url
        fetcher = Fetcher(hub, tmp_path, token=TOKEN, repo=REPO, cache=str(cache))
        assert TOKEN.encode() not in Path(f"/proc/{fetcher.process.pid}/cmdline").read_bytes()
        reports = fetcher.reports()
        completed(reports)
        assert TOKEN not in json.dumps(reports)
        assert {one.headers.get("authorization") for one in hub.asked_for(".safetensors")} == {f"Bearer {TOKEN}"}
        assert elsewhere.seen
        assert all("authorization" not in one.headers for one in elsewhere.seen)
        assert TOKEN not in repr(elsewhere.seen)
    whole(cache)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()


def test_without_its_token_a_repository_is_hidden(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.token = TOKEN
    reports = fetch(hub, tmp_path, token="hf_wrong", repo=REPO, cache=str(cache))
    assert failed(reports) in ("repo_not_found", "not_authorised")
    assert "hf_wrong" not in json.dumps(reports)


# --- a URL ------------------------------------------------------------------------------------------------------------


def test_url_gives_one_file_which_is_resumed_by_its_etag(hub: StandinHub, tmp_path: Path) -> None:
    data = random.Random(3).randbytes(200_000)
    hub.plain["/files/some%20model.gguf".replace("%20", " ")] = data
    hub.faults.cut = 3
    asked = {"url": f"{hub.url}/files/some%20model.gguf?download=1", "folder": str(tmp_path / "f")}
    reports = fetch(hub, tmp_path, **asked)
    assert last(reports) == {"event": "done", "path": str(tmp_path / "f" / "some model.gguf")}
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["some model.gguf"]
    assert (tmp_path / "f" / "some model.gguf").read_bytes() == data
    assert hub.sent == len(data)
    ranges = [(one.headers.get("range"), one.headers.get("if-range")) for one in hub.seen[1:]]
    assert all(start and etag for start, etag in ranges)


def test_a_file_that_changed_or_cannot_be_told_apart_begins_anew(hub: StandinHub, tmp_path: Path) -> None:
    hub.plain["/m.gguf"] = b"a" * 100_000
    hub.faults.cut = 99
    asked = {"url": f"{hub.url}/m.gguf", "folder": str(tmp_path / "f")}
    assert failed(fetch(hub, tmp_path, **asked)) == "hub_unreachable"
    hub.plain["/m.gguf"], hub.faults.cut = b"b" * 90_000, 0
    completed(fetch(hub, tmp_path, **asked))
    assert (tmp_path / "f" / "m.gguf").read_bytes() == b"b" * 90_000
    hub.plain["/n.gguf"], hub.faults.cut, hub.faults.etag = b"c" * 100_000, 1, 'W/"weak"'
    completed(fetch(hub, tmp_path, **asked | {"url": f"{hub.url}/n.gguf"}))
    assert hub.asked_for("n.gguf")[-1].headers.get("range") is None


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        pytest.param(None, None, 100_000, id="another ETag"),
        pytest.param(None, 'W/"weak"', 100_000, id="a weak one"),
        pytest.param(None, "", 100_000, id="none"),
        pytest.param('"same"', '"same"', 120_000, id="another length"),
    ],
)
def test_a_range_of_another_content_is_not_added_to_what_is_here(
    hub: StandinHub, tmp_path: Path, before: str | None, after: str | None, size: int
) -> None:
    hub.plain["/m.gguf"], hub.faults.etag = b"a" * 100_000, before
    hub.faults.cut = 99
    asked = {"url": f"{hub.url}/m.gguf", "folder": str(tmp_path / "f")}
    assert failed(fetch(hub, tmp_path, **asked)) == "hub_unreachable"
    hub.plain["/m.gguf"], hub.faults.cut = b"b" * size, 0
    hub.faults.etag, hub.faults.ignores_if_range = after, True
    completed(fetch(hub, tmp_path, **asked))
    assert (tmp_path / "f" / "m.gguf").read_bytes() == b"b" * size


def test_a_file_whose_end_cannot_be_told_from_a_cut_is_not_taken(hub: StandinHub, tmp_path: Path) -> None:
    hub.plain["/m.gguf"] = b"a" * 100_000
    hub.faults.never_says_length, hub.faults.cut = True, 99
    assert failed(fetch(hub, tmp_path, url=f"{hub.url}/m.gguf", folder=str(tmp_path / "f"))) == "not_the_file"
    assert not (tmp_path / "f" / "m.gguf").exists()


# --- several at once, and ends ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cache", "folder"])
def test_two_processes_fetch_once(hub: StandinHub, tmp_path: Path, where: str) -> None:
    hub.faults.drip_s = 0.01
    fetchers = [Fetcher(hub, tmp_path, repo=REPO, **{where: str(tmp_path / "x")}) for _ in range(3)]
    assert [last(fetcher.reports())["event"] for fetcher in fetchers] == ["done"] * 3
    assert hub.sent == sum(len(FILES[name]) for name in WANTED)
    if where == "cache":
        whole(tmp_path / "x")


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False])
def test_the_hubs_own_client_and_ours_fetch_once(
    hub: StandinHub, cache: Path, tmp_path: Path, ours_first: bool
) -> None:
    code = "import huggingface_hub as h, sys; h.hf_hub_download(sys.argv[1], sys.argv[2], cache_dir=sys.argv[3])"
    argv = [sys.executable, "-c", code, REPO, "model.safetensors", str(cache)]
    env = environment(hub, tmp_path) | {"HF_HUB_DISABLE_XET": "1"}
    asked: dict[str, Any] = {"repo": REPO, "cache": str(cache), "include": ["model.safetensors"]}
    hub.faults.drip_s = 0.02
    if ours_first:
        ours = Fetcher(hub, tmp_path, **asked)
        until_now(lambda: hub.sent > 0)
        theirs = subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL)
    else:
        theirs = subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL)
        until_now(lambda: hub.sent > 0)
        ours = Fetcher(hub, tmp_path, **asked)
    assert theirs.wait(60) == 0
    completed(ours.reports())
    assert hub.sent == len(FILES["model.safetensors"])
    whole(cache, ["model.safetensors"])


def test_a_repository_that_was_renamed_answers_to_its_old_name(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.renamed[REPO], hub.token = "org/new", TOKEN
    hub.repos["org/new"] = hub.repos.pop(REPO)
    completed(fetch(hub, tmp_path, token=TOKEN, repo=REPO, cache=str(cache)))
    whole(cache)


def test_it_ends_with_the_process_that_started_it(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.2
    fetcher = Fetcher(hub, tmp_path, repo=REPO, cache=str(cache))
    until_now(lambda: hub.sent > 0)
    assert fetcher.process.stdin is not None
    fetcher.process.stdin.close()
    fetcher.process.wait(PATIENCE_S)
    fetcher.close()


def _bytes_in(folder: Path) -> int:
    """Of a folder in which files are renamed meanwhile."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_rate_is_that_of_all_files_together_and_can_be_changed(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    hub.repos[REPO] = {**FILES, "model.safetensors": (data := random.Random(5).randbytes(3_000_000))}
    began = time.monotonic()
    fetcher = Fetcher(hub, tmp_path, repo=REPO, cache=str(cache), rate_bytes_s=100_000)
    blobs = cache / "models--org--name" / "blobs"
    until_now(lambda: blobs.exists() and _bytes_in(blobs) > 100_000)
    assert time.monotonic() - began > 0.7, "100,000 bytes take a second, less what one wait lets through"
    assert fetcher.process.stdin is not None
    changed = time.monotonic()
    fetcher.process.stdin.write(b"null\n")
    fetcher.process.stdin.flush()
    completed(fetcher.reports())
    assert time.monotonic() - changed < 20, "what is left would take 29 s at the first rate"
    assert (blobs / hashlib.sha256(data).hexdigest()).read_bytes() == data


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cache", "folder"])
def test_killed_at_any_point_it_is_resumed(hub: StandinHub, tmp_path: Path, where: str) -> None:
    rng, place = random.Random(7), tmp_path / "x"
    hub.faults.drip_s = 0.005
    asked = {"repo": REPO, where: str(place)}
    files = {name: FILES[name] for name in WANTED}
    kills = 0
    while kills < 25:
        fetcher = Fetcher(hub, tmp_path, **asked)
        time.sleep(rng.uniform(0.2, 0.9))
        if fetcher.process.poll() is not None:
            # It was done before: the next one begins anew.
            fetcher.close()
            subprocess.run(["rm", "-r", str(place)], check=True)
            continue
        fetcher.kill()
        kills += 1
        if where == "folder" and place.exists():
            named_right(place, files)
    completed(fetch(hub, tmp_path, **asked))
    if where == "cache":
        whole(place)
    else:
        assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == set(files)
        named_right(place, files)


def test_a_killed_download_goes_on_where_it_was(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    data = random.Random(4).randbytes(2_000_000)
    hub.repos[REPO] = {"model.gguf": data}
    hub.faults.drip_s = 0.002
    fetcher = Fetcher(hub, tmp_path, repo=REPO, cache=str(cache))
    until_now(lambda: hub.sent > 500_000)
    fetcher.kill()
    part = next((cache / "models--org--name" / "blobs").iterdir())
    have = part.stat().st_size
    assert part.read_bytes() == data[:have]
    assert have > 100_000
    hub.faults.drip_s = 0.0
    completed(fetch(hub, tmp_path, repo=REPO, cache=str(cache)))
    assert hub.asked_for("model.gguf")[-1].headers["range"] == f"bytes={have}-"
    whole(cache, ["model.gguf"], {"model.gguf": data})


def test_missing_package_says_what_to_type(hub: StandinHub, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('no')")
    os.environ["PYTHONPATH"], before = str(tmp_path), os.environ.get("PYTHONPATH")
    try:
        reports = fetch(hub, tmp_path, repo=REPO, cache=str(cache))
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    assert failed(reports) == "hub_missing"
    assert "pip install 'greenroom[hub]'" in last(reports)["message"]
