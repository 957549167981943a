"""Help texts, completion and names: what is answered before anything heavy is imported."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from lambdahat.cli.app import app

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "plotly", "networkx", "pandas", "joblib", "rich")
# runs each command, with the environment that a shell would give it, and says what it answered
SCRIPT = f"""
import contextlib, io, json, os, sys
from lambdahat.cli import main
answers = []
for arguments, environment in json.loads(sys.argv[1]):
    sys.argv = ["lambdahat", *arguments]
    printed, told, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        before = dict(os.environ)
        os.environ |= environment
        try:
            main()
        except SystemExit as end:
            code = end.code
        os.environ.clear()
        os.environ |= before
    heavy = sorted(set({HEAVY!r}) & set(sys.modules))
    answers.append([code, printed.getvalue(), told.getvalue(), heavy])
print(json.dumps(answers))
"""


def answers(*commands):
    """Exit code, both outputs and the heavy modules loaded after each command, in one process."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def every_command():
    def below(command, path):
        yield path
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, (*path, name))

    return list(below(typer.main.get_command(app), ()))


@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_help_fits_a_screen(path):
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= 80
    assert not any(word in result.stdout for word in ("<bool>", "<", "...\n", "None"))
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    for param in command.params:
        if not param.hidden:
            assert param.help
            assert all(f" {option}" in result.stdout for option in param.opts if option[0] == "-")


def test_the_first_help_has_every_command_and_the_exit_codes():
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    assert all(f"  {name} " in told for name in typer.main.get_command(app).commands)
    for code in (0, 1, 2, 3, 4, 130, 141):
        assert str(code) in told.split()


QUICK = [
    (["--version"], 0, ""),
    (["--help"], 0, ""),
    (["train", "--help"], 0, ""),
    (["mesure"], 2, "Did you mean 'measure'?"),
    (["measure", "a:b", "--wath", "trace"], 2, "--what"),
    (["measure", "a:b", "--what", "trase"], 2, "did you mean 'trace'?"),
    (["train", "--model", "mpl", "--data", "digits"], 2, "did you mean 'mlp'?"),
    (["train", "--model", "mlp", "--data", "digit"], 2, "did you mean 'digits'?"),
    (
        ["train", "--model", "mlp", "--data", "digits", "--optimizer", "adma"],
        2,
        "did you mean 'adam'?",
    ),
    (["reproduce", "ngd-digit"], 2, "did you mean 'ngd-digits'?; --list describes them"),
    (["data", "fetch", "mnst"], 2, "did you mean 'mnist'?"),
]


def test_names_and_help_are_answered_without_torch():
    found = answers(*((arguments, {}) for arguments, _, _ in QUICK))
    for (arguments, code, message), (ended, printed, told, heavy) in zip(QUICK, found, strict=True):
        assert ended == code, (arguments, told)
        assert bool(printed) == (code == 0)
        assert message in " ".join(told.split())
        assert heavy == []


REGISTERED = """
import importlib
from lambdahat.cli.options import REGISTRIES, names_in_source
for kind, (module, registry, *_) in REGISTRIES.items():
    known = getattr(importlib.import_module(f"lambdahat.{module}"), registry)
    assert sorted(known) == sorted(names_in_source(kind)), kind
"""


def test_names_in_the_source_are_those_of_the_registries():
    subprocess.run([sys.executable, "-c", REGISTERED], check=True)


COMPLETIONS = [
    ("", "measure"),
    ("mea", "measure"),
    ("data ", "fetch"),
    ("train --mo", "--model"),
    ("train --model ml", "mlp"),
    ("train --model mlp --data dig", "digits"),
    ("train --optimizer n", "ngd"),
    ("train --schedule co", "cosine"),
    ("train --track trace,l", "trace,llc"),
    ("reproduce ngd-di", "ngd-digits"),
    ("measure a:b --what tr", "trace"),
    ("measure a:b --what trace,sp", "trace,spectrum"),
    ("measure a:b --curvature g", "ggn"),
    ("measure a:b --kernel sgl", "sgld"),
    ("init --kind t", "transformers"),
    ("graph fit --model er", "erdos_renyi"),
    ("data fetch mn", "mnist"),
]


@pytest.mark.parametrize(("line", "word"), COMPLETIONS)
def test_completion(line, word, monkeypatch):
    """What the shell's script asks, in this process; the next test asks for it as shells do."""
    words = f"lambdahat {line}".split(" ")
    monkeypatch.setenv("_LAMBDAHAT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(words))
    result = CliRunner().invoke(app, [], prog_name="lambdahat")
    assert word in result.stdout.split()


def test_shells_complete_without_torch():
    def asked(shell):
        return {
            "_LAMBDAHAT_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": "lambdahat\ntrain\n--model\nml",
            "COMP_CWORD": "3",
            "_TYPER_COMPLETE_ARGS": "lambdahat train --model ml",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": "ml",
        }

    for code, printed, _, heavy in answers(*(([], asked(s)) for s in ("bash", "zsh", "fish"))):
        assert code == 0
        assert "mlp" in printed
        assert set(heavy) <= {"rich"}


def test_completion_scripts_can_be_shown():
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = [(["--show-completion", shell], named) for shell in ("bash", "zsh", "fish")]
    for code, printed, told, _ in answers(*shown):
        assert code == 0, told
        assert "_LAMBDAHAT_COMPLETE" in printed
