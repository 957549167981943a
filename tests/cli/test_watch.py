"""``lambdahat watch``: its address, its errors, and its end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from functools import partial

from typer.testing import CliRunner

from lambdahat.cli.app import app
from lambdahat.training.history import Metrics


def watch(*arguments):
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


def test_a_missing_folder_and_a_port_in_use_are_errors_of_one_line(tmp_path):
    missing = watch(tmp_path / "missing", "--no-open")
    assert missing.exit_code == 2
    assert "FOLDER must be an existing folder" in missing.stderr
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = watch(tmp_path, "--port", port, "--no-open")
    assert taken.exit_code == 2
    assert f"--port must be free, got {port}, which is in use" in taken.stderr
    foreign = watch(tmp_path, "--host", "203.0.113.7", "--no-open")
    assert foreign.exit_code == 2
    assert "--host must be an address of this machine" in foreign.stderr
    for result in (missing, taken, foreign):
        assert result.stderr.count("\n") == 1


def test_it_prints_its_address_once_serves_and_ends_with_an_interrupt(tmp_path):
    Metrics(tmp_path / "run").add({"kind": "epoch", "epoch": 1, "step": 1, "progress": 1.0})
    command = [sys.executable, "-m", "lambdahat", "watch", str(tmp_path), "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BROWSER": "false"},
        # a shell's background jobs ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    try:
        line = process.stdout.readline()
        url = re.fullmatch(r"watching .*: (http://127\.0\.0\.1:\d+/[\w-]{20,}/)\n", line)[1]
        with urllib.request.urlopen(f"{url}state", timeout=30) as answer:
            (source,) = json.loads(answer.read())["sources"]
        assert source["name"] == "run"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out, errors) == (0, "", "stopped\n")
    finally:
        process.kill()
        process.communicate()
