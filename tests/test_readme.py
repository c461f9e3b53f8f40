"""The README's first screen: its lines run and print what it says they print."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from short_notebooks import FEWER

pytestmark = pytest.mark.long

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_python_blocks_print_what_the_readme_shows(tmp_path: Path, full: bool) -> None:
    pytest.importorskip("gguf")
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n([^`]*)```\n\n```\n(.*?)```", text, flags=re.DOTALL)
    (first, heads), (second, parts), (third, table) = blocks
    if not full:  # the layers of the heads that it names stand for all thirty
        layers = sorted({re.match(r"L\d+", name)[0] for name in re.findall(r"L\d+H\d+", heads)})
        assert first.count("task=choose)") == 1
        first = first.replace("task=choose)", f"heads={layers}, task=choose)")
        third = FEWER + third.replace("analyze_heads(model)", "analyze_heads(model, null_draws=10)")
    run = subprocess.run(
        [sys.executable, "-c", first + second + third], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    # The README rounds to two digits, which do not depend on the TransformerLens line or the workers.
    found, shown = run.stdout.split(), (heads + parts + table).split()
    # Without `--full` the null of each of three heads has ten draws: measured one mean off by 0.02, the others equal.
    null = [abs(float(a) - float(b)) for a, b in zip(found, shown, strict=True) if a != b]
    assert len(null) <= (0 if full else 3)
    assert max(null, default=0) <= 0.03
    assert (tmp_path / "smollm2.parquet").stat().st_size > 100_000


def test_the_table_of_columns_has_the_values_of_a_random_head() -> None:
    """The numbers of SmolLM2's heads stand beside those of random matrices of the same size."""
    rng = np.random.default_rng(0)
    d_model, d_head, values = 576, 64, []
    for _ in range(20):
        w_q, w_k = rng.standard_normal((2, d_model, d_head))
        m, eigenvalues = w_q @ w_k.T, np.linalg.eigvals(w_k.T @ w_q)  # of m, but for zeros
        ratio = np.abs(eigenvalues.imag).sum() / np.abs(eigenvalues).sum()
        values.append((np.linalg.norm(m - m.T) / 2 / np.linalg.norm(m), ratio))
    (dir_frac, d_head_value), text = np.mean(values, axis=0), README.read_text(encoding="utf-8")
    # 20 draws give the mean of D_head (sd 0.016) within 0.008 and that of dir_frac (sd 0.001) within 0.0003; a share of
    # squared norms would be 0.5, a share of complex eigenvalues 0.9.
    assert dir_frac == pytest.approx(float(re.search(r"`dir_frac` = [^.]*? (0\.\d+) random", text)[1]), abs=0.005)
    assert d_head_value == pytest.approx(float(re.search(r"`D_head` = [^.]*? (0\.\d+) random", text)[1]), abs=0.015)


def test_every_picture_and_link_of_the_readme_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert local
    for target in local:
        assert (README.parent / target).is_file(), target
