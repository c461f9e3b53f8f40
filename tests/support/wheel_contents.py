"""What has to be in sdist and wheel, and what must not: run by `make wheel` on two folders that hold both.

The second folder is of a second build, which has to be the same to the byte.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

NEEDED = (
    "tlspectral/data/models/tiny-rope.safetensors",
    "tlspectral/data/models/tiny-rope.json",
    "tlspectral/py.typed",
    "tlspectral/data/text/alice.txt",
    "tlspectral/data/binding/names.txt",
    "tlspectral/data/models/tiny-rope-sym.safetensors",
    "tlspectral/report/page.html",
    "tlspectral/report/script.js",
    "tlspectral/report/wall.html",
    "tlspectral/report/wall.js",
    "tlspectral/report/style.css",
    "tlspectral/tables/head_columns.txt",
)
LARGEST_WHEEL = 3_000_000  # bytes


def names(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as files:
        return [name.partition("/")[2] for name in files.getnames()]


def unwanted(name: str) -> bool:
    first, *rest = name.split("/")
    return first in ("tests", "hooks", "benchmarks", "studies") or "tests" in rest


def shown_on_an_index(wheel: Path) -> str:
    """The metadata of a wheel, which end with the text that a package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode("utf-8")


def main(folder: Path, again: Path) -> int:
    archives = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    wrong = [] if len(archives) == 2 else [f"{folder} holds {len(archives)} archives, not a wheel and an sdist"]
    for archive in archives:
        held = names(archive)
        wrong += [f"{archive.name} lacks {name}" for name in NEEDED if name not in held]
        wrong += [f"{archive.name} holds {name}" for name in held if unwanted(name)]
        if archive.read_bytes() != (again / archive.name).read_bytes():
            wrong.append(f"{archive.name} is another file when it is built again")
    for wheel in folder.glob("*.whl"):
        if wheel.stat().st_size > LARGEST_WHEEL:
            wrong.append(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST_WHEEL}")
        if "\n# tlspectral\n" not in shown_on_an_index(wheel):
            wrong.append(f"{wheel.name} does not carry the README")
    print("\n".join(wrong) or f"{len(archives)} archives hold what they should")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
