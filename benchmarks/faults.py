"""What is lost when files are hostile, disks are full and processes die? For each kind: tried,
survived, lost.

    python benchmarks/faults.py                  # all kinds, minutes
    python benchmarks/faults.py pickles --long   # some kinds, with many more cases

A kind is a function of a number of cases and an empty folder. It returns (tried, survived, lost,
notes). A case survives if it ends as docs/reliability.md promises: in the right answer, or in an
error that names the file or the argument. Everything else is lost: a crash, a wrong answer without
an error, a file that is damaged or missing, gigabytes of memory.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tally = tuple[int, int, int, list[str]]
MIB = 1 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of fault: the function, and how many cases of it a test, a usual run and a long run
    try.
    """

    run: Callable[[int, Path], Tally]
    sample: int
    usual: int
    long: int


KINDS: dict[str, Kind] = {}


def kind(name: str, sample: int, usual: int, long: int) -> Callable[[Any], Any]:
    """Register a function as a kind of fault."""

    def add(function: Callable[[int, Path], Tally]) -> Callable[[int, Path], Tally]:
        KINDS[name] = Kind(function, sample, usual, long)
        return function

    return add


def tally(outcomes: list[tuple[str, str]]) -> Tally:
    """From (case, what went wrong or "") to a tally; the notes name the first few cases that were
    lost.
    """
    lost = [f"{case}: {fault}" for case, fault in outcomes if fault]
    return len(outcomes), len(outcomes) - len(lost), len(lost), lost[:5]


def in_a_child(
    code: str, *arguments: Any, memory: int | None = None, seconds: float = 3600
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of Python code; ``memory`` bounds the address
    space, in MiB.
    """

    def bound() -> None:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory * MIB, memory * MIB))

    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        preexec_fn=bound,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


CALL = (
    "import sys; sys.path.insert(0, sys.argv[1]); import faults; getattr(faults,"
    " sys.argv[2])(*sys.argv[3:])"
)
PRELOADED = [
    "torch",
    "lambdahat.cli.app",
    "lambdahat.experiments",
    "lambdahat._measure",
    "lambdahat.training",
    "lambdahat.graphs",
    "lambdahat.data",
    "typer.testing",
    "torch._dynamo",
    "torch.func",
    "matplotlib",
    "networkx",
    "scipy.stats",
    "arviz_stats",
]


def child(
    function: str, *arguments: Any, apart: list[str] | None = None
) -> subprocess.Popen[bytes]:
    """A function of this file in a process of its own; ``apart`` is a command to start it by."""
    command = [
        *(apart or []),
        sys.executable,
        "-c",
        CALL,
        str(Path(__file__).parent),
        function,
        *map(str, arguments),
    ]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def forked(function: str, *arguments: Any) -> Any:
    """A function of this file in a fork of a process that has imported everything, as imports take
    seconds.
    """
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)  # where the new process finds this file
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_quietly, args=(function, *map(str, arguments)))
    process.start()
    return process


def _quietly(function: str, *arguments: str) -> None:
    import faults

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    getattr(faults, function)(*arguments)


def in_a_fork(work: Callable[[], str]) -> str:
    """What work in a fork of this process comes to, as text: its own, or of its error or its
    end.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"[:300]
        os.write(writing, told.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    return f"ended by {status}" if status else told


def preload() -> None:
    """Import what forks of this process need."""
    from importlib import import_module

    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        import_module(name)


# Pickled data files


def crafted_pickles() -> dict[str, bytes]:
    """Pickles that crash, call or fill the memory of an ordinary unpickler."""
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    array = reconstruct + b"(cnumpy\nndarray\n(K\x00tC\x01btR"
    dtype = b"cnumpy\ndtype\n(X\x02\x00\x00\x00%sK\x00K\x01tR"
    plain = dtype % b"u1"

    def batch(data: bytes, labels: bytes = b"](K\x00K\x01e") -> bytes:
        return b"\x80\x04}(C\x04data" + data + b"C\x06labels" + labels + b"u."

    def built(shape: bytes, kind: bytes, raw: bytes) -> bytes:
        return array + b"(K\x01" + shape + kind + b"\x89" + raw + b"tb"

    rows = b"(K\x02M\x00\x0ct"  # (2, 3072)
    raw = b"B" + struct.pack("<I", 6144) + bytes(6144)
    huge = b"\x8b" + struct.pack("<i", 20_000) + b"\x7f" * 20_000
    long_text = b"X" + struct.pack("<I", 20_000) + b"a" * 20_000 + b"q\x01"
    encoded = b"c_codecs\nencode\n(h\x01X\x06\x00\x00\x00latin1tR"
    thousands = b"".join(b"X\x04\x00\x00\x00%04d" % i + encoded for i in range(5000))
    nested = b"".join(
        [b"]q\x00(K\x01K\x01e"] + [b"0](" + b"h\x00" * 8 + b"eq\x00" for _ in range(12)]
    )
    return {
        "a good batch": batch(built(rows, plain, raw)),
        "an object array over its own bytes": batch(
            b"cnumpy\nndarray\n(K\x02\x85cnumpy\ndtype\n(X\x01\x00\x00\x00OK\x00K\x01tRC\x10"
            + b"A" * 16
            + b"tR"
        ),
        "labels of objects over their own bytes": batch(
            built(rows, plain, raw),
            b"cnumpy\nndarray\n(K\x02\x85cnumpy\ndtype\n(X\x01\x00\x00\x00OK\x00K\x01tRC\x10"
            + b"A" * 16
            + b"tR",
        ),
        "an object array by its state": batch(built(rows, dtype % b"O8", raw)),
        "objects through a dtype's state": batch(
            built(
                rows,
                plain + b"(K\x03X\x01\x00\x00\x00|NNNJ\x08\x00\x00\x00J\x01\x00\x00\x00K\x3ftb",
                raw,
            )
        ),
        "a structure": batch(
            built(
                rows,
                plain + b"(K\x03X\x01\x00\x00\x00|N(X\x01\x00\x00\x00at}K\x08K\x08K\x10tb",
                raw,
            )
        ),
        "a shape larger than its bytes": batch(built(b"(J\xff\xff\xff\x7fM\x00\x0ct", plain, raw)),
        "a negative shape": batch(built(b"(J\xff\xff\xff\xffM\x00\x0ct", plain, raw)),
        "a shape of large integers": batch(built(b"(" + huge + b"K\x02t", plain, raw)),
        "a state of a function": b"\x80\x04" + reconstruct + b"}X\x08\x00\x00\x00__code__K\x01sb.",
        "slots of a function": (
            b"\x80\x04c_codecs\nencode\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b."
        ),
        "a class made anew": b"\x80\x04cnumpy\nndarray\nK\x05\x85\x81.",
        "a call of os.system": b"cos\nsystem\n(S'echo hacked > hacked'\ntR.",
        "os.system through the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "an instance": b"(S'true'\nios\nsystem\n.",
        "a persistent identifier": b"Phello\n.",
        "an extension": b"\x82\x01.",
        "a bytearray of gigabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"x.",
        "bytes of gigabytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 36) + b"x.",
        "a memo of gigabytes": b"\x80\x02}r\xff\xff\xff\x7f.",
        "a key of nested tuples": b"\x80\x02})" + b"\x85" * 150_000 + b"K\x01s.",
        "lists nested deeply": batch(b"K\x01", b"]" * 50_000 + b"a" * 49_999),
        "a list that holds itself": batch(built(rows, plain, raw), b"]q\x00h\x00a"),
        "labels that double": batch(built(rows, plain, raw), nested),
        "labels of long texts": batch(
            built(rows, plain, raw), b"](" + long_text + b"h\x01" * 20_000 + b"e"
        ),
        "bytes encoded again and again": b"\x80\x02" + long_text + b"0}(" + thousands + b"u.",
        "a hundred thousand lists": b"\x80\x02" + b"]" * 100_000 + b".",
        "items of a number": b"\x80\x02K\x01K\x02a.",
        "marks without end": b"(" * 50_000 + b".",
        "odd escapes": b"S'\\q\\xzz'\n.",
        "a decimal number of many digits": b"L" + b"9" * 100_000 + b"L\n.",
    }


def good_pickles() -> list[bytes]:
    """Batches of two images in every protocol that is read."""
    import numpy as np

    data = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
    parts = {
        b"data": data,
        b"labels": [3, 7],
        b"batch_label": b"one",
        "filenames": ["a.png", "b.png"],
    }
    forms = [pickle.dumps(parts, protocol) for protocol in (0, 2, 3, 4)]
    return [
        *forms,
        pickle.dumps({"data": np.asfortranarray(data), "labels": np.array([3, 7], ">i4")}, 4),
    ]


def mutated(random_: random.Random, seeds: list[bytes]) -> bytes:
    """One of the pickles, or two spliced, with a few bytes changed, put in, doubled or taken
    out.
    """
    data = bytearray(random_.choice(seeds))
    if random_.random() < 0.2:
        other = random_.choice(seeds)
        data = data[: random_.randrange(len(data))] + other[random_.randrange(len(other)) :]
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        # most of a batch is pixels, where a change is no damage: aim at what surrounds them half of
        # the time
        near = random_.random() < 0.5
        place = random_.randrange(min(len(data), 300) if near else len(data)) if data else 0
        place = len(data) - 1 - place if near and random_.random() < 0.5 else place
        action = random_.randrange(5)
        if action == 0 and data:
            data[place] ^= 1 << random_.randrange(8)
        elif action == 1 and data:
            data[place] = random_.choice(
                b"\x80(.)]}0125FGIJKLMNPRSTUVX\\abcdeghijlopqrstu\x81\x82\x85\x86\x87\x8a\x8b\x8c\x8e\x93\x94\x96\xff"
            )
        elif action == 2:
            data[place:place] = random_.randbytes(random_.randrange(1, 9))
        elif action == 3:
            del data[place : place + random_.randrange(1, 20)]
        else:
            data[place:place] = data[place : place + random_.randrange(1, 40)]
    return bytes(data)


def crafted_graphs() -> dict[str, tuple[str, bytes]]:
    """Files of graphs, with their names, that crash, stop or fill the memory of the libraries that
    read them.
    """
    import numpy as np

    def npz(kind: str, **arrays: Any) -> tuple[str, bytes]:
        stream = io.BytesIO()
        np.savez(stream, format=np.array(kind.encode()), **arrays)
        return "graph.npz", stream.getvalue()

    def compressed(kind: str, indices: list[int], starts: list[int]) -> tuple[str, bytes]:
        return npz(
            kind,
            shape=np.array([5, 5]),
            data=np.ones(4),
            indices=np.array(indices, np.int32),
            indptr=np.array(starts, np.int32),
        )

    def npy(kind: str, shape: str) -> tuple[str, bytes]:
        head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        return "graph.npy", b"\x93NUMPY\x01\x00\x76\x00" + head.ljust(117) + b"\n" + bytes(80)

    market, starts = b"%%MatrixMarket matrix ", [0, 1, 2, 3, 4, 4]
    entities = "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(12))
    laughs = (
        f'<!DOCTYPE l [<!ENTITY a "aaaaaaaaaa">{entities}]><graphml><graph><node'
        ' id="&m;"/></graph></graphml>'
    )
    outside = (
        '<!DOCTYPE l [<!ENTITY x SYSTEM "file:///etc/passwd">]><graphml><graph><node'
        ' id="&x;"/></graph></graphml>'
    )
    huge = np.array([10**11, 10**11])
    return {
        "columns beyond the matrix": compressed("csr", [0, 1, 10**8, 3], starts),
        "columns below 0": compressed("csr", [0, 1, -(10**8), 3], starts),
        "rows that begin anywhere": compressed("csr", [0, 1, 2, 3], [0, 10**8, 2, -(10**7), 4, 4]),
        "rows of columns that begin anywhere": compressed(
            "csc", [0, 1, 2, 3], [0, 10**8, 2, -(10**7), 4, 4]
        ),
        "blocks beyond the matrix": npz(
            "bsr",
            shape=np.array([4, 4]),
            data=np.ones((2, 2, 2)),
            indices=np.array([0, 10**8]),
            indptr=np.array([0, 1, 2]),
        ),
        "coordinates beyond the matrix": npz(
            "coo",
            shape=np.array([5, 5]),
            data=np.ones(2),
            row=np.array([0, 10**8]),
            col=np.array([1, 2]),
        ),
        "a hundred billion nodes": npz(
            "coo", shape=huge, data=np.ones(1), row=np.array([0]), col=np.array([1])
        ),
        "a diagonal of them": npz("dia", shape=huge, data=np.ones((1, 5)), offsets=np.array([1])),
        "a matrix of text": npz(
            "csr",
            shape=np.array([1, 1]),
            data=np.array(["a"]),
            indices=np.array([0]),
            indptr=np.array([0, 1]),
        ),
        "an array of petabytes": npy("<f8", "(100000000, 100000000)"),
        "an array of objects": npy("|O", "(2, 2)"),
        "an array of dates": npy("<M8[s]", "(2, 2)"),
        "lists nested deeply": ("graph.json", b"[" * 100_000),
        "a number of 400 digits": ("graph.json", b"[[0, " + b"9" * 400 + b"]]"),
        "a trillion rows": (
            "graph.mtx",
            market + b"coordinate real general\n" + b"1000000000000 " * 2 + b"1\n1 2 1\n",
        ),
        "a hundred billion entries": (
            "graph.mtx",
            market + b"coordinate real general\n5 5 100000000000\n1 2 1\n",
        ),
        "a dense matrix of gigabytes": (
            "graph.mtx",
            market + b"array real general\n100000 100000\n1\n",
        ),
        "a hundred billion vertices": (
            "graph.net",
            b'*Vertices 100000000000\n1 "a"\n2 "b"\n*Edges\n1 2\n',
        ),
        "brackets nested deeply": ("graph.gml", b"graph [" * 20_000),
        "a million empty lines": ("graph.gml", b"\n" * 1_000_000),
        "a large exponent": ("graph.txt", b"0 1\n1 2\n3 1e99999999\n"),
        "a small exponent": ("graph.txt", b"0 1\n1 2\n3 1.5e-99999999\n"),
        "many digits and a letter": ("graph.txt", b"1" * 200_000 + b"x 2\n1 2\n"),
        "a dict nested deeply": (
            "graph.txt",
            b'0 1 {"weight": ' + b"-" * 100_000 + b"1}\n1 2 {}\n",
        ),
        "a billion laughs": ("graph.graphml", laughs.encode()),
        "another file": ("graph.graphml", outside.encode()),
        "elements nested deeply": ("graph.gexf", b"<gexf>" + b"<graph>" * 100_000),
    }


def good_graphs() -> list[tuple[str, bytes]]:
    """A small graph in every format that is read, with the name of its file."""
    import networkx
    import numpy as np
    import scipy.io
    import scipy.sparse

    graph = networkx.karate_club_graph()
    matrix = networkx.to_scipy_sparse_array(graph, dtype=float)
    found = []
    for name in ("graphml", "gexf", "pajek", "gml", "edgelist"):
        stream = io.BytesIO()
        getattr(networkx, f"write_{name}")(graph, stream)
        found.append(
            (f"graph.{ {'pajek': 'net', 'edgelist': 'txt'}.get(name, name) }", stream.getvalue())
        )
    for kind in ("csr", "csc", "coo", "bsr", "dia"):
        stream = io.BytesIO()
        scipy.sparse.save_npz(stream, matrix.asformat(kind), compressed=False)
        found.append(("graph.npz", stream.getvalue()))
    stream = io.BytesIO()
    scipy.io.mmwrite(stream, matrix)
    found.append(("graph.mtx", stream.getvalue()))
    stream = io.BytesIO()
    np.save(stream, matrix.toarray())
    found.append(("graph.npy", stream.getvalue()))
    found.append(("graph.json", json.dumps(networkx.node_link_data(graph, edges="links")).encode()))
    found.append(
        (
            "graph.txt.gz",
            gzip.compress(b"\n".join(b"%d %d 0.5" % edge for edge in graph.edges()), mtime=0),
        )
    )
    return found


def try_files(what: str, count: int, seed: int, folder: Path, begin: int = 0) -> dict[str, Any]:
    """Read crafted and mutated files, pickles as batches of CIFAR-10 or graphs, in this process."""
    random_, read = random.Random(seed), 0
    crafted: dict[str, tuple[str, bytes]]
    if what == "pickles":
        from lambdahat.data.image_files import read_batch

        crafted = {name: ("data_batch_1", data) for name, data in crafted_pickles().items()}
        seeds = {"data_batch_1": good_pickles()}
        reader: Callable[[Path], Any] = lambda path: read_batch(path, 10)  # noqa: E731
    else:
        from lambdahat.graphs import graph as reader

        crafted, seeds = crafted_graphs(), {}
        for file, data in good_graphs():
            seeds.setdefault(file, []).append(data)
            reader_path = folder / file
            reader_path.write_bytes(data)
            reader(reader_path)  # what is good is read, and what reading imports counts for nobody
    before, outcomes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for number in range(count):
        if number < len(crafted):
            name, (file, data) = list(crafted.items())[number]
        else:
            file = random_.choice(list(seeds))
            name, data = f"{seed}/{number} ({file})", mutated(random_, seeds[file])
        if number < begin:
            continue
        (folder / "now").write_text(f"{number} {name}")
        path, fault = folder / file, ""
        path.write_bytes(data)
        signal.alarm(60)  # whatever takes longer ends the process
        try:
            reader(path)
            read += 1
        except ValueError as error:
            fault = "" if path.name in str(error) else f"an error without the file: {error}"[:200]
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"[:200]
        signal.alarm(0)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        outcomes.append((name, fault or (f"{grown:.0f} MiB more" if grown > 200 else "")))
    return {
        "outcomes": [pair for pair in outcomes if pair[1]],
        "tried": len(outcomes),
        "read": read,
    }


CHILD = """
import json, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import faults
warnings.simplefilter("ignore")
name, first, count, folder, seed = sys.argv[2:7]
found = faults.try_files(name, int(first), int(count), Path(folder), int(seed))
print(json.dumps(found))
"""


def fuzz(what: str, count: int, folder: Path) -> Tally:
    """Files of one kind, read in a process of their own, which begins anew after each case that
    ends it.
    """
    begin, read, lost = 0, 0, []
    tried = survived = 0
    while begin < count:
        code, out, err = in_a_child(
            CHILD, Path(__file__).parent, what, count, 0, folder, begin, memory=6000
        )
        if code == 0:
            found = json.loads(out.splitlines()[-1])
            tried, read = tried + found["tried"], read + found["read"]
            lost += [f"{case}: {fault}" for case, fault in found["outcomes"]]
            break
        number, _, name = (
            (folder / "now").read_text() if (folder / "now").exists() else f"{begin} "
        ).partition(" ")
        now = int(number or begin)
        lost.append(
            f"case {now} {name}: the process ended with {code} ({err.strip().splitlines()[-1:]})"
        )
        tried, begin = tried + now + 1 - begin, now + 1
    survived = tried - len(lost)
    return (
        tried,
        survived,
        len(lost),
        [f"{read:,} were read, {survived - read:,} refused", *lost[:5]],
    )


@kind("pickles", sample=600, usual=100_000, long=3_000_000)
def pickles(count: int, folder: Path) -> Tally:
    """Pickled data files, crafted or mutated: data, or a ValueError that names the file."""
    return fuzz("pickles", count, folder)


@kind("graph files", sample=150, usual=5000, long=300_000)
def graph_files(count: int, folder: Path) -> Tally:
    """Graphs in every format, crafted or mutated: a graph, or a ValueError that names the file."""
    return fuzz("graphs", count, folder)


# Bombs, archives and links


@kind("bombs", sample=6, usual=6, long=6)
def bombs(count: int, folder: Path) -> Tally:
    """Packed files that unpack to gigabytes: an error that names the file, within 300 MiB of
    memory.
    """
    child("bombs_child", folder, count).wait()
    return tally([tuple(outcome) for outcome in json.loads((folder / "outcomes").read_text())])


def _gigabytes(path: Path, opener: Any) -> None:
    with opener(path, "wb") as stream:
        stream.write(bytes(1 << 24))
    path.write_bytes(path.read_bytes() * 128)  # 2 GiB: both formats join streams


def _zip_of_gigabytes(path: Path, header: bytes) -> None:
    import zipfile

    block = bytes(1 << 24)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("data.npy", "w", force_zip64=True) as to,
    ):
        to.write(header)
        for _ in range(32):  # 512 MiB
            to.write(block)


def _npy_header(length: int) -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "|u1", "fortran_order": False, "shape": (length,)}
    )
    return stream.getvalue()


def bomb_idx(folder: Path) -> None:
    from lambdahat.data.image_files import read_idx

    _gigabytes(folder / "bomb.gz", gzip.open)
    read_idx(folder / "bomb.gz")


def bomb_published(folder: Path) -> None:
    from lambdahat.data.sources import File

    _gigabytes(folder / "bomb.gz", gzip.open)
    File("bomb", 1000, "").verify(folder / "bomb.gz")


def bomb_batch(folder: Path) -> None:
    from lambdahat.data.image_files import imagenet32_files

    _zip_of_gigabytes(folder / "train_data_batch_1.npz", _npy_header(1 << 29))
    (folder / "bomb").symlink_to(folder / "train_data_batch_1.npz")
    try:
        imagenet32_files(folder, "raw")
    except ValueError as error:
        raise ValueError(str(error).replace("train_data_batch_1", "bomb")) from None


def bomb_edges(folder: Path) -> None:
    import lambdahat.graphs

    _gigabytes(folder / "bomb.bz2", bz2.open)
    lambdahat.graphs.graph(folder / "bomb.bz2", format="edges")


def bomb_matrix(folder: Path) -> None:
    import lambdahat.graphs

    _zip_of_gigabytes(folder / "bomb.npz", _npy_header(1 << 29))
    lambdahat.graphs.graph(folder / "bomb.npz")


def bomb_result(folder: Path) -> None:
    from lambdahat._core.storage import read_arrays

    _zip_of_gigabytes(folder / "bomb.npz", _npy_header(1 << 29))
    read_arrays(folder / "bomb.npz")


BOMBS = {
    "idx": bomb_idx,
    "published size": bomb_published,
    "batch": bomb_batch,
    "edges": bomb_edges,
    "matrix": bomb_matrix,
    "arrays of a result": bomb_result,
}


def bombs_child(folder: str, count: str) -> None:
    """Bombs, each in a fork of this process; writes the outcomes."""
    preload()
    outcomes = [
        (name, in_a_fork(lambda name=name: try_bomb(name, Path(folder))))
        for name in list(BOMBS)[: int(count)]
    ]
    Path(folder, "outcomes").write_text(json.dumps(outcomes))


def try_bomb(name: str, folder: Path) -> str:
    """Read a bomb in this process: "" or what went wrong."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            BOMBS[name](Path(place))
        except ValueError as error:
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            return f"{grown:.0f} MiB, {error}" if "bomb" not in str(error) or grown > 300 else ""
    return "it was read"


@kind("archives", sample=60, usual=3000, long=300_000)
def archives(count: int, folder: Path) -> Tally:
    """Tar archives with paths out of the folder, links, devices or damage: nothing but verified
    files is written.
    """
    import hashlib

    from lambdahat.data.sources import File, _unpack

    random_, body, outcomes = random.Random(0), bytes(range(256)) * 8, []
    wanted = File("one", len(body), f"sha256:{hashlib.sha256(body).hexdigest()}")
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
    names = [
        "../evil",
        "/tmp/faults-evil",
        "in/../../evil",
        "in/one",
        "..",
        "in/./one",
        "in\\..\\evil",
    ]
    for number in range(count):
        inner = folder / "inner"
        target = inner / "target"
        target.mkdir(parents=True)
        precious = inner / "precious"
        precious.write_bytes(b"precious")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            good = tarfile.TarInfo("in/one")
            good.size = len(body)
            archive.addfile(good, io.BytesIO(body))
            for _ in range(random_.randrange(3)):
                evil = tarfile.TarInfo(random_.choice(names))
                evil.type, evil.linkname = random_.choice([*kinds, tarfile.REGTYPE]), str(precious)
                evil.size = 4 if evil.type == tarfile.REGTYPE else 0
                archive.addfile(evil, io.BytesIO(b"evil") if evil.size else None)
        data = bytearray(buffer.getvalue())
        for _ in range(random_.choice((0, 0, 1, 8))):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        packed = bytearray(gzip.compress(bytes(data), mtime=0))
        if random_.random() < 0.2:
            packed = packed[: random_.randrange(len(packed))]
        path = inner / "all.tar.gz"
        path.write_bytes(packed)
        (target / "one.part").symlink_to(precious)
        fault = ""
        try:
            _unpack(path, "in", [wanted], target)
        except ValueError:
            pass
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"[:200]
        there = {p.name for p in inner.iterdir()} | {
            p.name for p in target.iterdir() if not p.is_symlink()
        }
        if (
            there - {"target", "precious", "all.tar.gz", "one"}
            or precious.read_bytes() != b"precious"
        ):
            fault = f"{sorted(there)} are there"
        one = target / "one"
        if one.exists() and one.read_bytes() != body:
            fault = "other contents were written"
        outcomes.append(
            (
                str(number),
                fault or ("/tmp/faults-evil" if Path("/tmp/faults-evil").exists() else ""),
            )
        )
        shutil.rmtree(inner)
    return tally(outcomes)


# Disks

UNWRITABLE = (
    "taken",
    "taken/inside",
    "x" * 300,
    "/proc/lambdahat/out",
    "",
    "\udcff",
    "loop",
    "fifo",
)


@kind("unwritable outputs", sample=8, usual=112, long=112)
def unwritable(count: int, folder: Path) -> Tally:
    """Every command with an --out that cannot be written: exit code 2, one line, and nothing else
    is touched.
    """
    from typer.testing import CliRunner

    from lambdahat.cli.app import app

    commands = [
        ["measure", "a:b"],
        ["landscape", "a:b"],
        ["advise", "a:b"],
        ["train", "--model", "a", "--data", "b"],
        ["verify", "--case", "a"],
        ["reproduce", "a"],
        ["bench", "--device", "a"],
        ["demo"],
        ["report", "a"],
        ["data", "fetch", "mnist"],
        *(["graph", what, "a.txt"] for what in ("spectrum", "clusters", "compare", "fit")),
    ]
    before, outcomes = os.getcwd(), []
    os.chdir(folder)
    try:
        Path("taken").write_text("precious")
        os.mkfifo("fifo")
        Path("loop").symlink_to("loop")
        there = sorted(os.listdir())
        cases = [(command, place) for place in UNWRITABLE for command in commands]
        for command, place in random.Random(0).sample(cases, min(count, len(cases))):
            if command[0] == "report" and place in ("taken", "fifo", "loop"):
                place = "taken/inside"  # its --out is a file, which replaces another
            option = "--folder" if command[0] == "data" else "--out"
            found = CliRunner().invoke(app, [*command, option, place])
            whole = (
                found.exit_code == 2
                and len(found.stderr.splitlines()) == 1
                and option in found.stderr
            )
            whole &= sorted(os.listdir()) == there and Path("taken").read_text() == "precious"
            outcomes.append(
                (
                    f"{command[0]} {place[:20]}",
                    "" if whole else f"{found.exit_code} {found.output[-200:]}",
                )
            )
    finally:
        os.chdir(before)
    return tally(outcomes)


def train_with_room(room: int, folder: Path) -> str:
    """The weights that a training ends in, as JSON, or the error; the disk is full at the write
    numbered ``room``.
    """
    import errno

    import torch

    from lambdahat import Problem
    from lambdahat.training import fit

    real = os.fsync

    def fsync(handle: int) -> None:
        nonlocal room
        room -= 1
        if room == 0:
            with contextlib.suppress(OSError):  # a folder, or a file that is open for reading
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    os.fsync = fsync
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    problem = Problem(model, "cross_entropy", (torch.randn(24, 3), torch.randint(2, (24,))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        fit(
            problem,
            optimizer,
            4,
            batch_size=6,
            folder=folder,
            seed=0,
            resume=folder.is_dir(),
            checkpoint_steps=1,
        )
    except OSError as error:
        return f"{error.errno} {error}"
    return json.dumps([parameter.flatten().tolist() for parameter in model.parameters()])


def full_disks_child(folder: str, count: str) -> None:
    """Trainings on full disks, each in a fork of this process; writes the outcomes and how many
    were stopped.
    """
    preload()
    place = Path(folder)
    whole = in_a_fork(lambda: train_with_room(-1, place / "whole"))
    outcomes, refused = [], 0
    for number in range(int(count)):
        run = place / str(number)
        found = in_a_fork(lambda: train_with_room(1 + number % 60, run))  # noqa: B023
        stopped, fault = not found.startswith("["), ""
        if stopped:
            refused += 1
            fault = (
                "" if found.startswith("28 ") and str(run) in found else f"ended in {found[:150]}"
            )
            found = in_a_fork(lambda: train_with_room(-1, run))  # noqa: B023
        outcomes.append(
            (str(number), fault or ("" if found == whole else f"resumed to {found[:150]}"))
        )
    (place / "outcomes").write_text(json.dumps([outcomes, refused]))


@kind("full disks", sample=3, usual=60, long=600)
def full_disks(count: int, folder: Path) -> Tally:
    """Training on a disk that is full at some write: one error, and resumed with room it ends in
    the same bits.
    """
    child("full_disks_child", folder, count).wait()
    outcomes, refused = json.loads((folder / "outcomes").read_text())
    tried, survived, lost, notes = tally([tuple(outcome) for outcome in outcomes])
    return tried, survived, lost, [f"{refused} were stopped by the disk and resumed", *notes]


FULL = {
    "measure": [
        "faults:a_problem",
        "--what",
        "trace,eigenpairs,spectrum",
        "--top",
        "2",
        "--depth",
        "8",
    ],
    "landscape": ["faults:a_problem", "--points", "3"],
    "train": ["--model", "mlp", "--data", "digits", "--epochs", "2", "--samples", "40"],
    "reproduce": ["faults", "--scale", "smoke"],
    "graph spectrum": ["graph.txt", "--moments", "8"],
}
ROOM = {
    "measure": 130,
    "landscape": 190,
    "train": 180,
    "reproduce": 1900,
    "graph spectrum": 130,
}  # kilobytes, almost


def invoke(command: str, out: Path) -> tuple[int, str]:
    """The exit code and the errors of a command, in this process."""
    from typer.testing import CliRunner

    from lambdahat.cli.app import app
    from lambdahat.experiments import published

    published.PLACES["faults"] = "", ""  # a name that the command takes
    published.find = lambda name: an_experiment(12)
    Path("graph.txt").write_text("".join(f"{i} {(i * i + 1) % 30}\n" for i in range(30)))
    resumed = ["--resume"] if command == "train" and (out / "checkpoints").is_dir() else []
    found = CliRunner().invoke(app, [*command.split(), *FULL[command], *resumed, "--out", str(out)])
    return found.exit_code, found.stderr


def whole_files(folder: Path) -> dict[str, Any]:
    """Everything in a folder that is read back, by name; damage is an error."""
    from lambdahat._core.storage import is_result_file
    from lambdahat.experiments.kit.store import stores_in
    from lambdahat.results import Result
    from lambdahat.training import Checkpoints, read_rows

    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json")):
        if is_result_file(path) and path.parent.name != "checkpoints":
            found[path.name] = plain(Result.load(path))
        else:
            json.loads(path.read_text())
    for store in stores_in(folder):
        found[store.path.name] = plain(list(store.rows()))
    if (folder / "metrics.jsonl").is_file():
        read_rows(folder / "metrics.jsonl")
    if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
        newest = Checkpoints(folder / "checkpoints").newest()
        if newest is not None:  # else the disk was full before the first
            found["weights"] = plain(newest.state["model"])
            if newest.damaged:
                raise ValueError("; ".join(newest.damaged))
    for name in [name for name in found if name.startswith(("measurement", "training"))]:
        del found[name]  # they have times in them
    return found


def run_on_full_disk(place: Path, command: str, kilobytes: int, right: dict[str, Any]) -> str:
    """A command on a disk of so many kilobytes, then, with room, once more: its exit code, and what
    went wrong.
    """
    os.chdir(place)
    (place / "disk").mkdir()
    disk = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", "disk"]
    subprocess.run(disk, check=True)
    code, told = invoke(command, place / "disk" / "out")
    fault = ""
    if code == 2:
        lines = told.splitlines()
        why = any(text in told for text in ("No space left", "disk is full", "disk I/O"))
        fault = "" if why and len(lines) == 1 else f"said {told[-300:]}"
    elif code:
        fault = f"ended with {code}: {told[-300:]}"
    kept = whole_files(place / "disk" / "out")
    left = [path.name for path in (place / "disk").rglob(".*.*") if path.name != ".lock"]
    fault = fault or (f"{left} are left" if left else "")
    subprocess.run(["mount", "-o", "remount,size=100m", "disk"], check=True)
    again, told = invoke(command, place / "disk" / "out")
    found = whole_files(place / "disk" / "out")
    if again or found != right:
        fault = fault or f"with room: {again} {told[-200:]} {sorted(set(found) ^ set(right))}"
    if not set(kept) <= set(right):
        fault = fault or f"{sorted(set(kept) - set(right))} were kept"
    return json.dumps([code, fault])


def full_disks_commands_child(folder: str, count: str) -> None:
    """Commands on full disks, each in a fork of this process; writes the outcomes and how many were
    stopped.
    """
    preload()
    dice, outcomes, refused, right = random.Random(0), [], 0, dict[str, Any]()
    os.chdir(folder)
    for number in range(int(count)):
        command = ("reproduce", "measure", "train", "landscape", "graph spectrum")[number % 5]
        if command not in right:
            place = Path(folder) / f"right {command}"
            in_a_fork(lambda: str(invoke(command, place)))  # noqa: B023
            right[command] = whole_files(place)
        kilobytes = int(68 * (ROOM[command] / 68) ** dice.random())  # --out is tried with 64 KiB
        place = Path(folder) / str(number)
        place.mkdir()
        told = in_a_fork(lambda: run_on_full_disk(place, command, kilobytes, right[command]))  # noqa: B023
        ended, fault = json.loads(told) if told.startswith("[") else (None, told)
        refused += ended == 2
        outcomes.append((f"{command}, {kilobytes} kB", fault))
    (Path(folder) / "outcomes").write_text(json.dumps([outcomes, refused]))


@kind("full disks under commands", sample=2, usual=20, long=600)
def full_disks_under_commands(count: int, folder: Path) -> Tally:
    """Commands on a disk that is full at some write: one line and exit code 2, whole files, and
    with room the rest.
    """
    apart = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    if (
        not shutil.which("unshare")
        or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode
    ):
        return 0, 0, 0, ["this machine lets nobody make a small disk"]
    child("full_disks_commands_child", folder, count, apart=apart).wait()
    outcomes, refused = json.loads((folder / "outcomes").read_text())
    tried, survived, lost, notes = tally([tuple(outcome) for outcome in outcomes])
    return tried, survived, lost, [f"{refused} were stopped by the disk", *notes]


# Pages and leaks


@kind("hostile pages", sample=6, usual=200, long=5000)
def hostile_pages(count: int, folder: Path) -> Tally:
    """Results whose names and texts hold markup: no tag, attribute or script of theirs is in the
    page.
    """
    import html.parser

    from lambdahat.report.page import page
    from lambdahat.results import Estimate

    class Reader(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.seen += [tag] if tag in ("img", "iframe", "object", "b") else []
            self.seen += [f"{tag} {name}" for name, _ in attributes if name.startswith("on")]
            self.seen += [
                f"{tag} {value}"
                for name, value in attributes
                if name == "href" and "evil" in (value or "") and not (value or "").startswith("#")
            ]

    pieces = [
        "<script>evil()</script>",
        "</script>",
        "<img src=x onerror=evil()>",
        '" onclick="evil()',
        "'",
        "<!--",
        "-->",
        "]]>",
        "&lt;b&gt;",
        "<b>",
        "javascript:evil()",
        "\u2028",
        "</style>",
        "</title>",
    ]
    random_, outcomes = random.Random(0), []
    plain = Reader()
    plain.feed(page({"one": Estimate(1.0)}, folder / "plain.html").read_text())
    scripts = (folder / "plain.html").read_text().count("<script")
    for number in range(count):
        name = "".join(random_.choices(pieces, k=random_.randrange(1, 6)))
        text = page({name: Estimate(1.0, 0.1)}, folder / "page.html", title=name).read_text()
        reader = Reader()
        reader.feed(text)
        fault = (
            ""
            if reader.seen == plain.seen and text.count("<script") == scripts
            else f"{reader.seen} {name}"
        )
        outcomes.append((str(number), fault))
    return tally(outcomes)


@kind("pages of many results", sample=120, usual=2000, long=20_000)
def many_results(count: int, folder: Path) -> Tally:
    """A page of many saved results has them all, takes no more time for each than smaller pages,
    and opens.
    """
    import torch

    import lambdahat as lh
    from lambdahat.report.page import page

    operator = lh.operator(torch.diag(torch.arange(1.0, 41.0, dtype=torch.float64)))
    kinds = [
        lh.spectrum(operator, depth=20, seed=0),
        lh.eigenpairs(operator, k=3),
        lh.trace(operator),
    ]
    times, path = {}, folder / "page.html"
    for size in sorted({max(count // 2**halvings, 1) for halvings in range(4)}):
        place = folder / str(size)
        for number in range(size):
            kinds[number % 3].save(place / f"run-{number:05d}" / "result")
        start = time.process_time()
        text = page(place, path).read_text()
        times[size] = (time.process_time() - start) / size
        shutil.rmtree(place)
    there, least = text.count('<section id="run-'), min(list(times.values())[:-1])
    faults = [f"{there} sections"] if there != count else []
    faults += ["not linear"] if times[count] > 1.5 * least + 0.01 else []
    seen, fault = in_a_browser(path, folder)
    faults += [fault] if fault else []
    told = ", ".join(f"{size:,} in {size * each:.1f} s" for size, each in times.items())
    return count, count - len(faults), len(faults), [f"{told}; {seen}", *faults]


def in_a_browser(path: Path, folder: Path) -> tuple[str, str]:
    """Open a page in Chromium, scroll to a few charts, and look whether they and not all others are
    drawn.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.report.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        return "no Chromium to open it in", ""
    start = time.monotonic()
    with Browser(folder / "profile") as browser:
        try:
            browser.open(path, 1280)
            browser.until("typeof Plotly === 'object'")
            opened, charts = (
                time.monotonic() - start,
                browser.evaluate("document.querySelectorAll('.chart').length"),
            )
            for number in (0, charts // 2, charts - 1):
                chart = f"document.querySelectorAll('.chart')[{number}]"
                browser.evaluate(
                    f"{{ for (let e = {chart}; e; e = e.parentElement) if (e.tagName === 'DETAILS')"
                    f" e.open = true; {chart}.scrollIntoView() }}"
                )
                browser.until(f"{chart}.classList.contains('drawn')")
            drawn = browser.evaluate("document.querySelectorAll('.chart.drawn').length")
            fault = str(browser.complaints() or "")[:300]
        except AssertionError as error:
            return "", f"in Chromium: {error}"[:300]
    fault = fault or ("all charts are drawn at once" if drawn > 60 and drawn > charts / 4 else "")
    return f"Chromium opened it in {opened:.0f} s and drew {drawn} of {charts:,} charts", fault


LEAK = """
import gc, sys, warnings
import torch
import lambdahat as lh
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
data = torch.randn(40, 4), torch.randint(2, (40,))
def problem():
    return lh.Problem(model, "cross_entropy", data)
calls = {
    "trace": lambda seed: lh.trace(lh.hessian(problem()), method="hutchinson", tol=0.3, seed=seed),
    "eigenpairs": lambda seed: lh.eigenpairs(lh.hessian(problem()), k=2, seed=seed),
    "llc": lambda seed: lh.llc(
        problem(), chains=2, draws=20, burn_in=10, step_size=1e-3, kernel="sgld", seed=seed
    ),
}
call, count = calls[sys.argv[1]], int(sys.argv[2])
def memory():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
for seed in range(50):
    call(seed)
before = memory()
for seed in range(count):
    call(seed)
print(memory() - before)
"""


@kind("leaks", sample=60, usual=3000, long=30_000)
def leaks(count: int, folder: Path) -> Tally:
    """Many calls of trace, eigenpairs and llc in one process: it grows by less than 20 MiB."""
    outcomes, notes = [], []
    for name in ("trace", "eigenpairs", "llc"):
        code, out, err = in_a_child(LEAK, name, count // 3)
        grown = float(out) if code == 0 else float("inf")
        notes.append(f"{name} {grown:+.1f} MiB")
        outcomes += [(name, "" if grown < 20 else f"{grown:.1f} MiB {err[-200:]}")] * (count // 3)
    tried, survived, lost, lines = tally(outcomes)
    return tried, survived, lost, [*notes, *lines]


# Workers and threads


def several_numbers(seed: int, workers: int = 0) -> list[float]:
    """A trace, eigenvalues, a spectrum and λ̂ of a small problem; ``workers`` processes load its
    batches.
    """
    import torch

    import lambdahat as lh

    problem = a_problem(seed)
    if workers:
        data = torch.utils.data.TensorDataset(*next(iter(problem.batches)).data)
        loader = torch.utils.data.DataLoader(data, batch_size=len(data), num_workers=workers)
        problem = lh.Problem(problem.source, "cross_entropy", loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = lh.llc(
            problem,
            chains=2,
            draws=20,
            burn_in=10,
            step_size=1e-3,
            kernel="sgld",
            mode="sequential",
        )
        pairs = lh.eigenpairs(lh.hessian(problem), 3, max_matvecs=60)
        nodes = lh.spectrum(lh.hessian(problem), depth=8).nodes
        trace = lh.trace(lh.hessian(problem), method="hutchinson", max_matvecs=10)
    return [
        float(trace),
        *map(float, pairs.values),
        *nodes.reshape(-1).tolist(),
        float(found),
        float(problem.loss()),
    ]


@kind("workers and threads", sample=5, usual=10, long=500)
def concurrency(count: int, folder: Path) -> Tally:
    """The same bits in forked and spawned workers, in eight threads at once, and from a
    ``DataLoader`` with workers; with eight threads in torch, the same to rounding.
    """
    from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

    import torch

    threads, outcomes = torch.get_num_threads(), []
    sys.modules.setdefault("faults", sys.modules[__name__])  # by which workers find the function
    sys.path.insert(0, str(Path(__file__).parent))
    import faults

    def together(pool: Executor, seed: int) -> list[list[float]]:
        with pool:
            return list(pool.map(faults.several_numbers, [seed, seed + 1] * 4))

    def outcome(way: str, seed: int) -> str:
        right = [several_numbers(seed), several_numbers(seed + 1)]
        if way == "threads":
            found = together(ThreadPoolExecutor(8), seed)
        elif way == "loaders":
            found = [several_numbers(seed, 2), several_numbers(seed + 1, 2)]
        elif way == "threads of torch":
            torch.set_num_threads(8)
            found = [several_numbers(seed), several_numbers(seed + 1)]
            near = [
                abs(a - b) <= 1e-3 * abs(a) + 1e-6
                for one, other in zip(right, found, strict=True)
                for a, b in zip(one, other, strict=True)
            ]
            return "" if all(near) else "other numbers"
        else:
            found = together(ProcessPoolExecutor(2, multiprocessing.get_context(way)), seed)
        return "" if found == right * (len(found) // 2) else "other numbers"

    for number in range(count):
        way = ("fork", "threads", "loaders", "threads of torch", "spawn")[number % 5]
        torch.set_num_threads(1)
        try:
            fault = outcome(way, number)
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"[:200]
        finally:
            torch.set_num_threads(threads)
        outcomes.append((f"{way}, case {number}", fault))
    return tally(outcomes)


# Budgets of memory


def budgeted_model(subject: str, small: bool) -> tuple[Any, Any]:
    """A model and data, of which vectors, activations or outputs take most of what work takes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if subject == "vectors":  # 2 MiB each
        width, samples, classes = (8, 16, 4) if small else (700, 300, 10)
        model: Any = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes))
        return model, (torch.randn(samples, width), torch.randint(classes, (samples,)))
    if subject == "activations":
        samples, classes = (8, 5) if small else (200, 50)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, classes),
        )
        return model, (torch.randn(samples, 3, 32, 32), torch.randint(classes, (samples,)))
    samples, classes = (8, 12) if small else (800, 2000)
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, classes))
    return model, (torch.randn(samples, 20), torch.randint(classes, (samples,)))


def budgeted_work(subject: str) -> dict[str, Callable[[Any], Any]]:
    """Estimators, chains, KFAC and dense matrices; with many products only where it is vectors that
    take memory.
    """
    import lambdahat as lh

    products, depth, pairs = (60, 100, 40) if subject == "vectors" else (8, 4, 3)
    few = {"draws": 8, "burn_in": 8, "step_size": 1e-6, "kernel": "sgld", "localization": 100.0}

    def shifted(p: Any) -> Any:
        G = lh.ggn(p)
        return G + lh.identity(G)

    return {
        "gradient": lambda p: p.gradient(),
        "products of a block": lambda p: lh.hessian(p) @ p.vector.unsqueeze(1).repeat(1, 3),
        "Fisher": lambda p: lh.fisher(p, kind="monte_carlo") @ p.vector,
        "empirical Fisher": lambda p: lh.fisher(p, kind="empirical") @ p.vector,
        "covariance": lambda p: lh.gradient_covariance(p) @ p.vector,
        "trace": lambda p: lh.trace(lh.hessian(p), tol=0.2, max_matvecs=products),
        "trace of the GGN": lambda p: lh.trace(lh.ggn(p), tol=0.2, max_matvecs=products),
        "Hutchinson": lambda p: lh.trace(lh.hessian(p), method="hutchinson", max_matvecs=products),
        "Hutch++": lambda p: lh.trace(lh.hessian(p), method="hutch++", max_matvecs=products),
        "XTrace": lambda p: lh.trace(lh.hessian(p), method="xtrace", max_matvecs=products),
        "traces of layers": lambda p: lh.trace_per_layer(
            lh.hessian(p), tol=0.5, max_matvecs=products
        ),
        "diagonal": lambda p: lh.diagonal(lh.hessian(p), probes=depth // 2),
        "diagonal of the GGN": lambda p: lh.diagonal(lh.ggn(p), probes=depth // 2),
        "Frobenius norm": lambda p: lh.frobenius_norm(lh.hessian(p), tol=0.5, max_matvecs=products),
        "spectral norm": lambda p: lh.spectral_norm(lh.hessian(p), tol=0.1, max_matvecs=15),
        "eigenpairs": lambda p: lh.eigenpairs(
            lh.hessian(p), 5, tol=0.1, max_matvecs=max(products, 12)
        ),
        "many eigenpairs": lambda p: lh.eigenpairs(
            lh.hessian(p), pairs, tol=0.1, max_matvecs=max(products, 12)
        ),
        "power iteration": lambda p: lh.power_iteration(lh.hessian(p), 3, tol=0.1, max_matvecs=12),
        "long power iteration": lambda p: lh.power_iteration(
            lh.hessian(p), pairs, tol=0.1, max_matvecs=2 * pairs
        ),
        "spectrum": lambda p: lh.spectrum(lh.hessian(p), depth=8),
        "deep spectrum": lambda p: lh.spectrum(lh.hessian(p), depth=depth),
        "moments": lambda p: lh.moments(lh.hessian(p), 4, basis="chebyshev", probes=depth // 2),
        "logdet": lambda p: lh.logdet(shifted(p), depth=4, probes=2),
        "logdet by entropy": lambda p: lh.logdet(shifted(p), method="maxent", depth=3, probes=2),
        "logdet by Chebyshev": lambda p: lh.logdet(
            shifted(p), method="chebyshev", depth=3, probes=2
        ),
        "exact logdet": lambda p: lh.logdet(shifted(p), method="exact"),
        "function": lambda p: lh.trace_function(
            lh.ggn(p), lambda x: abs(x) ** 0.5, depth=3, probes=2
        ),
        "dense": lambda p: lh.hessian(p).dense(),
        "dense GGN": lambda p: lh.ggn(p).dense(),
        "dense part": lambda p: lh.hessian(p).restrict("*bias").dense(),
        "KFAC": lambda p: lh.kfac(p, kind="monte_carlo") @ p.vector,
        "EKFAC": lambda p: lh.ekfac(p, kind="monte_carlo") @ p.vector,
        "exact KFAC": lambda p: lh.kfac(p) @ p.vector,
        "dense KFAC": lambda p: lh.kfac(p, kind="empirical").dense(),
        "inverse of KFAC": lambda p: lh.kfac(p, kind="empirical").inverse(0.1) @ p.vector,
        "eigenpairs of KFAC": lambda p: lh.eigenpairs(
            lh.kfac(p, kind="empirical"), 5, tol=0.1, max_matvecs=30
        ),
        "variance": lambda p: lh.variance(p, probes=2, samples=32),
        "landscape": lambda p: lh.landscape(p, ("filter", "filter"), points=3),
        "sharpness": lambda p: lh.sharpness(p, steps=2, tol=0.1),
        "relative sharpness": lambda p: lh.relative_sharpness(p, tol=0.9),
        "Fisher-Rao norm": lambda p: lh.fisher_rao_norm(p),
        "rank bound": lambda p: lh.rank_bound(p),
        "llc": lambda p: lh.llc(p, chains=4, **few),
        "llc, batched": lambda p: lh.llc(p, chains=4, mode="batched", **few),
        "llc, many chains": lambda p: lh.llc(p, chains=16, **few),
        "llc with a pilot": lambda p: lh.llc(
            p, chains=2, max_gradients=300 if subject == "vectors" else 240
        ),
        "llc by HMC": lambda p: lh.llc(
            p, chains=2, kernel="hmc", localization=100.0, draws=8, burn_in=2
        ),
        "measurement": lambda p: lh.measure(p, ("trace", "spectrum"), depth=depth),
        "volume scaling": lambda p: lh.singular.volume_scaling(p, samples=128, radius=1e-3),
        "effective dimensions": lambda p: lh.singular.effective_dimensions(
            p, depth=depth, probes=2
        ),
        "evidence": lambda p: lh.singular.laplace_evidence(p, depth=depth, probes=2),
    }


def try_budget(subject: str, name: str) -> str:
    """Do some work within 200 MiB, in this process: "" or what went wrong. Only Linux tells the
    peak of a process.
    """
    import gc

    import lambdahat as lh

    def mebibytes(entry: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024

    work, refused = budgeted_work(subject)[name], ""
    warnings.simplefilter("ignore")
    with contextlib.suppress(ValueError):
        work(
            lh.Problem(
                budgeted_model(subject, True)[0],
                "cross_entropy",
                budgeted_model(subject, True)[1],
                memory="200MiB",
            )
        )  # what is loaded at the first call counts for nobody
    model, data = budgeted_model(subject, False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = mebibytes("VmRSS")
    try:
        work(lh.Problem(model, "cross_entropy", data, memory="200MiB"))
    except ValueError as error:
        refused = str(error)
    most = mebibytes("VmHWM") - before
    if most > 220:
        return f"{most:.0f} MiB"
    return (
        ""
        if not refused or "memory" in refused or "mode" in refused
        else f"refused by {refused[:150]}"
    )


def budgets_child(folder: str, count: str) -> None:
    """Work within budgets, each in a fork of this process, which has imported all that they
    need.
    """
    import lambdahat as lh

    preload()
    for name in lh.__all__:
        getattr(lh, name)  # which imports its module
    cases = [
        (subject, name)
        for subject in ("vectors", "activations", "outputs")
        for name in budgeted_work(subject)
    ]
    with Path(folder, "outcomes").open("a") as outcomes:
        for subject, name in random.Random(4).sample(cases, min(int(count), len(cases))):
            fault = in_a_fork(lambda: try_budget(subject, name))  # noqa: B023
            outcomes.write(json.dumps([f"{name} ({subject})", fault]) + "\n")
            outcomes.flush()


@kind("memory budgets", sample=6, usual=51, long=153)
def budgets(count: int, folder: Path) -> Tally:
    """Every estimator, chains, KFAC and dense matrices with ``memory="200MiB"``: within 10 %, or
    refused by name.
    """
    if not os.path.isfile("/proc/self/clear_refs"):
        return 0, 0, 0, ["this system does not tell the peak of a process"]
    child("budgets_child", folder, count).wait()
    return tally(
        [tuple(json.loads(line)) for line in (folder / "outcomes").read_text().splitlines()]
    )


# Damaged files


def a_problem(seed: int = 0, headless: bool = False) -> Any:
    """A perceptron on random data; ``headless`` has a last layer of 0, so that its loss is ln 3 on
    any data.
    """
    import torch

    from lambdahat import Problem
    from lambdahat.models import mlp

    model = mlp([6, 8, 3], seed=0)
    if headless:
        with torch.no_grad():
            for parameter in list(model.parameters())[-2:]:
                parameter.zero_()
    rng = torch.Generator().manual_seed(seed)
    data = torch.randn(40, 6, generator=rng), torch.randint(3, (40,), generator=rng)
    return Problem(model, "cross_entropy", data)


def measured(folder: Path, problem: Any = None) -> Any:
    """Three quantities of a problem, kept in a folder."""
    from lambdahat._measure import measure

    return measure(
        a_problem() if problem is None else problem,
        ("trace", "eigenpairs", "spectrum"),
        folder=folder,
    )


def an_experiment(cells: int, pause: float = 0.0, log: str = "") -> Any:
    """An experiment of so many cells, each with a few rows from its own stream; nested, so that
    workers get it.
    """
    from lambdahat.experiments.kit.claims import Claim, Table, mean_of
    from lambdahat.experiments.kit.experiment import Experiment

    def run(cell: dict[str, Any], device: str) -> list[dict[str, Any]]:
        import time

        import torch

        from lambdahat._core.rng import generator

        if log:
            with open(log, "a") as file:
                file.write(f"{cell['seed']}\n")
        time.sleep(pause)
        draws = torch.randn(3, generator=generator(cell["seed"], "faults"), dtype=torch.float64)
        return [{"step": i, "value": 2.0 + 0.1 * float(draw)} for i, draw in enumerate(draws)]

    def claims(rows: Any) -> list[Any]:
        return [Claim("values are above one", "", "2", mean_of(rows.values("value")), bound=1.0)]

    def tables(rows: Any) -> list[Any]:
        return [Table("Values", ("mean",), ((str(mean_of(rows.values("value"))),),))]

    scales = {name: [{"seed": i} for i in range(cells)] for name in ("smoke", "cpu", "paper")}
    return Experiment(
        "faults", "Faults", "none", "none", scales, run, claims, tables, lambda rows: []
    )


def plain(value: Any) -> Any:
    """A value as nested tuples that compare by all bits."""
    import torch

    from lambdahat.results import Result

    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if hasattr(value, "tobytes"):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Result):
        return type(value).__name__, plain(vars(value))
    if isinstance(value, Mapping):
        return tuple((key, plain(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    return repr(value)


def library(folder: Path) -> dict[str, tuple[str, Callable[[Path], Any]]]:
    """Write one file or folder of every kind that is read back: by name, the place and the function
    that reads it.
    """
    import torch

    from lambdahat.cli.loading import read_checkpoint
    from lambdahat.experiments.kit.experiment import findings
    from lambdahat.experiments.kit.store import Store
    from lambdahat.experiments.kit.sweeps import sweep
    from lambdahat.optim import IterateAverage
    from lambdahat.results import Result
    from lambdahat.training import Checkpoints, fit, read_rows
    from lambdahat.training.checkpoints import Recipe, read_recipe, weights
    from lambdahat.training.history import Metrics

    run, problem = folder / "run", a_problem()
    optimizer = torch.optim.Adam(problem.source.parameters(), lr=0.01)
    fit(problem, optimizer, 3, batch_size=10, folder=run, averaging=IterateAverage(problem.source))
    Recipe("mlp", "digits", settings={"lr": 0.01}).save(run, resume=True)
    measured(folder / "measured")
    experiment = an_experiment(12)
    sweep(experiment, folder / "store", scale="smoke", command="lambdahat reproduce faults")

    def newest(place: Path) -> Any:
        found = Checkpoints(place / "run" / "checkpoints").newest()
        if found.damaged:
            warnings.warn("; ".join(found.damaged), RuntimeWarning, stacklevel=1)
        return found.step, found.state

    length = newest(folder)[1]["metrics"]
    initial = newest(folder)[1]["initial"]

    def rows(place: Path) -> Any:
        found = read_rows(place / "run" / "metrics.jsonl")
        if Metrics(place / "run").length < length:
            raise ValueError(
                "metrics.jsonl is short: an earlier checkpoint is taken"
            )  # as resuming does
        return found

    def stored(place: Path) -> Any:
        store = Store(place / "store", "faults", "smoke")
        found = findings(experiment, store)
        return (
            list(store.rows()),
            store.about(),
            sorted(store.finished()),
            store.errors(),
            store.seconds(),
            found.verdicts,
        )

    def again(place: Path) -> Any:
        found = measured(place / "measured")
        return {**found.results, "seconds": 0}

    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {}
    for path in sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    ):
        name = str(path.relative_to(folder))
        if path.parent.name == "checkpoints" and path.name.startswith("step"):
            readers[name] = name, newest
        elif path.name == "initial.safetensors":
            readers[name] = (
                name,
                lambda place: Checkpoints(place / "run" / "checkpoints").read_initial(initial),
            )
        elif path.name == "best.json":
            readers[name] = name, lambda place: weights(place / "run", "best")
        elif path.name == "metrics.jsonl":
            readers[name] = name, rows
        elif path.name == "config.json":
            readers[name] = name, lambda place: vars(read_recipe(place / "run"))
        elif path.name == "averaged.safetensors":
            readers[name] = (
                name,
                lambda place: read_checkpoint(place / "run" / "averaged.safetensors", "CHECKPOINT"),
            )
        elif path.suffix == ".sqlite":
            readers[name] = name, stored
        elif path.parent.name == "measured":
            readers[name] = name, again
            if path.suffix == ".json" and path.name not in ("run.json", "progress.json"):
                readers[f"{name}, loaded"] = (
                    name,
                    lambda place, name=name: Result.load(place / name),
                )
        elif path.name == "training.json":
            readers[name] = name, lambda place: Result.load(place / "run" / "training.json")
    return readers


def damage_files(
    count: int, folder: Path, damage: Callable[[random.Random, bytes], bytes]
) -> Tally:
    """Damage a file of every kind in turn: the same is read, or the damage is named with the
    file.
    """
    from lambdahat.cli.exits import InputError

    readers = library(folder / "whole")
    names, dice = list(readers), random.Random(0)
    right = {name: plain(read(folder / "whole")) for name, (_, read) in readers.items()}
    outcomes, same, named = [], 0, 0
    for number in range(count):
        name = names[number % len(names)]
        file, read = readers[name]
        place = folder / "damaged"
        shutil.copytree(folder / "whole", place)
        path = place / file
        blob = path.read_bytes()
        path.write_bytes(damage(dice, blob))
        fault = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = plain(read(place))
                told = any(_names(str(warning.message), path) for warning in caught)
                if found == right[name]:
                    same += 1
                elif told:
                    named += 1
                else:
                    fault = "read as something else without a word"
            except (ValueError, OSError, InputError) as error:
                named += 1
                fault = (
                    "" if _names(str(error), path) else f"an error without the file: {error}"[:200]
                )
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"[:200]
        outcomes.append((f"{name}, case {number}", fault))
        shutil.rmtree(place)
    tried, survived, lost, notes = tally(outcomes)
    return (
        tried,
        survived,
        lost,
        [f"{len(names)} readings; {named:,} named, {same:,} changed nothing", *notes],
    )


def _names(text: str, path: Path) -> bool:
    """Whether a message names a file, or its other half."""
    return (
        path.name in text
        or path.with_suffix(".json").name in text
        or path.stem.split(".")[0] + "." in text
    )


def flip(dice: random.Random, blob: bytes) -> bytes:
    """One bit changed."""
    place = dice.randrange(8 * len(blob))
    data = bytearray(blob)
    data[place // 8] ^= 1 << place % 8
    return bytes(data)


@kind("bit flips", sample=46, usual=1000, long=20_000)
def flips(count: int, folder: Path) -> Tally:
    """One random bit in one file of every kind that is read back."""
    return damage_files(count, folder, flip)


@kind("truncations", sample=23, usual=200, long=4000)
def truncations(count: int, folder: Path) -> Tally:
    """One file of every kind that is read back, cut short at a random place."""
    return damage_files(count, folder, lambda dice, blob: blob[: dice.randrange(len(blob))])


# Results of something else


@kind("other problems", sample=6, usual=60, long=2000)
def other_problems(count: int, folder: Path) -> Tally:
    """Measure another problem of the same parameters and the same loss into the folder of the
    first.
    """
    import torch

    from lambdahat import Problem

    dice, outcomes = random.Random(0), []
    first = a_problem(headless=True)
    measured(folder / "first", first)
    (x, y), model = next(iter(first.batches)).data, first.source
    for number in range(count):
        one, other, labels = x.clone(), x.clone(), y.clone()
        one[dice.randrange(40), dice.randrange(6)] += dice.choice((1e-6, 1e-3, 1.0))
        labels[dice.randrange(40)] += dice.choice((1, 2))
        other = other[torch.randperm(40, generator=torch.Generator().manual_seed(number))]
        weighted = torch.nn.CrossEntropyLoss(weight=torch.full((3,), dice.uniform(0.1, 0.9)))
        case, changed = (
            ("one pixel", lambda: Problem(model, "cross_entropy", (one, y))),  # noqa: B023
            ("one label", lambda: Problem(model, "cross_entropy", (x, labels % 3))),  # noqa: B023
            ("another order", lambda: Problem(model, "cross_entropy", (other, y))),  # noqa: B023
            ("other data", lambda: a_problem(number + 1, headless=True)),  # noqa: B023
            ("other weights of classes", lambda: Problem(model, weighted, (x, y))),  # noqa: B023
            (
                "the same",
                lambda: Problem(model, "cross_entropy", (x, y), batch_size=dice.randint(1, 40)),
            ),
        )[number % 6]
        try:
            found = measured(folder / "first", changed())
            right = case == "the same" and float(found["trace"]) == float(
                measured(folder / "first", first)["trace"]
            )
            fault = "" if right else "the first problem's result"
        except ValueError as error:
            fault = (
                ""
                if "folder must hold results of this run" in str(error) and case != "the same"
                else str(error)
            )
        outcomes.append((f"{case}, case {number}", fault))
    return tally(outcomes)


# Killed processes


def sweep_child(folder: str, cells: str, jobs: str, backend: str, pause: str) -> None:
    """Run the experiment, each cell with a line in a log."""
    from lambdahat.experiments.kit.sweeps import sweep

    sweep(
        an_experiment(int(cells), float(pause), f"{folder}/log"),
        folder,
        scale="cpu",
        jobs=int(jobs),
        backend=backend,
    )


def measure_child(folder: str, quantity: str) -> None:
    """Measure; "chains" runs long chains in processes of their own."""
    if quantity == "chains":
        from lambdahat import sample
        from lambdahat.sampling import sgld

        Path(folder, "log").write_text("begun")
        sample(
            a_problem(),
            sgld(1e-5, 10.0, 10.0),
            chains=2,
            burn_in=10**8,
            batch_size=10,
            mode="processes",
        )
    else:
        measured(Path(folder))


def _killed_sweep(
    folder: Path, cells: int, kills: int, jobs: int, writers: int = 1
) -> list[tuple[str, str]]:
    """Kill sweeps at random moments after a newly finished cell, then finish; nothing is lost,
    twice or different.
    """
    from lambdahat.experiments.kit.experiment import findings
    from lambdahat.experiments.kit.store import Store
    from lambdahat.experiments.kit.sweeps import sweep

    folder.mkdir(parents=True)
    log, store, dice, outcomes = (
        folder / "log",
        Store(folder, "faults", "cpu"),
        random.Random(kills),
        [],
    )
    before: list[tuple[set[str], int]] = []
    for number in range(kills):
        known = len(store.finished()) if store.path.is_file() else 0
        started = [forked("sweep_child", folder, cells, jobs, "loky", 0.05) for _ in range(writers)]
        while (
            not (store.path.is_file() and len(store.finished()) > known) and started[0].is_alive()
        ):
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        for process in started:
            process.kill()
            process.join()
        time.sleep(1.5 if jobs > 1 else 0)  # until its workers have gone
        done = store.finished()
        before.append((done, len(log.read_text().split())))
        outcomes.append(
            (f"kill {number}", "" if len(done) > known or len(done) == cells else "no progress")
        )
    experiment = an_experiment(cells, 0.0, str(log))
    found = sweep(experiment, folder, scale="cpu")
    whole = sweep(an_experiment(cells), folder / "whole", scale="cpu")
    keys = {
        row["seed"]: key for row, key in zip(experiment.grid("cpu"), _keys(experiment), strict=True)
    }
    begun = [keys[int(seed)] for seed in log.read_text().split()]
    again = any(not done.isdisjoint(begun[count:]) for done, count in before)
    same = plain(list(found.rows())) == plain(list(whole.rows()))
    verdicts = findings(experiment, found).verdicts == findings(experiment, whole).verdicts
    outcomes += [
        ("finished cells", "run again" if again else ""),
        ("rows", "" if same else "others"),
        ("verdicts", "" if verdicts else "others"),
    ]
    return outcomes


def _keys(experiment: Any) -> list[str]:
    from lambdahat.experiments.kit.cells import key_of

    return [key_of(cell) for cell in experiment.grid("cpu")]


@kind("killed sweeps", sample=1, usual=6, long=20)
def killed_sweeps(count: int, folder: Path) -> Tally:
    """Sweeps over ten cells for each kill, with one and with two jobs, killed by SIGKILL and
    resumed.
    """
    alone = _killed_sweep(folder / "one", max(10 * count, 20), count, jobs=1)
    return tally([*alone, *_killed_sweep(folder / "two", max(10 * count, 20), count, jobs=2)])


@kind("two writers", sample=1, usual=3, long=20)
def two_writers(count: int, folder: Path) -> Tally:
    """Two sweeps on one store at the same time, both killed, and finished by a third."""
    outcomes = _killed_sweep(folder / "both", max(10 * count, 20), count, jobs=1, writers=2)
    return tally(
        [outcome for outcome in outcomes if outcome[0] != "finished cells"]
    )  # both may begin the same cell


@kind("killed measurements", sample=2, usual=20, long=400)
def killed_measurements(count: int, folder: Path) -> Tally:
    """``measure`` killed at a random moment and resumed: the numbers of one that was not."""
    whole, dice, outcomes = measured(folder / "whole"), random.Random(0), []
    for number in range(count):
        place = folder / str(number)
        process = forked("measure_child", place, "numbers")
        while not place.is_dir() and process.is_alive():
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.join()
        found = plain(measured(place).results)
        outcomes.append(
            (f"kill {number}", "" if found == plain(whole.results) else "other numbers")
        )
    return tally(outcomes)


def running() -> dict[int, tuple[str, str]]:
    """The parent and the start of every process that runs, by its number."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=True
    )
    lines = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    return {
        int(pid): (parent, start) for pid, parent, stat, start in lines if not stat.startswith("Z")
    }


def descendants(parent: int) -> dict[int, tuple[str, str]]:
    """Those of the processes that a process has started, and those that these have."""
    everything, found = running(), {}
    new = {parent}
    while new:
        new = {pid for pid, (above, _) in everything.items() if int(above) in new}
        found |= {pid: everything[pid] for pid in new}
    return found


@kind("orphans", sample=1, usual=3, long=40)
def orphans(count: int, folder: Path) -> Tally:
    """After SIGKILL of a sweep or of chains in processes, at a random moment: all its children end
    within 5 s.
    """
    from importlib.util import find_spec

    backends = [
        name
        for name in ("loky", "dask", "ray")
        if name == "loky" or (find_spec(name) and count > 1)
    ]
    dice, outcomes, slowest = random.Random(0), [], 0.0
    for number in range(count):
        for name in [*backends, "chains"]:
            place = folder / f"{name}-{number}"
            place.mkdir()
            process = (
                child("measure_child", place, name)
                if name == "chains"
                else child("sweep_child", place, 20, 2, name, 60)
            )
            early = number % 3 == 2  # before the first cell has begun
            while not (place / "log").is_file() and process.poll() is None:
                time.sleep(0.02)
                if early and descendants(process.pid):
                    break
            time.sleep(dice.uniform(0, min(count, 3)))
            ended = process.poll() is not None
            left = {} if ended else descendants(process.pid)
            process.kill()
            process.wait()
            start = time.monotonic()
            while left and time.monotonic() - start < 5:
                time.sleep(0.05)
                left = {
                    pid: each
                    for pid, each in running().items()
                    if left.get(pid, ("", ""))[1] == each[1]
                }
            slowest = max(slowest, time.monotonic() - start)
            fault = (
                "ended by itself" if ended else f"{len(left)} children after 5 s" if left else ""
            )
            outcomes.append((f"{name} {number}", fault))
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    tried, survived, lost, notes = tally(outcomes)
    return (
        tried,
        survived,
        lost,
        [f"{', '.join(backends)} and chains; at most {slowest:.1f} s", *notes],
    )


def rank_child(folder: str, rank: str, size: str) -> None:
    """Products of one problem over several processes, until one of them fails; writes the error."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import lambdahat as lh

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/ranks", int(size))
    dist.init_process_group(
        "gloo", store=store, rank=int(rank), world_size=int(size), timeout=timedelta(seconds=15)
    )
    problem = a_problem()
    data = next(iter(problem.batches)).data
    operator = lh.hessian(lh.Problem(problem.source, "cross_entropy", data, ranks=dist.group.WORLD))
    block = torch.ones(operator.dim, 2)
    right = operator @ block
    Path(folder, f"begun-{rank}").touch()
    try:
        while torch.equal(operator @ block, right):
            pass
        told = "another product"
    except Exception as error:
        told = str(error)
    Path(folder, f"told-{rank}").write_text(told)
    os._exit(0)


@kind("dead ranks", sample=1, usual=10, long=200)
def dead_ranks(count: int, folder: Path) -> Tally:
    """One of three processes of a problem killed or stopped at a random moment: the others end in
    an error with its number.
    """
    dice, outcomes = random.Random(0), []
    for number in range(count):
        place, dead, how = (
            folder / str(number),
            dice.randrange(3),
            ("killed", "stopped")[number % 2],
        )
        place.mkdir()
        ranks = [forked("rank_child", place, rank, 3) for rank in range(3)]
        while len(list(place.glob("begun-*"))) < 3 and all(process.is_alive() for process in ranks):
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 1))
        os.kill(ranks[dead].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        faults = []
        for rank in {0, 1, 2} - {dead}:
            ranks[rank].join(90)
            file = place / f"told-{rank}"
            told = file.read_text() if file.is_file() else "nothing after 90 s"
            faults += (
                [] if f"rank {dead} does not answer" in told else [f"rank {rank} said {told[:150]}"]
            )
        for process in ranks:
            process.kill()
            process.join()
        outcomes.append((f"rank {dead} {how}, case {number}", "; ".join(faults)))
    return tally(outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", help=f"kinds of faults: {', '.join(KINDS)} (default: all)"
    )
    parser.add_argument("--long", action="store_true", help="hours rather than minutes")
    parser.add_argument("--quick", action="store_true", help="the sample that the tests try")
    args = parser.parse_args()
    unknown = sorted(set(args.kinds) - set(KINDS))
    if unknown:
        parser.error(f"kinds must be among {', '.join(KINDS)}, got {', '.join(unknown)}")
    print(
        "| kind | tried | survived | lost | seconds | notes |\n| --- | --: | --: | --: | --: |"
        " --- |",
        flush=True,
    )
    total = 0
    for name in args.kinds or KINDS:
        chosen = KINDS[name]
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        start = time.monotonic()
        try:
            tried, survived, lost, notes = chosen.run(
                chosen.sample if args.quick else chosen.long if args.long else chosen.usual, folder
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        total += lost
        seconds = time.monotonic() - start
        print(
            f"| {name} | {tried:,} | {survived:,} | {lost:,} | {seconds:.0f} |"
            f" {'; '.join(notes)} |",
            flush=True,
        )
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
