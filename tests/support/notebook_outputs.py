"""Compare what a run of the notebooks prints with what they store, or store it.

`python tests/support/notebook_outputs.py HOW FOLDER` takes executed copies of the notebooks from FOLDER:

* `compare`: `make notebooks`. Words are equal, numbers within a tolerance, and every picture is there.
* `columns`: `make notebooks-short`, whose numbers are of fewer draws. Each cell has outputs of the same kinds, and its
  tables the same columns.
* `store`: `make notebooks-with-outputs`. Outputs of the copies replace those that are stored.

What goes to stderr, progress bars among it, is in none of them. Seconds and versions of packages are not compared
(`LEFT_OUT`), nor numbers of cells with the tag "numbers-vary": rounding grows while a model is trained, so that another
processor ends elsewhere.
"""

import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# A word that begins or ends with a digit, such as L16H0 or 2.13.0, is no number.
NUMBER = re.compile(r"(?<![\w.])[-+\N{MINUS SIGN}]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\d)")
LEFT_OUT = re.compile(
    r"[\d.]+ CPU seconds"
    r"|'train_(?:runtime|samples_per_second|steps_per_second)': '[\d.]+'"
    r"|'[\w-]+': '\d+\.\d+\.\d+[^']*'"  # a package and its version
)
VARY = "numbers-vary"
# Two runs on one processor print the same to the digit. With two threads and without vector instructions (01, 04, 05,
# 06), rounded numbers moved by one in the last place, those printed in full by 3e-6 of their size; a rank correlation
# moves by 1e-4 where two of fifty change places. Detectors that stopped after 25 of 40 sequences moved by 6e-3: seen.
RELATIVE = 1e-3
# What is printed to show that it is rounding, 1e-7 to 1.3e-5, is another number each time. An effect of 1e-4 is seen.
ABSOLUTE = 2e-5


def differences(stored: Any, fresh: Any, name: str, *, columns: bool = False) -> list[str]:
    """Return a text for each code cell whose outputs differ: notebook, cell, and the first line that does.

    Cells are those of `stored`; one of `fresh` that is not among them is passed over.

    Args:
        stored: the notebook as it is kept.
        fresh: an executed copy.
        name: of the notebook, for the texts.
        columns: whether kinds of outputs and columns of tables are compared, in place of lines.
    """
    run = {cell["id"]: cell for cell in fresh["cells"]}
    found = []
    for number, cell in enumerate((one for one in stored["cells"] if one["cell_type"] == "code"), 1):
        again = run.get(cell["id"])
        if again is None or (not columns and again["source"] != cell["source"]):
            found.append(f"{name}, code cell {number}: the copy that was run has other code; run it again")
            continue
        shown = _columns if columns else _lines
        pairs = zip_longest(shown(cell["outputs"]), shown(again["outputs"]), fillvalue="(nothing)")
        vary = VARY in cell["metadata"].get("tags", [])
        apart = [(kept, now) for kept, now in pairs if kept != now and (columns or not same_line(kept, now, vary))]
        if apart:
            more = f"\n  and {len(apart) - 1} more lines" if len(apart) > 1 else ""
            found.append(f"{name}, code cell {number}:\n  stored: {apart[0][0]}\n  now:    {apart[0][1]}{more}")
    return found


def same_line(stored: str, fresh: str, vary: bool = False) -> bool:
    """Whether two lines have the same words and nearly the same numbers, any with `vary`. Blanks do not count."""
    first, second = (LEFT_OUT.sub("(left out)", line) for line in (stored, fresh))
    words = ["".join(NUMBER.sub("0", line).split()) for line in (first, second)]
    numbers = zip(NUMBER.findall(first), NUMBER.findall(second), strict=False)
    return words[0] == words[1] and (vary or all(_same_number(*pair) for pair in numbers))


def _same_number(first: str, second: str) -> bool:
    """Whether two numbers are equal but for rounding. Whole numbers, which are counts and names, have to be equal."""
    places = [_last_place(text) for text in (first, second)]
    if None in places:
        return first == second
    a, b = (float(text.replace("\N{MINUS SIGN}", "-")) for text in (first, second))
    return abs(a - b) <= max(1.01 * max(places), RELATIVE * max(abs(a), abs(b)), ABSOLUTE)


def _last_place(number: str) -> float | None:
    """Return what one more in the last printed digit is, None of a whole number."""
    digits, _, exponent = number.partition("e")
    if "." not in digits and not exponent:
        return None
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def _joined(outputs: list[Any]) -> list[Any]:
    """Return outputs with the parts of a stream in one, which a kernel sends as they come."""
    whole: list[Any] = []
    for output in outputs:
        if whole and output["output_type"] == "stream" and output["name"] == whole[-1].get("name"):
            whole[-1]["text"] += output["text"]
        else:
            whole.append(nbformat.from_dict(output))
    return whole


def _kind(output: Any) -> str:
    return output["name"] if output["output_type"] == "stream" else ", ".join(sorted(output.get("data", {"error": ""})))


def _lines(outputs: list[Any]) -> list[str]:
    """Return the kind and the lines of every output; of tables and pictures the lines of their text."""
    lines = []
    for output in _joined([one for one in outputs if one.get("name") != "stderr"]):
        text = output["text"] if output["output_type"] == "stream" else output.get("data", {}).get("text/plain", "")
        lines += [f"[{_kind(output)}]", *(line.strip() for line in text.splitlines() if line.strip())]
    return lines


def _columns(outputs: list[Any]) -> list[str]:
    """Return the kind of every output, of a table with its columns that are no numbers, any digit of a head as 0."""
    found = []
    for output in _joined([one for one in outputs if one.get("name") != "stderr"]):
        head = re.search(r"<thead>(.*?)</thead>", output.get("data", {}).get("text/html", ""), flags=re.DOTALL)
        names = re.findall(r"<th[^>]*>(.*?)</th>", head[1]) if head else []
        words = [re.sub(r"\d+", "0", name) for name in names if name and not NUMBER.fullmatch(name)]
        found.append(f"[{_kind(output)}] {', '.join(words)}".rstrip())
    return found


def store(stored: Any, fresh: Any) -> None:
    """Put outputs of an executed copy into a notebook, without the times at which cells ran."""
    run = {cell["id"]: cell for cell in fresh["cells"]}
    for cell in stored["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["outputs"] = _joined(run[cell["id"]]["outputs"])
            cell["execution_count"] = run[cell["id"]]["execution_count"]


if __name__ == "__main__":
    how, folder = sys.argv[1], Path(sys.argv[2])
    found = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        stored, fresh = (nbformat.read(one, as_version=4) for one in (path, folder / path.name))
        if how == "store":
            store(stored, fresh)
            nbformat.write(stored, path)
        else:
            found += differences(stored, fresh, path.name, columns=how == "columns")
    sys.exit("\n".join([*found, "If the new outputs are right: make notebooks-with-outputs"]) if found else 0)
