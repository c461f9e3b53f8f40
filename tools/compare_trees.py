"""Everything the library computes, written by one source tree and compared with what another writes.

    python tools/compare_trees.py write --tree . -o out/new
    python tools/compare_trees.py write --tree ../old -o out/old
    python tools/compare_trees.py compare out/old out/new

`write` runs the tree in a process of its own, with this interpreter, one thread and the zoo of the tree that this
script stands in. An item is one call on one model (`tree_items.py`), written through one translation of names
(`tree_calls.py`), so that trees of different API write the same items. Items that the folder has are not run again. An
item that raises stores the class of its error and the message.

`compare` prints every item that is not equal to the bit: the largest absolute difference and the same as a share of the
largest value; values that only one folder has; another class of error. A value that only the second folder has, such as
a new column, is no failure, and neither is another message. The exit status is 1 if there is a failure.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent


def write(options: argparse.Namespace) -> int:
    """Run the items of a tree in a process that imports that tree."""
    tree = options.tree.resolve()
    if not (tree / "tlspectral" / "__init__.py").is_file():
        raise SystemExit(f"{tree} holds no package tlspectral")
    options.output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "work", "--tree", str(tree), "-o", str(options.output.resolve())]
    return subprocess.run(
        [*command, "--part", options.part, "--only", options.only],
        env=environment(tree),
        cwd=options.output,
        check=False,
    ).returncode


def environment(tree: Path) -> dict[str, str]:
    """Variables of a process that imports a tree: one thread, offline."""
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {
        **os.environ,
        **one_thread,
        **offline,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'studies'}",
        "PYTHONHASHSEED": "0",
    }


def work(options: argparse.Namespace) -> int:
    """Run the items that the folder lacks, and print CPU seconds by group."""
    sys.path[1:1] = [str(HERE.parent / "tests" / "support")]
    import torch
    import tree_calls
    import tree_items

    torch.set_num_threads(1)
    calls = tree_calls.Calls(tree_items.saved_folder)
    if calls.root.parent != options.tree:
        raise SystemExit(f"{calls.root} was imported in place of {options.tree}")
    (options.output / "about.json").write_text(json.dumps(about(options.tree), indent=1) + "\n")
    for group in tree_items.groups(options.part):
        missing = [
            (options.output / group.name / f"{item.name}.npz", item)
            for item in group.items()
            if fnmatch.fnmatch(f"{group.name}/{item.name}", options.only)
        ]
        missing = [(path, item) for path, item in missing if not path.exists()]
        if not missing:
            continue
        start, raised = time.process_time(), Counter[str]()
        (options.output / group.name).mkdir(exist_ok=True)
        try:
            model = calls.settled(group.build(calls))
        except Exception as error:
            store(options.output / group.name / "build.npz", outcome(error))
            print(f"{group.name}: {type(error).__name__} when it was built", flush=True)
            continue
        for path, item in missing:
            np.random.seed(0)  # noqa: NPY002
            torch.manual_seed(0)
            try:
                found = dict(flat(getattr(calls, item.call)(model, **item.settings), tree_calls.RENAMED))
            except Exception as error:
                found = outcome(error)
                raised[type(error).__name__] += 1
            store(path, found)
        spent = time.process_time() - start
        errors = ", ".join(f"{times} {name}" for name, times in raised.most_common()) or "none"
        print(f"{group.name}: {len(missing)} items, {spent:.1f} CPU s, errors: {errors}", flush=True)
    print(f"{time.process_time():.0f} CPU s in all")
    return 0


def about(tree: Path) -> dict[str, Any]:
    """What the numbers of a folder depend on beside the tree."""
    import torch
    import transformer_lens
    import transformers

    commit = subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    packages = (np, torch, transformers, transformer_lens)
    versions = {package.__name__: getattr(package, "__version__", "") for package in packages}
    return {"commit": commit.stdout.strip(), "python": sys.version.split()[0], **versions}


def outcome(error: Exception) -> dict[str, np.ndarray]:
    """An error as values: its class, and its message."""
    return {"error": np.array(type(error).__name__), "message": np.array(" ".join(str(error).split()))}


def store(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write an item, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez(file, **values)
    unfinished.replace(path)


def flat(value: Any, renamed: Mapping[str, str], name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays by name of everything in a result: columns, fields, entries; attributes of a table behind an @."""
    import pandas as pd
    import torch

    def below(key: Any, joint: str = ".") -> str:
        key = renamed.get(str(key), str(key)).replace("/", "|")
        return f"{name}{joint}{key}" if name else key

    if isinstance(value, pd.Series):
        value = value.to_frame(value.name or "value")
    if isinstance(value, pd.DataFrame):
        if any(label is not None for label in value.index.names):
            value = value.reset_index()
        for column in value.columns:
            yield below(column), as_array(value[column])
        # Text in attributes is provenance and settings, whose words may change.
        attributes = flat(dict(value.attrs), renamed)
        yield from ((f"{name}@{key}", one) for key, one in attributes if one.dtype.kind != "U")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from flat(one, renamed, below(key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flat(getattr(value, field.name), renamed, below(field.name))
    elif isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        yield name or "value", (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    elif isinstance(value, list | tuple) and any(
        isinstance(one, torch.Tensor | pd.DataFrame | Mapping) for one in value
    ):
        for index, one in enumerate(value):
            yield from flat(one, renamed, below(index))
    else:
        yield name or "value", as_array(value)


def as_array(value: Any) -> np.ndarray:
    """An array of numbers, or of text where a value is none."""
    try:
        found = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError:  # a list of unequal lists
        return np.array(repr(value))
    if found.dtype.kind in "OUSM":
        return np.array([str(one) for one in found.ravel()]).reshape(found.shape)
    return found


def compare(options: argparse.Namespace) -> int:
    """Print how two folders differ; 1 if anything differs that should not."""
    first, second = (
        {str(path.relative_to(folder))[:-4]: path for path in folder.rglob("*.npz")} for folder in options.folders
    )
    states = [json.loads((folder / "about.json").read_text()) for folder in options.folders]
    for key in sorted(set(states[0]) & set(states[1])):
        if states[0][key] != states[1][key]:
            print(f"{key}: {states[0][key]} -> {states[1][key]}")
    count: Counter[str] = Counter()
    new: Counter[str] = Counter()
    lone: Counter[str] = Counter()
    for name in sorted(first.keys() | second.keys()):
        left_out = any(fnmatch.fnmatch(name, pattern) for pattern in options.without)
        if left_out or not fnmatch.fnmatch(name, options.only):
            count["left out"] += 1
        elif name not in second or name not in first:
            verdict = "missing" if name not in second else "new"
            count[verdict] += 1
            # A group that one folder lacks is one line.
            group = f"{name.split('/')[0]}/*"
            alone = not fnmatch.filter(second if verdict == "missing" else first, group)
            lone[f"{group if alone else name}: {verdict}"] += 1
        else:
            with np.load(first[name]) as a, np.load(second[name]) as b:
                verdict, lines = differences(dict(a), dict(b), options, new)
            count[verdict] += 1
            if lines:
                print(f"{name}: {verdict}", *lines, sep="\n  ")
    for said, times in lone.items():
        print(f"{said} ({times})" if times > 1 else said)
    for value, times in sorted(new.items()):
        print(f"new in {times} items: {value}")
    print(", ".join(f"{times} {verdict}" for verdict, times in sorted(count.items())))
    return int(any(count[verdict] for verdict in ("different", "missing")))


def differences(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], options: argparse.Namespace, new: Counter[str]
) -> tuple[str, list[str]]:
    """Verdict on an item, and a line for each value that is not the same."""
    if "error" in a or "error" in b:
        errors = [str(values.get("error", "no error")) for values in (a, b)]
        if errors[0] != errors[1]:
            return "different", [f"{errors[0]} -> {errors[1]}: {b.get('message', '')!s:.200}"]
        messages = [str(values.get("message")) for values in (a, b)]
        return (
            ("equal", []) if messages[0] == messages[1] or not options.messages else ("equal", [" -> ".join(messages)])
        )
    verdict, lines = "equal", []
    left_out = lambda value: any(fnmatch.fnmatch(value, pattern) for pattern in options.without_value)  # noqa: E731
    for value in a.keys() | b.keys():
        if left_out(value):
            continue
        if value not in a:
            new[value] += 1
        elif value not in b:
            verdict = "different"
            lines.append(f"{value}: missing")
        elif found := difference(a[value], b[value]):
            rounding = found[1] <= options.rounding
            verdict = "rounding" if rounding and verdict == "equal" else verdict if rounding else "different"
            lines.append(f"{value}: {found[0]}")
    return verdict, sorted(lines)


def difference(a: np.ndarray, b: np.ndarray) -> tuple[str, float] | None:
    """What differs between two arrays, and the largest difference as a share of the largest value; None if nothing."""
    if a.shape != b.shape:
        return f"shape {a.shape} -> {b.shape}", np.inf
    numbers = all(one.dtype.kind in "biufc" for one in (a, b))
    if not numbers:
        where = np.flatnonzero(a.ravel().astype(str) != b.ravel().astype(str))
        said = f"{a.ravel()[where[0]]!s:.80} -> {b.ravel()[where[0]]!s:.80}" if len(where) else ""
        return (f"{len(where)} of {a.size} texts, first {said}", np.inf) if len(where) else None
    if np.array_equal(a, b, equal_nan=True):
        return None
    kind = complex if "c" in (a.dtype.kind, b.dtype.kind) else float
    a, b = a.astype(kind), b.astype(kind)
    known = np.isfinite(a) & np.isfinite(b)
    same = known | (a == b) | (np.isnan(a) & np.isnan(b))
    if not same.all():
        return f"{(~same).sum()} of {a.size} are NaN or infinite in one alone", np.inf
    largest = float(np.abs(a[known] - b[known]).max())
    relative = largest / float(np.maximum(np.abs(a[known]), np.abs(b[known])).max())
    return f"largest difference {largest:.3g}, relative {relative:.3g}", relative


def main() -> int:
    """Read the arguments, and write or compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("write", write), ("work", work)):
        command = commands.add_parser(name, help="write the items of a tree" if name == "write" else argparse.SUPPRESS)
        command.set_defaults(run=run)
        command.add_argument("--tree", type=Path, default=HERE.parent, help="root of a source tree")
        command.add_argument("-o", "--output", type=Path, required=True, help="folder of the items")
        command.add_argument("--part", choices=("all", "zoo", "packaged", "demo"), default="all")
        command.add_argument("--only", default="*", help="pattern of GROUP/ITEM, such as 'bridge-llama/*'")
    command = commands.add_parser("compare", help="compare two folders")
    command.set_defaults(run=compare)
    command.add_argument("folders", type=Path, nargs=2)
    command.add_argument("--rounding", type=float, default=0.0, help="relative difference that counts as rounding")
    command.add_argument("--only", default="*", help="pattern of GROUP/ITEM")
    command.add_argument("--without", nargs="*", default=[], help="patterns of items that are left out")
    command.add_argument("--without-value", nargs="*", default=[], help="patterns of values that are left out")
    command.add_argument("--messages", action="store_true", help="also show messages that changed")
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
