"""The disk is full at each write in turn; and what a request may reach."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from greenroom.workers.fetching.disk import Disk
from greenroom.workers.fetching.failures import FetchError
from greenroom.workers.fetching.hub import FILES_MAX, choose
from greenroom.workers.fetching.main import Fetching, Reporter, trust_bundle
from greenroom.workers.fetching.places import CachePlace, FetchTarget, FolderPlace
from greenroom.workers.fetching.transfer import FetchPatience, RateLimit, RemoteFile
from greenroom.workers.fetching.web import HubOrigin, Network, Web, is_public, redirected, retry_after_s
from tests.standins.standin_hub import StandinHub, git_sha1, standin_hub

DATA = {"sub/model.gguf": random.Random(1).randbytes(30_000), "config.json": b"{}"}
COMMIT = "0" * 40
PATIENCE = FetchPatience(attempts_max=3, backoff_s=0.0)


class FullDisk(Disk):
    """Fails at the n-th call that needs room, and at all later ones. A write that fails may have written a part."""

    def __init__(self, fails_at: int) -> None:
        self.calls = 0
        self._fails_at = fails_at

    def _use(self) -> None:
        self.calls += 1
        if self.calls >= self._fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path) -> int:
        self._use()
        return super().open(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._use()
        # A little at a time: more calls to fail at.
        return super().write(fd, data[:7_000])

    def sync(self, fd: int) -> None:
        self._use()
        super().sync(fd)

    def rename(self, path: Path, to: Path) -> None:
        self._use()
        super().rename(path, to)

    def link(self, target: str, path: Path) -> None:
        self._use()
        super().link(target, path)

    def make_folder(self, path: Path) -> None:
        self._use()
        super().make_folder(path)


class Silent(Reporter):
    def _say(self, line: dict[str, Any]) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    with standin_hub() as hub:
        hub.plain = {f"/{name}": data for name, data in DATA.items()}
        yield hub


def remote(hub: StandinHub) -> list[RemoteFile]:
    model, config = DATA.values()
    return [
        RemoteFile("sub/model.gguf", f"{hub.url}/sub/model.gguf", len(model), hashlib.sha256(model).hexdigest()),
        RemoteFile("config.json", f"{hub.url}/config.json", len(config), None, git_sha1(config)),
    ]


def fetch(hub: StandinHub, disk: Disk, place: FetchTarget) -> Path:
    fetching = Fetching(Web(hub.url, None, 5.0), disk, RateLimit(None), Silent(), PATIENCE)
    return fetching.run(place, remote(hub))


def named(folder: Path) -> dict[str, bytes]:
    """What can be found under a real name."""
    found = folder / "models--org--name" / "snapshots" / COMMIT
    folder = found if found.parent.parent.exists() else folder
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", ["cache", "folder"])
def test_full_disk_at_each_write_names_nothing_wrong_and_is_resumed(hub: StandinHub, tmp_path: Path, kind: str) -> None:
    def place(disk: Disk, folder: Path) -> FetchTarget:
        if kind == "cache":
            return CachePlace(disk, folder, "org/name", COMMIT, None)
        return FolderPlace(disk, folder, tmp_path)

    for fails_at in range(1, 200):
        disk, folder = FullDisk(fails_at), tmp_path / f"{fails_at}"
        try:
            fetch(hub, disk, place(disk, folder))
            break
        except FetchError as error:
            assert error.code == "disk_full", error.message
        assert all(DATA[name] == data for name, data in named(folder).items())
        fetch(hub, Disk(), place(Disk(), folder))
        assert named(folder) == DATA
    assert 15 < fails_at < 199, "it must fail often, and at last succeed"
    assert named(folder) == DATA


@pytest.mark.slow
def test_a_folder_of_thousands_is_not_listed_for_each_file(tmp_path: Path) -> None:
    files = [RemoteFile(f"{number}.json", "http://x/y", 0, "0" * 64) for number in range(2_000)]
    place = FolderPlace(Disk(), tmp_path, None)
    place.prepare(files)
    for file in files:
        (tmp_path / file.path).touch()
    began = time.process_time()
    place.finish(files)
    assert time.process_time() - began < 5, "listed for each file it takes half a minute"


def test_other_errors_of_the_disk_are_told_too(hub: StandinHub, tmp_path: Path) -> None:
    (tmp_path / "models--org--name").write_text("no folder")
    with pytest.raises(FetchError) as told:
        fetch(hub, Disk(), CachePlace(Disk(), tmp_path, "org/name", COMMIT, None))
    assert told.value.code == "disk_error"


class LosingDisk(Disk):
    """Cannot write back what it has taken of files. The next sync of the same file says nothing of it."""

    def sync(self, fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


@pytest.mark.parametrize("kind", ["cache", "folder"])
def test_bytes_that_the_disk_has_lost_are_fetched_anew(hub: StandinHub, tmp_path: Path, kind: str) -> None:
    is_cache, file = kind == "cache", remote(hub)[0]
    place = CachePlace(Disk(), tmp_path, "org/name", COMMIT, None) if is_cache else FolderPlace(Disk(), tmp_path, None)
    place.prepare([file])
    losing = Fetching(Web(hub.url, None, 5.0), LosingDisk(), RateLimit(None), Silent(), PATIENCE)
    with pytest.raises(FetchError) as told:
        losing.run(place, [file])
    assert told.value.code == "disk_error"
    assert not place.part(file).exists(), "memory still has them, the disk has not"
    fetch(hub, Disk(), place)
    assert named(tmp_path) == DATA


def test_a_part_that_is_a_link_is_not_followed(hub: StandinHub, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    place = FolderPlace(Disk(), tmp_path / "f", None)
    (tmp_path / "f" / "sub").mkdir(parents=True)
    place.prepare(remote(hub))
    place.part(remote(hub)[0]).symlink_to(victim)
    with pytest.raises(FetchError) as told:
        fetch(hub, Disk(), place)
    assert (told.value.code, victim.read_text()) == ("disk_error", "mine")


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a/../b", ""])
def test_a_revision_stays_below_its_folder(tmp_path: Path, revision: str) -> None:
    if revision:
        with pytest.raises(FetchError):
            CachePlace(Disk(), tmp_path, "org/name", COMMIT, revision)


# --- what a request may reach -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "224.0.0.1"),
        *("192.0.0.192", "168.63.129.16", "::127.0.0.1", "::ffff:0:10.0.0.1", "64:ff9b:1::7f00:1", "fec0::1"),
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)


class PublicHub(Network):
    """The hub of the test seems to be at a public address; other names are as they are."""

    def __init__(self, hub: StandinHub) -> None:
        self._port = hub.port

    def look_up(self, host: str, port: int) -> list[str]:
        return ["1.1.1.1"] if host == "hub.example" else super().look_up(host, port)

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        assert is_public(address), "a private address is connected to"
        return socket.create_connection(("127.0.0.1", self._port))


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("http://127.0.0.1", "address_refused"),
        ("https://127.0.0.1", "address_refused"),
        ("https://localhost", "address_refused"),
        ("https://[::1]", "address_refused"),
        ("https://169.254.169.254", "address_refused"),
        ("https://[::ffff:10.0.0.1]:8443", "address_refused"),
        ("https://user:secret@example.com", "bad_url"),
        ("file:///etc", "bad_url"),
        ("http://hub.example", "redirect_refused"),
        ("https://[::1", "redirect_refused"),
        (f"https://{'a' * 70}.example", "hub_unreachable"),
    ],
)
def test_redirects_to_private_addresses_are_refused(hub: StandinHub, target: str, code: str) -> None:
    hub.faults.redirect = target
    web = Web("http://hub.example", "hf_token", 5.0, PublicHub(hub))
    with pytest.raises(FetchError) as told, web.get("http://hub.example/config.json"):
        pass
    assert told.value.code == code
    assert "hf_token" not in told.value.message


class Inside(Network):
    """Names are addresses, and nothing is connected to."""

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        raise OSError(errno.ECONNREFUSED, "reached")


@pytest.mark.parametrize(
    ("hub", "target", "code"),
    [
        ("10.0.0.1", "192.168.0.1", "hub_unreachable"),
        ("10.0.0.1", "127.0.0.1", "address_refused"),
        ("10.0.0.1", "[::1]", "address_refused"),
        ("10.0.0.1", "169.254.169.254", "address_refused"),
        ("10.0.0.1", "0.0.0.0", "address_refused"),
        ("127.0.0.1", "127.0.0.2", "hub_unreachable"),
        ("127.0.0.1", "10.0.0.1", "hub_unreachable"),
        ("127.0.0.1", "169.254.169.254", "address_refused"),
        ("169.254.1.1", "169.254.169.254", "hub_unreachable"),
    ],
)
def test_a_hub_inside_leads_inside_and_never_to_this_machine_or_its_provider(hub: str, target: str, code: str) -> None:
    web = Web(f"http://{hub}", None, 5.0, Inside())
    with pytest.raises(FetchError) as told, web.get(redirected(f"http://{hub}/x", f"http://{target}/y", web.hub)):
        pass
    assert told.value.code == code


def test_a_proxy_is_used_and_never_sees_the_token(hub: StandinHub, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def refuse_one() -> None:
            connection, _ = proxy.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse_one, daemon=True)
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "direct.example")
        web = Web("https://hub.example", "hf_token", 5.0, PublicHub(hub))
        # An address that is written as such is refused before the proxy is asked.
        for url, code in (("https://10.0.0.1/x", "address_refused"), ("https://hub.example/x", "hub_unreachable")):
            with pytest.raises(FetchError) as told, web.get(url):
                pass
            assert told.value.code == code
        thread.join(10)
    assert heard[0].startswith(b"CONNECT hub.example:443") and b"hf_token" not in heard[0]


class HubOutside(Network):
    """The hub has a public address; other names are as they are."""

    def look_up(self, host: str, port: int) -> list[str]:
        return ["1.1.1.1"] if host == "hub.example" else super().look_up(host, port)


def test_a_listed_host_may_be_private_and_no_other(hub: StandinHub) -> None:
    listed = remote(hub)[0].url
    with Web("http://hub.example", None, 10.0, HubOutside(), listed=listed).get(listed) as answer:
        assert b"".join(answer.pieces(100_000)) in DATA.values()
    for allowed, address in ((None, listed), (listed, f"http://127.0.0.2:{hub.port}/x")):
        web = Web("http://hub.example", None, 10.0, HubOutside(), listed=allowed)
        with pytest.raises(FetchError) as refused, web.get(address):
            pass
        assert refused.value.code == "address_refused"
    hub.faults.redirect = f"http://localhost:{hub.port}"
    with (
        pytest.raises(FetchError) as told,
        Web("http://hub.example", None, 10.0, HubOutside(), listed=listed).get(listed),
    ):
        pass
    assert told.value.code == "address_refused"


@contextlib.contextmanager
def https_server(authority: trustme.CA, seen: list[bytes]) -> Iterator[int]:
    """Answers every request with `bytes`, under a certificate for 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with contextlib.suppress(OSError), plain, context.wrap_socket(plain, server_side=True) as secure:
                    seen.append(secure.recv(65536))
                    secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def test_certificates_are_checked_and_ones_own_authority_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, seen = trustme.CA(), list[bytes]()
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with https_server(authority, seen) as port:
        address = f"https://127.0.0.1:{port}"
        with pytest.raises(FetchError, match="certificate cannot be trusted"), Web(address, "t", 10.0).get(address):
            pass
        assert not seen
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
        # Restored at the end of the test.
        monkeypatch.setenv("SSL_CERT_FILE", "")
        trust_bundle()
        assert os.environ["SSL_CERT_FILE"] == str(bundle)
        with Web(address, "secret", 10.0).get(address) as answer:
            assert b"".join(answer.pieces(100)) == b"bytes"
        assert b"Bearer secret" in seen[0]


def test_redirects_leave_https_only_where_the_hub_never_had_it() -> None:
    hub, url = HubOrigin.of("https://hub.example"), "https://hub.example/a/b"
    assert redirected(url, "/c", hub) == "https://hub.example/c"
    assert redirected(url, "https://cdn.example/x?y=1", hub) == "https://cdn.example/x?y=1"
    for location in ("http://cdn.example/x", "http://hub.example/x", "https://[::1", None, ""):
        with pytest.raises(FetchError) as told:
            redirected(url, location, hub)
        assert told.value.code == "redirect_refused"
    assert redirected("http://hub.lan/a", "http://cdn.lan/x", HubOrigin.of("http://hub.lan")) == "http://cdn.lan/x"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7", 7.0),
        ("99999999999", 300.0),
        ("soon", None),
        (None, None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        ("9" * 400, 300.0),
    ],
)
def test_retry_after_is_read_and_bounded(said: str | None, seconds: float | None) -> None:
    assert retry_after_s(said) == seconds


def test_waits_grow_and_are_bounded() -> None:
    waits: list[float] = []
    patience = FetchPatience(attempts_max=9, sleep=waits.append, draw=lambda: 1.0)
    error = FetchError("hub_error", "no", passes=True)
    for failures in range(1, 9):
        patience.wait(failures, error)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    with pytest.raises(FetchError):
        patience.wait(9, error)
    with pytest.raises(FetchError):
        patience.wait(1, FetchError("gated", "no"))


def test_thousands_of_files_are_chosen_in_time() -> None:
    files = [RemoteFile(f"m-Q4_K_M-{number}.gguf", "http://hub", 1, "0" * 64) for number in range(FILES_MAX)]
    began = time.process_time()
    assert choose(files, "Q4_K_M", ["*"], ()) == files
    assert time.process_time() - began < 15, "each was compared with all others, which takes a minute"
