"""Copies of the notebooks with fewer draws, pairs and tokens, which `make notebooks-short` runs.

`python tests/support/short_notebooks.py FOLDER` writes them. The cells are those of the notebooks, but for what stands
below.
`make notebooks` runs the notebooks themselves.
"""

import json
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# What a notebook leaves to defaults (sequences, measured edges, draws), the first cell of its copy sets lower.
FEWER = """
from importlib import import_module

import_module("tlspectral.heads.detectors.kernel")._KERNEL_SEQUENCES = 6
import_module("tlspectral.hooks.sweeps.sweep").SEQUENCES = 4
import_module("tlspectral.hooks.path_patching").MEASURED = 8
import_module("tlspectral.hooks.path_patching").DRAWS = 4
"""
# What stands in a notebook, once, and what takes its place. A null of five draws and a prompt of twelve pairs take the
# same code as those of sixty. 09 is short; 05 trains until soon after its heads have formed, and measures fewer steps.
# What 12 trains learns next to nothing in its copy.
SHORTER = {
    "01_analyze_heads": {"null_draws=60": "null_draws=5"},
    "02_ablate_heads": {
        "null_draws=20": "null_draws=3",
        "n_sequences=40": "n_sequences=8",
        "n_sequences=10": "n_sequences=4",
        "draws=19": "draws=2",
    },
    "03_positional_or_symbolic": {
        "CopyingTask(18, 72, queries=3, draws=4)": "CopyingTask(18, 72, queries=1, draws=2)",
        "NeedleTask(9, draws=4)": "NeedleTask(9, draws=2)",
        "n_blocks=16, queries=3, draws=4": "n_blocks=16, queries=1, draws=2",
        "n_sequences=30": "n_sequences=4",
        "n_sequences=6, segment_length=48": "n_sequences=3, segment_length=16",
        "range(0, 18, 3) for j in range(i + 3, 18, 3)": "range(0, 18, 6) for j in range(i + 6, 18, 6)",
    },
    "04_reproduce_the_paper": {
        "draws=300": "draws=20",
        "table = replicate()": (
            'import_module("tlspectral_studies.fingerprint.replication.positional_schemes").BOOTSTRAP_DRAWS = 30\n'
            "table = replicate()"
        ),
    },
    "05_when_heads_form": {
        "[0, 50, 100, 150, 200, 300, 400, 450, 500, 520, 540, 560, 580, 600, 650, 700, 800, 1000, 1200, 1500]": (
            "[0, 100, 300, 500, 560, 600, 700]"
        ),
        "steps=1500, evaluate_every=250": "steps=700, evaluate_every=350",
        "[0, 500, 560, 600, 700, 1000, 1500]": "[0, 500, 560, 600, 700]",
    },
    "06_your_question": {"draws=19": "draws=2"},
    "07_wiring": {
        "n_sequences=20": "n_sequences=6",
        "n_sequences=4, length=48": "n_sequences=2, length=24",
        "repeated(gemma)": "repeated(gemma, length=12)",
        '["L17H3.k", "L18H6.k"]': '["L18H6.k"]',
        '["L11H2.k", "L5H1.k"]': '["L5H1.k"]',
    },
    "08_what_does_this_head_do": {
        "null_draws=100": "null_draws=5",
        "n_sequences=20": "n_sequences=6",
        "draws=200": "draws=20",
    },
    "10_circuits": {
        "[::3]": "[::14]",
        '["heads", "mlps", "embedding"]': '["L23H3", "L29H1", "L29MLP", "embedding"]',
        'f"{mover}.q", ': 'f"{mover}.q", senders=["L16H0", "L20H0", "embedding"], ',
        "ablation_sweep(model, part, task=task)": 'ablation_sweep(model, part, task=task, heads=["L20", "L29"])',
        "sizes=[0.002, 0.01, 0.05, 0.2, 0.5], null=2": "sizes=[0.01, 0.2], null=1",
    },
    "11_four_new_papers": {
        "n_sequences=16": "n_sequences=6",
        "for seed in range(12)": "for seed in range(6)",
        "queries=4, draws=4)": "queries=1, draws=2)",
        "for seed in range(3):": "for seed in range(1):",
        "for seed in range(3)}": "for seed in range(1)}",
    },
    "12_train_the_papers_toys": {
        "for step in range(1000)": "for step in range(250)",
        "rolling(50).mean()[199::200]": "rolling(50).mean()[49::50]",
        "steps=1200, validation_samples=10_240": "steps=40, warmup_steps=10, validation_samples=1024",
        "steps=3000, learning_rate": "steps=100, learning_rate",
        "null_draws=50": "null_draws=5",
        "Dyck3((4, 8)), 400": "Dyck3((4, 8)), 40",
    },
}


def shortened(path: Path) -> str:
    """Return a notebook with the numbers that are shorter. Raises ValueError if one does not stand in it once."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for written, shorter in SHORTER.get(path.stem, {}).items():
        holding = [cell for cell in cells if written in "".join(cell["source"])]
        if len(holding) != 1:
            raise ValueError(f"{path.name}: {written!r} stands in {len(holding)} cells; change SHORTER in {__file__}")
        holding[0]["source"] = "".join(holding[0]["source"]).replace(written, shorter)
    notebook["cells"].insert(0, {**cells[0], "id": "fewer", "source": FEWER, "outputs": []})
    return json.dumps(notebook)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        (folder / path.name).write_text(shortened(path), encoding="utf-8")
