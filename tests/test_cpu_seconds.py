"""`--cpu-seconds`: what a file of tests costs, in one process and in two, and what its tests' children cost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
CHILD = f"import subprocess, sys\ndef test():\n    subprocess.run([sys.executable, '-c', {BURN.format(0.3)!r}])\n"
FILES = {
    "test_idle.py": "def test():\n    pass\n",
    "test_busy.py": f"def test():\n    exec({BURN.format(0.2)!r})\n",
    "test_child.py": CHILD,
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_file_is_charged_with_its_own_and_its_childrens_seconds(tmp_path, processes):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "cpu_seconds", "--cpu-seconds"]
    command += ["-p", "xdist", "-n", str(processes)] if processes else []
    # Other plugins take seconds to import.
    support = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent / "support"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(command, cwd=tmp_path, env=support, capture_output=True, text=True, check=True)
    table = done.stdout.partition(" CPU seconds ")[2]
    seconds = {name: float(spent) for spent, name in re.findall(r"^ +([\d.]+)  (.+)$", table, re.MULTILINE)}
    order = ["test_child.py", "test_busy.py", "test_idle.py", "imports and collection", "in all"]
    assert list(seconds) == order
    # Beside the .3 and .2 s that are burnt a file costs hundredths of a second, and a child .02.
    assert 0.3 <= seconds["test_child.py"] < 0.5
    assert 0.2 <= seconds["test_busy.py"] < 0.3
    assert seconds["test_idle.py"] < 0.1
    assert seconds["in all"] == pytest.approx(sum(list(seconds.values())[:-1]), abs=0.3)  # five rounded numbers
