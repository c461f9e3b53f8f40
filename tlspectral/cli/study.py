"""`tlspectral study`: commands of the studies of three papers, loaded only when one of them is called."""

from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

import typer.main
from typer.core import TyperGroup

from tlspectral.cli.app import app

_GROUP = "tlspectral.studies"
"""Group of entry points of studies. Each entry point is a typer application, whose commands are added here."""


class _StudyCommands(TyperGroup):
    """The click group of the commands of all installed studies, in the order in which their packages list them.
    Raises typer's BadParameter if no study is installed.
    """

    @cached_property
    def _mounted(self) -> dict[str, Any]:
        groups = [study.load() for study in entry_points(group=_GROUP)]
        if not groups:
            raise typer.BadParameter("no study is installed: in a clone of the repository, pip install ./studies")
        return {name: command for group in groups for name, command in typer.main.get_group(group).commands.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._mounted)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._mounted.get(cmd_name)


study = typer.Typer(cls=_StudyCommands, no_args_is_help=True, rich_markup_mode=None)


@study.callback(short_help="published numbers, trained models: the three papers")
def _about() -> None:
    """Run a study of one of three papers: compute published numbers again, train models from scratch, draw the figures.

    Without a command this prints the list of studies. tlspectral study COMMAND --help says what a study writes.
    """


app.add_typer(study, name="study")
