"""The command ``lambdahat``. Only here is anything printed."""

from __future__ import annotations


def main() -> None:
    """Run the command with the arguments of the process."""
    from lambdahat.cli.app import app

    app(prog_name="lambdahat")
