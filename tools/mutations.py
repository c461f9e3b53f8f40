"""Small mistakes to be put into the code, one at a time, and the draw of some of them from all files of the core."""

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

_SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Pow: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Place:
    """One place of a module that can be changed.

    Attributes:
        line: where the change is.
        first, last: lines of the statement around it, of a compound statement those of its head.
        change: what is changed, in words.
        in_function: whether it runs when a function is called, and not when the module is imported.
        apply: makes the change in the syntax tree that the place was found in.
    """

    line: int
    first: int
    last: int
    change: str
    in_function: bool
    apply: Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """A place of a file of the core, by its number in the file."""

    file: str
    number: int
    place: Place


def core_files(tree: Path) -> dict[str, int]:
    """Lines of each file of the core, by its path in the source tree."""
    return {
        path.relative_to(tree).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted((tree / "tlspectral").rglob("*.py"))
    }


def room_of(file: str) -> str:
    """The room that a file of the core belongs to: a module or a package of `tlspectral`."""
    return file.split("/")[1].removesuffix(".py")


def drawn(tree: Path, seed: int) -> Iterator[Mutant]:
    """Mutants without end: a file in proportion to its lines, one of its places uniformly, none twice."""
    lines = core_files(tree)
    found = {file: places(parsed(tree, file)) for file in lines}
    files = [file for file in lines if found[file]]
    weights = [lines[file] for file in files]
    chance, seen, total = random.Random(f"mutants {seed}"), set(), sum(map(len, found.values()))
    while len(seen) < total:
        (file,) = chance.choices(files, weights)
        number = chance.randrange(len(found[file]))
        if (file, number) not in seen:
            seen.add((file, number))
            yield Mutant(file, number, found[file][number])


def first_drawn(tree: Path, seed: int, count: int) -> list[Mutant]:
    """The first so many mutants of a seed."""
    return list(islice(drawn(tree, seed), count))


def parsed(tree: Path, file: str) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse((tree / file).read_text(encoding="utf-8"))


def mutated(tree: Path, file: str, number: int | None) -> str:
    """Source of a file with one change, or with none, written by `ast.unparse` in both cases."""
    module = parsed(tree, file)
    if number is not None:
        places(module)[number].apply()
    return ast.unparse(ast.fix_missing_locations(module))


def places(module: ast.Module) -> list[Place]:
    """All places of a module that can be changed, in the order of its syntax tree."""
    found: list[Place] = []
    _visit(module, module.body[0] if module.body else module, None, found)
    return found


def _visit(node: ast.AST, statement: ast.AST, function: ast.AST | None, found: list[Place]) -> None:
    """Find the places below a node. Annotations, messages and imports for type checkers are left alone."""
    if isinstance(node, ast.stmt):
        statement = node
    line: int = getattr(node, "lineno", 0)

    def place(change: str, apply: Callable[[], None], at: Any = None) -> None:
        around = statement if at is None else at
        last = around.body[0].lineno - 1 if getattr(around, "body", None) else around.end_lineno
        spot = line if at is None else at.lineno
        found.append(Place(spot, around.lineno, max(last, around.lineno), change, function is not None, apply))

    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        place(_named(node.op), lambda: setattr(node, "op", _SWAPPED[type(node.op)]()))
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        place(_named(node.ops[0]), lambda: node.ops.__setitem__(0, _SWAPPED[type(node.ops[0])]()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        place("sign dropped", lambda: setattr(node, "op", ast.UAdd()))
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        other = _other(node.value)
        place(f"{node.value} -> {other}", lambda: setattr(node, "value", other))
    if isinstance(node, _FUNCTIONS):
        function = node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.Raise | ast.JoinedStr) or _for_types(node, name):
            continue
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, ast.stmt) and isinstance(value, list):
                for change, new in _instead(one, index, value, function):
                    place(change, lambda at=index, new=new, body=value: body.__setitem__(at, new), one)
            if isinstance(one, ast.AST):
                _visit(one, statement, function, found)


def _for_types(node: ast.AST, field: str) -> bool:
    """Whether a field is the body of `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and field == "body" and getattr(node.test, "id", "") == "TYPE_CHECKING"


def _instead(one: ast.stmt, index: int, body: list[ast.stmt], function: Any) -> Iterator[tuple[str, ast.stmt]]:
    """Statements that may stand in place of one: nothing, or another return."""
    nothing = ast.copy_location(ast.Pass(), one)
    if isinstance(one, ast.Raise):
        yield "raise dropped", nothing
    elif isinstance(one, ast.Return) and one.value is not None:
        if (other := _other_value(one, function)) is not None:
            yield "returns swapped", ast.copy_location(ast.Return(other), one)
    elif _can_go(one, index, function):
        yield "statement deleted", nothing


def _other_value(one: ast.Return, function: Any) -> ast.expr | None:
    """The first two values of a returned tuple exchanged, or what the function returns elsewhere."""
    value: Any = one.value
    if isinstance(value, ast.Tuple) and len(value.elts) > 1 and ast.dump(value.elts[0]) != ast.dump(value.elts[1]):
        return ast.Tuple([value.elts[1], value.elts[0], *value.elts[2:]], ast.Load())
    others = [node.value for node in _own(function) if isinstance(node, ast.Return) and node.value is not None]
    return next((other for other in others if ast.dump(other) != ast.dump(value)), None)


def _can_go(one: ast.stmt, index: int, function: Any) -> bool:
    """Whether a statement can be deleted and what is left may still run."""
    if isinstance(one, ast.Expr):
        return not isinstance(one.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
        return function is not None and _bound_before(one.targets[0].id, one.lineno, function)
    if isinstance(one, ast.Assign):
        return isinstance(one.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(one, ast.AugAssign | ast.Continue | ast.Break | ast.Delete | ast.Return)


def _bound_before(name: str, line: int, function: Any) -> bool:
    """Whether a name is an argument of a function or is given a value above a line of it."""
    arguments = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    stored = (node for node in _own(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return name in arguments or any(node.id == name and node.lineno < line for node in stored)


def _own(function: Any) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    if function is None or isinstance(function, ast.Lambda):
        return
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            waiting[:0] = list(ast.iter_child_nodes(node))


def _named(operator: ast.AST) -> str:
    return f"{type(operator).__name__} -> {_SWAPPED[type(operator)].__name__}"


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 + (value == 0)
