"""Options for prompts that commands share, and how a command reads them: a CSV file, a sentence, or token ids."""

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import choice

if TYPE_CHECKING:
    import pandas as pd

    from tlspectral.tasks import Task

ReadyTask = Annotated[
    str | None,
    choice("--task", ("induction", "language"), "Repeated random tokens (the default), or packaged text."),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE.csv",
        help="Columns prompt, correct and wrong; answers are one token each, such as ' Mary'. With a column "
        "counterfactual, an output is replaced by the output on that prompt.",
    ),
]
_IDS = re.compile(r"\s*\d+(\s*,\s*\d+)*\s*")
_EXAMPLE = "token ids, such as 5,6,7"


def require_one_task(prompts: Path | None, task: str | None) -> None:
    """Raise typer's BadParameter if both --prompts and --task are given."""
    if prompts is not None and task is not None:
        raise typer.BadParameter("--prompts is a task of its own: give only one of them", param_hint="--task")


def read_prompt(model: Any, text: str) -> Any:
    """Return the prompt that the user wrote as `text`: the text itself or, for a model without a tokenizer, its token
    ids "5,6,7" as a tensor [pos].

    Raises ValueError if such a model gets other text.
    """
    return text if getattr(model, "tokenizer", None) is not None else _ids_of(text)


def _ids_of(text: str) -> Any:
    """Return the token ids in a text such as "5,6,7" as a tensor [pos]. Raises ValueError for other text."""
    if not _IDS.fullmatch(text):
        raise ValueError(f"this model has no tokenizer, so it cannot read the text {text!r:.60}: give {_EXAMPLE}")
    import torch

    return torch.tensor([int(token) for token in text.split(",")])


def _read_csv(path: Path, needed: Sequence[str], places: Sequence[str]) -> "pd.DataFrame":
    """Return the cells of a CSV file as text, after a check that the file has the columns `needed` and `places` and at
    least one row. `places` are columns that the user named.
    """
    import pandas as pd

    from tlspectral.models.running.text import file_text
    from tlspectral.tables.schema import require

    columns = ", ".join([*needed, *places])
    try:
        frame = pd.read_csv(StringIO(file_text(path), newline=None), dtype=str, keep_default_na=False)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise ValueError(
            f"{path} cannot be read as CSV ({' '.join(str(error).split())}): write a first line with the columns "
            f"{' and '.join(columns.rsplit(', ', 1))}, as many cells in each line, and closed quotes"
        ) from error
    require(frame, needed, f"a row per prompt, with the columns {columns}", name=f"table in {path}", named=places)
    for name in (*needed, *places, "counterfactual"):
        if name in frame and "" in (cells := frame[name].tolist()):
            raise ValueError(f"{path}, row {cells.index('') + 1}: {name} is empty, fill it in or remove the row")
    return frame


def prompts_of_file(path: Path, model: Any) -> list[Any]:
    """Return the column prompt of a CSV file as a list of texts, or of lists of token ids for a model without a
    tokenizer.
    """
    texts = _read_csv(path, ["prompt"], ())["prompt"].tolist()
    return texts if getattr(model, "tokenizer", None) is not None else [_ids_of(text).tolist() for text in texts]


def task_of_file(path: Path, places: Sequence[str] = (), model: Any = None) -> "Task":
    """Return the `Task` of a CSV file with the columns prompt, correct and wrong (and counterfactual, if present): its
    metric is the logit of the correct minus the wrong answer.

    `places` are further columns, which hold a token number per prompt. For a `model` without a tokenizer, cells are
    token ids, such as 5,6,7; without a model they are text. Raises ValueError for a file that cannot be read, and for
    missing, empty or misspelt columns.
    """
    from tlspectral.errors import did_you_mean
    from tlspectral.tasks import logit_difference

    answers = ["prompt", "correct", "wrong"]
    frame = _read_csv(path, answers, places)
    known = (*answers, *places, "counterfactual")
    for name in frame:
        if name not in known and (suggestion := did_you_mean(str(name), known)):
            raise ValueError(f"{path} has a column {name!r}, which has no meaning here{suggestion}")
    columns: dict[str, list[Any]] = {name: frame[name].tolist() for name in known if name in frame}
    for name in places:
        wrong = [cell for cell in columns[name] if not re.fullmatch(r"-?\d+", cell)]
        if wrong:
            raise ValueError(f"{path}: column {name} has {wrong[0]!r}; give the number of a token in each prompt")
    if model is not None and getattr(model, "tokenizer", None) is None:
        for name in {"prompt", "correct", "wrong", "counterfactual"} & set(columns):
            ids = [_ids_of(cell).tolist() for cell in columns[name]]
            columns[name] = [tokens[0] for tokens in ids] if name in ("correct", "wrong") else ids
    return logit_difference(
        columns["prompt"],
        columns["correct"],
        columns["wrong"],
        counterfactual=columns.get("counterfactual"),
        positions={name: [int(cell) for cell in columns[name]] for name in places},
    )
