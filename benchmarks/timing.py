"""Timing for all benchmarks: one process, interleaved repeats, medians, and ratios to one gradient over the data."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

GRADIENT = "one gradient"
PATIENCE = 4.0


def arguments(question: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's CPU threads")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, its times mean nothing")
    parser.add_argument("--batch-size", type=int, default=512)
    return parser


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """Applies the threads and describes the machine and precision; every benchmark prints this first."""
    torch.set_num_threads(args.threads)
    chip = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "CPU"
    described = {"device": f"{args.device} ({chip})", "threads": args.threads, "torch": torch.__version__}
    return described | {"precision": precision(args.device), "batch size": args.batch_size, "quick": args.quick}


def precision(device: str) -> str:
    if not device.startswith("cuda"):
        return "float32"
    used = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return {(False, False): "strict float32", (True, True): "TF32"}.get(used, f"mixed: matmul, cudnn TF32 = {used}")


def set_tf32(allowed: bool) -> None:
    """cuDNN allows TF32 by default, so strict float32 must be asked for."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds(task: Callable[[], Any], number: int = 1) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(number):
        task()
    synchronize()
    return (time.perf_counter() - start) / number


def compare(tasks: Mapping[str, Callable[[], Any]], repeats: int, sample_s: float = 0.05) -> dict[str, float]:
    """Median seconds per call. Each round runs every task once, so that drift of the machine falls on all alike.

    The first call warms up; a second, of short tasks, sets how many calls fill a sample of ``sample_s``. A first call
    of more than ``PATIENCE`` seconds is the only sample of its task. A task that raises is left out, with the reason
    printed.
    """
    numbers: dict[str, int] = {}
    once: dict[str, float] = {}
    for name, task in tasks.items():
        try:
            first = seconds(task)
            if first > PATIENCE:
                once[name] = first
                continue
            numbers[name] = 1 if first > 2 else max(1, math.ceil(sample_s / seconds(task)))
        except Exception as error:  # a peer may break in any way
            print(f"{name}: skipped, {type(error).__name__}: {error}")
    samples: dict[str, list[float]] = {name: [] for name in numbers}
    for _ in range(repeats):
        for name, number in numbers.items():
            samples[name].append(seconds(tasks[name], number))
    return {
        name: statistics.median(samples[name]) if name in samples else once[name]
        for name in tasks
        if name in samples or name in once
    }


def rows(case: str, work: str, times: Mapping[str, float], **extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per task with its ratio to the gradient; ``extra`` maps a column to values by task."""
    unit = times[GRADIENT]
    return [
        {"case": case, "work": work, "by": name, "ms": 1e3 * t, "gradients": t / unit}
        | {column: values[name] for column, values in extra.items() if name in values}
        for name, t in times.items()
    ]


def report(title: str, described: Mapping[str, Any], table: list[dict[str, Any]], path: Path | None) -> None:
    """Print the table; with a path, write it as JSON."""
    print(f"\n{title}\n" + ", ".join(f"{key}: {value}" for key, value in described.items()))
    columns = list(dict.fromkeys(key for row in table for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"title": title, "setting": dict(described), "rows": table}, indent=1) + "\n")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
