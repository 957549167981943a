"""The command ``lambdahat``. Only here is anything printed."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command with the arguments of the process, with the other ranks of ``torchrun``."""
    from lambdahat.cli.app import app
    from lambdahat.cli.exits import unread_output

    with unread_output():
        if "RANK" not in os.environ:
            app(prog_name="lambdahat")
            return
        from lambdahat.cli.exits import of_torchrun

        with of_torchrun(sys.argv[1:]):
            app(prog_name="lambdahat")
