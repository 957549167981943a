"""What is lost when files are hostile, disks are full and processes die? For each kind: tried, survived, lost.

    python benchmarks/faults.py                  # all kinds, minutes
    python benchmarks/faults.py pickles --long   # some kinds, as many cases as there is patience for

A kind is a function of a number of cases and an empty folder. It returns (tried, survived, lost, notes). A case
survives if it ends as docs/reliability.md promises: in the right answer, or in an error that names file or argument.
Everything else is lost: a crash, a wrong answer without a word, a file that is damaged or gone, gigabytes of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tally = tuple[int, int, int, list[str]]
MIB = 1 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of fault: the function, and how many cases of it a test, a usual run and a long run try."""

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
    """From (case, what went wrong or "") to a tally; the notes name the first few cases that were lost."""
    lost = [f"{case}: {fault}" for case, fault in outcomes if fault]
    return len(outcomes), len(outcomes) - len(lost), len(lost), lost[:5]


def in_a_child(code: str, *arguments: Any, memory: int | None = None, seconds: float = 3600) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of Python code; ``memory`` bounds the address space, in MiB."""

    def bound() -> None:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory * MIB, memory * MIB))

    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=seconds,
        preexec_fn=bound, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


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
    nested = b"".join([b"]q\x00(K\x01K\x01e"] + [b"0](" + b"h\x00" * 8 + b"eq\x00" for _ in range(12)])
    return {
        "a good batch": batch(built(rows, plain, raw)),
        "an object array over its own bytes": batch(
            b"cnumpy\nndarray\n(K\x02\x85cnumpy\ndtype\n(X\x01\x00\x00\x00OK\x00K\x01tRC\x10" + b"A" * 16 + b"tR"
        ),
        "labels of objects over their own bytes": batch(
            built(rows, plain, raw),
            b"cnumpy\nndarray\n(K\x02\x85cnumpy\ndtype\n(X\x01\x00\x00\x00OK\x00K\x01tRC\x10" + b"A" * 16 + b"tR",
        ),
        "an object array by its state": batch(built(rows, dtype % b"O8", raw)),
        "objects through a dtype's state": batch(
            built(rows, plain + b"(K\x03X\x01\x00\x00\x00|NNNJ\x08\x00\x00\x00J\x01\x00\x00\x00K\x3ftb", raw)
        ),
        "a structure": batch(
            built(rows, plain + b"(K\x03X\x01\x00\x00\x00|N(X\x01\x00\x00\x00at}K\x08K\x08K\x10tb", raw)
        ),
        "a shape larger than its bytes": batch(built(b"(J\xff\xff\xff\x7fM\x00\x0ct", plain, raw)),
        "a negative shape": batch(built(b"(J\xff\xff\xff\xffM\x00\x0ct", plain, raw)),
        "a shape of large integers": batch(built(b"(" + huge + b"K\x02t", plain, raw)),
        "a state of a function": b"\x80\x04" + reconstruct + b"}X\x08\x00\x00\x00__code__K\x01sb.",
        "slots of a function": b"\x80\x04c_codecs\nencode\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b.",
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
    }  # fmt: skip


def good_pickles() -> list[bytes]:
    """Batches of two images in every protocol that is read."""
    import numpy as np

    data = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
    parts = {b"data": data, b"labels": [3, 7], b"batch_label": b"one", "filenames": ["a.png", "b.png"]}
    forms = [pickle.dumps(parts, protocol) for protocol in (0, 2, 3, 4)]
    return [*forms, pickle.dumps({"data": np.asfortranarray(data), "labels": np.array([3, 7], ">i4")}, 4)]


def mutated(random_: random.Random, seeds: list[bytes]) -> bytes:
    """One of the pickles, or two spliced, with a few bytes changed, put in, doubled or taken out."""
    data = bytearray(random_.choice(seeds))
    if random_.random() < 0.2:
        other = random_.choice(seeds)
        data = data[: random_.randrange(len(data))] + other[random_.randrange(len(other)) :]
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        # most of a batch is pixels, where a change is no damage: aim at what surrounds them half of the time
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


def try_pickles(count: int, seed: int, folder: Path, begin: int = 0) -> dict[str, Any]:
    """Read crafted and mutated pickles as batches of CIFAR-10, in this process."""
    from lambdahat.data.cifar import read_batch

    path, random_ = folder / "data_batch_1", random.Random(seed)
    crafted, seeds = crafted_pickles(), good_pickles()
    before, outcomes, read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], 0
    for number in range(count):
        name, data = (
            list(crafted.items())[number] if number < len(crafted) else (f"{seed}/{number}", mutated(random_, seeds))
        )
        if number < begin:
            continue
        (folder / "now").write_text(str(number))
        path.write_bytes(data)
        fault = ""
        try:
            read_batch(path, 10)
            read += 1
        except ValueError as error:
            fault = "" if str(path) in str(error) else f"an error without the file: {error}"[:200]
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"[:200]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        outcomes.append((name, fault or (f"{grown:.0f} MiB more" if grown > 200 else "")))
    return {"outcomes": [pair for pair in outcomes if pair[1]], "tried": len(outcomes), "read": read}


CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import faults
print(json.dumps(faults.try_pickles(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))))
"""


@kind("pickles", sample=600, usual=100_000, long=3_000_000)
def pickles(count: int, folder: Path) -> Tally:
    """Pickled data files, crafted or mutated: data, or a ValueError that names the file."""
    begin, read, lost = 0, 0, []
    tried = survived = 0
    while begin < count:
        code, out, err = in_a_child(CHILD, Path(__file__).parent, count, 0, folder, begin, memory=6000)
        if code == 0:
            found = json.loads(out.splitlines()[-1])
            tried, read = tried + found["tried"], read + found["read"]
            lost += [f"{case}: {fault}" for case, fault in found["outcomes"]]
            break
        now = int((folder / "now").read_text() or 0) if (folder / "now").exists() else begin
        lost.append(f"case {now}: the process ended with {code} ({err.strip().splitlines()[-1:]})")
        tried, begin = tried + now + 1 - begin, now + 1
    survived = tried - len(lost)
    return tried, survived, len(lost), [f"{read:,} were read, {survived - read:,} refused", *lost[:5]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"kinds of faults: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--long", action="store_true", help="hours rather than minutes")
    parser.add_argument("--quick", action="store_true", help="the sample that the tests try")
    args = parser.parse_args()
    unknown = sorted(set(args.kinds) - set(KINDS))
    if unknown:
        parser.error(f"kinds must be among {', '.join(KINDS)}, got {', '.join(unknown)}")
    print("| kind | tried | survived | lost | seconds | notes |\n| --- | --: | --: | --: | --: | --- |", flush=True)
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
        print(f"| {name} | {tried:,} | {survived:,} | {lost:,} | {seconds:.0f} | {'; '.join(notes)} |", flush=True)
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
