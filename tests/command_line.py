"""Commands as a user runs them, in this process."""

from typer.testing import CliRunner

from tlspectral.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments):
    """A command that succeeds."""
    ended = run(*arguments)
    assert ended.exit_code == 0, ended.output
    return ended


def refusal(*arguments):
    """What a command says that is refused and prints nothing else, in one line."""
    ended = run(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, ""), ended.output
    return " ".join(ended.stderr.split())
