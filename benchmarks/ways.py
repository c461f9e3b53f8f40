"""The way of a model through the package: which files run on it, and where a call climbs to a higher floor.

Run `python benchmarks/ways.py`; some seconds. Five ways are followed: `analyze_heads` to the eigenvalues, of a loaded
model and of a name, `ablate` to the hook, a prompt to its value, and `edge_effects` into the queries of a head. Counted
are the functions and files of the package that run, and calls from a room to one that stands on a higher floor of the
table in CONTRIBUTING.md: hooks and parts that were handed down, since imports cannot make them. Behind these stand the
lines of the package that a process loads with its first call of three functions: what a reader of that function may
have to open.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tlspectral as tls

ROOT = Path(tls.__file__).parents[1]


def floors() -> dict[str, int]:
    """The floor of every room."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}


def place(frame: FrameType | None) -> Path | None:
    """The file of a frame below the package; None for other code and for the package's face."""
    file = Path(frame.f_code.co_filename) if frame is not None else ROOT
    if not file.is_relative_to(ROOT / "tlspectral") or (file.parent == ROOT / "tlspectral" and file.stem == "__init__"):
        return None
    return file.relative_to(ROOT / "tlspectral")


def followed(run: Callable[[], Any]) -> tuple[int, int, list[str]]:
    """Functions and files that run, and the calls that climb."""
    height, functions, climbs = floors(), set(), set()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        here = place(frame) if event == "call" else None
        if here is None or frame.f_code.co_name.startswith("<"):
            return
        functions.add((here, frame.f_code.co_name))
        there = place(frame.f_back)
        rooms = [None if at is None else at.parts[0].removesuffix(".py") for at in (there, here)]
        if there is not None and height.get(str(rooms[0]), 0) < height.get(str(rooms[1]), 0):
            climbs.add(f"{there} -> {here}:{frame.f_code.co_name}")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(functions), len({file for file, _ in functions}), sorted(climbs)


CALLS = {
    "an empty ablate": "with tls.ablate(model, 'L0H0', 'output'): pass",
    "detect_heads": "tls.detect_heads(model, n_sequences=4)",
    "analyze_heads": "tls.analyze_heads(model, null_draws=10)",
}


def lines_loaded(call: str) -> int:
    """Lines of the package that a new process has loaded when it has loaded a model and made a call."""
    code = f"import sys\nimport tlspectral as tls\nmodel = tls.load_model('tiny-rope')\n{call}\n"
    code += "print(*{one.__file__ for one in [*sys.modules.values()] if getattr(one, '__file__', None)}, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(line) for line in done.stdout.splitlines() if Path(line).is_relative_to(ROOT / "tlspectral")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    """Print the ways, and the lines that three calls load."""
    model = tls.load_model("tiny-rope")
    prompt = torch.arange(1, 30)[None]
    task = tls.logit_difference(prompt, 3, 4)

    def ablated() -> None:
        with tls.ablate(model, "L0H3", "rope_phase"):
            model(prompt)

    ways: dict[str, Callable[[], Any]] = {
        "analyze_heads": lambda: tls.analyze_heads(model, null_draws=2),
        "analyze_heads by name": lambda: tls.analyze_heads("tiny-rope", null_draws=2),
        "ablate": ablated,
        "evaluate": lambda: tls.evaluate(model, task),
        "edge_effects": lambda: tls.edge_effects(model, "L1H0.q"),
    }
    for name, run in ways.items():
        run()  # imports are no part of the way
        functions, files, climbs = followed(run)
        print(f"{name}: {functions} functions in {files} files, {len(climbs)} climbs {climbs or ''}")
    for name, call in CALLS.items():
        print(f"{name} loads {lines_loaded(call):,} lines")


if __name__ == "__main__":
    main()
