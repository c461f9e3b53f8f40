"""Mutation sample: small mistakes put into the arithmetic, one at a time, and the tests that have to notice them.

    python benchmarks/mutants.py -o out/mutants.csv

A mutant swaps an operator, a comparison, a sign or a small constant in one place of a file. It is caught if the tests
of that file fail. The mutants are drawn with a fixed seed from all places of a file, so that two versions of the tests
meet the same mutants as long as the file computes the same. Annotations and messages are left alone. A mutant may
compute the same function as the original; those that survive have to be read.
"""

import argparse
import ast
import csv
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("MUTANTS_ROOT", Path(__file__).parents[1]))
TESTS = {
    "spectra": ["test_spectra_*"],
    "nulls": ["test_nulls"],
    "rotary": ["test_rotary"],
    "hooks.parts": ["test_hook_parts", "test_hook_operators"],
    "operators.verification": ["test_verification"],
    "positional.scores": ["test_positional_scores", "test_positional_keys"],
}
_LIMIT = 400  # CPU seconds; a mutant that takes more is caught
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


def mutations(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Line, description and the change, for every place of a module that can be changed."""
    left_alone = {id(inner) for node in ast.walk(tree) for part in _texts(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in left_alone:
            continue
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
            yield node.lineno, _change(node.op), _swap(node, "op")
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
            yield node.lineno, _change(node.ops[0]), _swap(node, "ops")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node.lineno, "sign dropped", lambda node=node: setattr(node, "op", ast.UAdd())
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            other = _other(node.value)
            yield node.lineno, f"{node.value} -> {other}", lambda node=node, to=other: setattr(node, "value", to)


def _texts(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations and messages below a node."""
    for field in ("annotation", "returns"):
        if isinstance(part := getattr(node, field, None), ast.AST):
            yield part
    if isinstance(node, ast.Raise | ast.JoinedStr):
        yield node


def _change(operator: ast.AST) -> str:
    return f"{type(operator).__name__} -> {_SWAPPED[type(operator)].__name__}"


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 2 + (value == 0)


def _swap(node: Any, field: str) -> Callable[[], None]:
    def change() -> None:
        if field == "op":
            node.op = _SWAPPED[type(node.op)]()
        else:
            node.ops[0] = _SWAPPED[type(node.ops[0])]()

    return change


def _file(module: str) -> Path:
    return ROOT / "tlspectral" / f"{module.replace('.', '/')}.py"


def drawn(module: str, count: int, seed: int) -> list[tuple[int, int, str]]:
    """Number, line and description of the mutants of a module, in the order of its syntax tree."""
    found = [(line, said) for line, said, _ in mutations(ast.parse(_file(module).read_text(encoding="utf-8")))]
    numbers = sorted(random.Random(f"{seed} {module}").sample(range(len(found)), min(count, len(found))))
    return [(number, *found[number]) for number in numbers]


def run_tests(module: str, number: int | None) -> int:
    """Exit status of the tests of a module with one mutant in it, None for none; in a process of its own."""
    if number is not None:
        tree = ast.parse(_file(module).read_text(encoding="utf-8"))
        list(mutations(tree))[number][2]()
        _import_changed(_file(module), ast.unparse(ast.fix_missing_locations(tree)))
    import pytest

    tests = [str(path) for pattern in TESTS[module] for path in sorted(ROOT.glob(f"tests/{pattern}.py"))]
    return int(
        pytest.main(
            [
                "-x",
                "-q",
                "--no-header",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "-W",
                "ignore::pytest.PytestAssertRewriteWarning",
                *tests,
            ]
        )
    )


def _import_changed(file: Path, source: str) -> None:
    """Let a file be imported as another source, by whichever loader the tests use."""
    real = SourceFileLoader.get_data

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        if Path(self.path) != file:
            return real(self, path)
        if str(path).endswith(".pyc"):
            raise OSError("a mutant has no compiled file")
        return source.encode()

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]


def passes(module: str, number: int | None) -> bool:
    """Whether the tests pass, in a fork of this process."""
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        status = 1
        resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT, _LIMIT))
        try:
            sys.dont_write_bytecode = True
            status = run_tests(module, number)
        finally:
            os._exit(min(status, 1))
    _, status = os.waitpid(child, 0)
    return status == 0


def main() -> None:
    """Draw the mutants, run the tests of each, and print which survive."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--per-module", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.chdir(ROOT)
    # Loaded once, before the forks. Nothing of the package itself may be loaded here.
    import pandas  # noqa: F401
    import transformers  # noqa: F401
    from transformer_lens.model_bridge import sources  # noqa: F401

    asked = [(module, *mutant) for module in TESTS for mutant in drawn(module, options.per_module, options.seed)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for module, sound in zip(TESTS, pool.map(lambda module: passes(module, None), TESTS), strict=True):
            if not sound:
                raise SystemExit(f"the tests of {module} fail without a mutant")
        survived = list(pool.map(lambda mutant: passes(mutant[0], mutant[1]), asked))
    caught = Counter(module for (module, *_), alive in zip(asked, survived, strict=True) if not alive)
    for module in TESTS:
        print(f"{module}: {caught[module]} of {sum(mutant[0] == module for mutant in asked)} caught")
    for (module, _, line, said), alive in zip(asked, survived, strict=True):
        if alive:
            print(f"  survived: {module}, line {line}: {said}")
    print(f"{sum(caught.values())} of {len(asked)} caught")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["module", "line", "change", "caught"])
            writer.writerows(
                [m, line, said, not alive] for (m, _, line, said), alive in zip(asked, survived, strict=True)
            )


if __name__ == "__main__":
    main()
