"""Print how many lines, tokens, functions and classes the core, the studies and the tests have."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def kind(path: Path) -> str:
    """Return whether a file belongs to the core, to a study or to the tests."""
    parts = path.relative_to(ROOT).parts
    return "tests" if "tests" in parts else "studies" if "studies" in parts else "core"


def tokens(source: str) -> int:
    """Return the number of tokens of Python, without line breaks, comments and indentation."""
    return sum(token.type not in LAYOUT for token in tokenize.generate_tokens(io.StringIO(source).readline))


def definitions(source: str) -> int:
    """Return the number of functions and classes."""
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in ast.walk(ast.parse(source))
    )


def main() -> None:
    """Print one line for each of the three."""
    files = [*(ROOT / "tlspectral").rglob("*.py"), *(ROOT / "studies").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    print(f"{'':8} {'files':>6} {'lines':>8} {'tokens':>8} {'functions and classes':>22}")
    for name in ("core", "studies", "tests"):
        sources = [path.read_text(encoding="utf-8") for path in files if kind(path) == name]
        lines = sum(source.count("\n") for source in sources)
        counts = len(sources), lines, sum(map(tokens, sources)), sum(map(definitions, sources))
        print(f"{name:8} {counts[0]:6,} {counts[1]:8,} {counts[2]:8,} {counts[3]:22,}")


if __name__ == "__main__":
    main()
