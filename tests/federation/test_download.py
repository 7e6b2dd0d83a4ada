"""Files come whole, or not at all under their name: checked against a real server on this machine."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from fedflat.errors import DataError, RecipeError
from fedflat.federation import download
from fedflat.federation.datasets import DATASETS, load
from fedflat.federation.download import REMOTES, Remote, get

CONTENT = np.random.default_rng(0).bytes(1_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Site:
    """A server of one file that can break off, ignore ranges or refuse."""

    base: str = ""
    break_after: int | None = None
    ranges: bool = True
    refuse: int | None = None
    asked: list[str | None] = field(default_factory=list)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            site.asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and site.ranges else 0
            status = site.refuse or (416 if start >= len(CONTENT) else 206 if start else 200)
            body = CONTENT[start:] if status < 300 else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: site.break_after])

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.base = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setitem(
        REMOTES, "mnist", (Remote(f"{site.base}/a.gz?download=1", MD5), Remote(f"{site.base}/b.gz", MD5))
    )
    yield site
    server.shutdown()
    server.server_close()
    thread.join(5)


def names(folder) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_files_come_into_the_folder_of_the_data_set_with_their_progress(site, tmp_path):
    told: list[tuple[str, int, int | None]] = []
    folder = get("mnist", tmp_path, progress=lambda *now: told.append(now))
    assert folder == tmp_path / "mnist"
    assert names(folder) == ["a.gz", "b.gz"]
    assert (folder / "a.gz").read_bytes() == CONTENT
    assert told[0] == ("a.gz", 0, 1_000_000)
    assert told[-1] == ("b.gz", 1_000_000, 1_000_000)
    assert [done for file, done, _ in told if file == "a.gz"] == sorted(
        done for file, done, _ in told if file == "a.gz"
    )


def test_files_that_are_there_are_left_alone(site, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "a.gz").write_bytes(b"my own copy")
    get("mnist", tmp_path)
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == b"my own copy"
    assert len(site.asked) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_what_broke_off_is_resumed_or_begun_anew_as_the_server_allows(site, tmp_path, ranges):
    site.break_after, site.ranges = 400_000, ranges
    with pytest.raises(
        DataError, match=r"/a.gz\?download=1 could not be fetched \(the connection broke off after 400000 of 1000000"
    ):
        get("mnist", tmp_path)
    assert names(tmp_path / "mnist") == ["a.gz.part"]
    site.break_after = None
    told: list[int] = []
    get("mnist", tmp_path, progress=lambda file, done, total: told.append(done))
    assert site.asked == [None, "bytes=400000-", None]
    assert told[0] == (400_000 if ranges else 0)
    assert names(tmp_path / "mnist") == ["a.gz", "b.gz"]
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == CONTENT


def test_a_part_that_is_whole_already_needs_no_byte(site, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "a.gz.part").write_bytes(CONTENT)
    get("mnist", tmp_path)
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == CONTENT
    assert site.asked == ["bytes=1000000-", None]


def test_a_file_with_a_wrong_check_sum_is_set_aside(site, tmp_path, monkeypatch):
    monkeypatch.setitem(REMOTES, "mnist", (Remote(f"{site.base}/a.gz", "0" * 32),))
    with pytest.raises(DataError, match=rf"a.gz came with MD5 sum {MD5} instead of 0+, and is set aside as .*a.gz.bad"):
        get("mnist", tmp_path)
    assert names(tmp_path / "mnist") == ["a.gz.bad"]


def test_a_refusal_says_which_file_to_put_where(site, tmp_path):
    site.refuse = 403
    with pytest.raises(DataError, match=r"a.gz.* \(Forbidden\): try again, or put that file in .*mnist by hand"):
        get("mnist", tmp_path)


def test_an_unreachable_server_says_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:  # bound but not listening: no other process can take the port
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/a.gz"
        monkeypatch.setitem(REMOTES, "mnist", (Remote(address, MD5),))
        with pytest.raises(DataError, match=rf"{address} could not be fetched .*put that file in .*mnist by hand"):
            get("mnist", tmp_path)


def test_a_silent_server_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setitem(REMOTES, "mnist", (Remote(f"http://127.0.0.1:{silent.getsockname()[1]}/a.gz", MD5),))
        with pytest.raises(DataError, match="timed out"):
            get("mnist", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(site, tmp_path):
    (tmp_path / "mnist").write_text("a file in the way")
    with pytest.raises(DataError, match="File exists"):
        get("mnist", tmp_path)


def test_what_is_not_published_cannot_be_fetched(tmp_path):
    with pytest.raises(RecipeError, match=r"no files to fetch for 'cifar'; did you mean cifar10"):
        get("cifar", tmp_path)


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"digits", "arrays"}))
def test_a_missing_data_set_names_the_file_that_get_would_fetch(tmp_path, name, monkeypatch):
    expected = rf"{REMOTES[name][0].file} is expected in .*{name}, and `fedflat data get {name}` fetches it"
    if name == "fashion-mnist":
        (tmp_path / name).mkdir()  # so that Debian's copy is not looked for
    with pytest.raises(DataError, match=expected):
        load(name, tmp_path)
