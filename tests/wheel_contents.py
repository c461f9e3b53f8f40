"""What has to be in sdist and wheel, and what must not: run by `make wheel` on the folder that holds both."""

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
    "tlspectral/data/published/NOTICE.md",
    "tlspectral/data/published/gpt2_head_full.parquet",
    "tlspectral/data/models/tiny-rope-sym.safetensors",
    "tlspectral/report/page.html",
    "tlspectral/report/script.js",
    "tlspectral/report/style.css",
)


def names(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as files:
        return [name.partition("/")[2] for name in files.getnames()]


def unwanted(name: str) -> bool:
    first, *rest = name.split("/")
    return first in ("tests", "hooks", "benchmarks") or "tests" in rest


def main(folder: Path) -> int:
    archives = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    wrong = [] if len(archives) == 2 else [f"{folder} holds {len(archives)} archives, not a wheel and an sdist"]
    for archive in archives:
        held = names(archive)
        wrong += [f"{archive.name} lacks {name}" for name in NEEDED if name not in held]
        wrong += [f"{archive.name} holds {name}" for name in held if unwanted(name)]
    print("\n".join(wrong) or f"{len(archives)} archives hold what they should")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
