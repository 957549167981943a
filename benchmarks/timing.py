"""What the benchmarks share: arguments, the machine in words, tables as text and JSON
(``lambdahat.bench`` times).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


def arguments(question: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=question, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="torch's CPU threads"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: shows that it runs, its times mean nothing",
    )
    parser.add_argument("--batch-size", type=int, default=512)
    return parser


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """Applies the threads and describes the machine and precision; every benchmark prints this
    first.
    """
    torch.set_num_threads(args.threads)
    chip = (
        torch.cuda.get_device_name()
        if args.device.startswith("cuda")
        else platform.processor() or "CPU"
    )
    described = {
        "device": f"{args.device} ({chip})",
        "threads": args.threads,
        "torch": torch.__version__,
    }
    return described | {
        "precision": precision(args.device),
        "batch size": args.batch_size,
        "quick": args.quick,
    }


def precision(device: str) -> str:
    if not device.startswith("cuda"):
        return "float32"
    used = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return {(False, False): "strict float32", (True, True): "TF32"}.get(
        used, f"mixed: matmul, cudnn TF32 = {used}"
    )


def set_tf32(allowed: bool) -> None:
    """cuDNN allows TF32 by default, so strict float32 must be asked for."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def in_processes(
    function: Callable[[Any], Any], tasks: Iterable[Any], workers: int, minutes: float
) -> Iterator[Any]:
    """Results of ``function`` as they come, from fresh processes; nothing is started after so
    many minutes.
    """
    left, end = list(tasks), time.monotonic() + 60 * minutes
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        running: list[Any] = []
        while running or (left and time.monotonic() < end):
            while left and len(running) < workers and time.monotonic() < end:
                running.append(pool.apply_async(function, (left.pop(0),)))
            for result in [result for result in running if result.ready()]:
                running.remove(result)
                yield result.get()
            time.sleep(0.02)


def recorded(
    function: Callable[[Any], Any],
    tasks: Iterable[Any],
    path: Path,
    task_of: Callable[[dict[str, Any]], Hashable],
    workers: int,
    minutes: float,
) -> list[dict[str, Any]]:
    """The rows of all tasks that have ended, each a line of a file as soon as it ends; runs only
    what is missing.

    ``function`` takes a task and returns its row, ``task_of`` tells a row's task. A row with an
    "error" is run again.
    """
    wanted = list(tasks)
    known = {task_of(row) for row in read_rows(path, task_of) if "error" not in row}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if file.tell() else "")  # what was killed may have left half a line
        for row in in_processes(
            function, [task for task in wanted if task not in known], workers, minutes
        ):
            file.write(json.dumps(row) + "\n")
            file.flush()
    asked = set(wanted)
    return [row for row in read_rows(path, task_of) if task_of(row) in asked]


def read_rows(path: Path, task_of: Callable[[dict[str, Any]], Hashable]) -> list[dict[str, Any]]:
    """The rows of a file, the last of each task."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return list({task_of(row): row for row in rows}.values())


def report(
    title: str, described: Mapping[str, Any], table: list[dict[str, Any]], path: Path | None
) -> None:
    """Print the table; with a path, write it as JSON."""
    print(f"\n{title}\n" + ", ".join(f"{key}: {value}" for key, value in described.items()))
    columns = list(dict.fromkeys(key for row in table for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"title": title, "setting": dict(described), "rows": table}, indent=1) + "\n"
        )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
