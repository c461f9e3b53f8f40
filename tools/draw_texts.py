"""Draw texts of the project for a reader who has not seen the code: docstrings, error messages and pages.

`python tools/draw_texts.py COMMIT --output FOLDER` reads the sources of a commit and draws 20 public docstrings, 20
private ones, 10 error messages and 5 pages, seeded by the commit's hash (`--seed` for another draw). FOLDER gets a file
for each text, without any code but the signature, and `questions.md` with the questions that the reader answers. A
second person, who has the code, then judges the answers. CONTRIBUTING says when to do this.
"""

import argparse
import ast
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SIZES = {"public docstring": 20, "private docstring": 20, "error message": 10, "page": 5}
QUESTIONS = {
    "public docstring": (
        "What do you give to it?",
        "What do you get back (type, shape or columns, unit)?",
        "What does the result not show? (Where the result is not a measurement: when does the call fail?)",
        "What would you type to use it?",
    ),
    "private docstring": ("What goes in?", "What comes out, or what has changed afterwards?"),
    "error message": ("What was given, and what is wrong with it?", "What should the user type or do instead?"),
    "page": (
        "Which question does the page answer?",
        "What do you type?",
        "What comes out?",
        "What do its numbers not show, or when should you not use them?",
    ),
}
"""The questions to each kind of text. An answer is right if all of its parts are."""
RULES = """You know machine learning and mechanistic interpretability. You have not seen this package or its code, and
you do not look at them. Read each text once, in its file, and answer at once. Do not go back. Write "?" where the text
does not tell you; a wrong guess counts as much as a "?". An answer has one or two sentences for each question.
"""
_GLOBAL = re.compile(r"^__all__\b")


@dataclass(frozen=True)
class Text:
    """A text to read: its kind (a key of `SIZES`), where it stands ("path:line name"), and the text itself."""

    kind: str
    place: str
    text: str


def file_at(commit: str, path: str) -> str:
    """Return the content of a file at a commit."""
    return subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True).stdout


def paths_at(commit: str, folder: str, suffix: str) -> list[str]:
    """Return the sorted paths of the files of a folder at a commit that end in `suffix`."""
    command = ["git", "ls-tree", "-r", "--name-only", commit, "--", folder]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(name for name in names if name.endswith(suffix))


def every_text(commit: str) -> Iterator[Text]:
    """Yield each docstring and error message of the core at a commit, and each page of `docs`."""
    sources = {path: ast.parse(file_at(commit, path)) for path in paths_at(commit, "tlspectral", ".py")}
    exported = {
        str(Path(path).parent): _exported(tree) for path, tree in sources.items() if path.endswith("__init__.py")
    }
    for path, tree in sources.items():
        public = {name for folder in map(str, Path(path).parents) for name in exported.get(folder, ())}
        yield from _docstrings(path, tree, public, "")
        yield from _messages(path, tree)
    for path in paths_at(commit, "docs", ".md"):
        if not path.startswith("docs/site/"):
            yield Text("page", path, file_at(commit, path))


def _exported(tree: ast.Module) -> set[str]:
    """Return the names in `__all__` of a module, whether it is a list or the keys of lazy imports."""
    names: set[str] = set()
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(_GLOBAL.match(ast.unparse(target)) for target in targets) and node.value is not None:
            names |= {
                one.value
                for one in ast.walk(node.value)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return names


def _docstrings(path: str, node: ast.AST, public: set[str], owner: str) -> Iterator[Text]:
    """Yield the docstrings of functions, classes and methods below a node, each behind its signature."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        if docstring := ast.get_docstring(child):
            exported = child.name in public and not owner
            kind = "public docstring" if exported else "private docstring"
            yield Text(kind, f"{path}:{child.lineno} {owner}{child.name}", f"{_signature(child, owner)}\n\n{docstring}")
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(path, child, public, f"{child.name}.")


def _signature(node: ast.FunctionDef | ast.ClassDef, owner: str = "") -> str:
    """Return a function's signature, or a class's name with its annotated fields or the arguments of its `__init__`.

    `owner`: the name of a method's class with a dot, which stands before its name.
    """
    if isinstance(node, ast.FunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        return f"{'@property ' * is_property}def {owner}{node.name}({ast.unparse(node.args)}){result}"
    lines = [f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"]
    for child in node.body:
        if isinstance(child, ast.AnnAssign):
            lines.append(f"    {ast.unparse(child)}")
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            lines.append(f"    {_signature(child)}")
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and len(lines) > 1:
            lines.append(f'    """{child.value.value}"""')
    return "\n".join(lines)


def _messages(path: str, tree: ast.Module) -> Iterator[Text]:
    """Yield the messages of `raise` statements with five words or more, expressions in braces as in the source."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        message = " ".join(_words(argument) for argument in node.exc.args)
        if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"{[^{}]*}", "", message))) >= 5:
            yield Text("error message", f"{path}:{node.lineno}", f"{ast.unparse(node.exc.func)}: {message}")


def _words(node: ast.AST) -> str:
    """Return the text of a string expression, with `{expression}` for what is filled in when it is raised."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return "{" + ast.unparse(node) + "}"


def draw(texts: list[Text], seed: int) -> list[Text]:
    """Return `SIZES` texts of each kind, drawn without replacement."""
    generator = random.Random(seed)
    drawn: list[Text] = []
    for kind, size in SIZES.items():
        of_kind = sorted((text for text in texts if text.kind == kind), key=lambda text: text.place)
        drawn += generator.sample(of_kind, size)
    return drawn


def main() -> None:
    """Write the drawn texts and the questions into a folder, and print where the texts stand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, help="default: the commit's hash")
    given = parser.parse_args()
    command = ["git", "rev-parse", given.commit]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    seed = int(commit, 16) if given.seed is None else given.seed
    drawn = draw(list(every_text(commit)), seed)
    given.output.mkdir(parents=True)
    lines = [RULES]
    for kind, questions in QUESTIONS.items():
        numbers = [number for number, text in enumerate(drawn, 1) if text.kind == kind]
        lines += [f"**{kind}** ({numbers[0]:02} to {numbers[-1]:02})", *(f"* {question}" for question in questions), ""]
    (given.output / "questions.md").write_text("\n".join(lines), encoding="utf-8")
    for number, text in enumerate(drawn, 1):
        (given.output / f"{number:02}.md").write_text(f"{text.text}\n", encoding="utf-8")
        print(f"{number:02} {text.kind}: {text.place}")


if __name__ == "__main__":
    main()
