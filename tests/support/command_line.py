"""Commands as a user runs them, in this process."""

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from tlspectral.cli import app
from tlspectral.tables.head_columns import HEAD_COLUMNS


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments):
    """A command that succeeds."""
    ended = run(*arguments)
    assert ended.exit_code == 0, ended.output
    return ended


def refusal(*arguments):
    """What a command says that is refused and prints nothing else, in one line."""
    ended = run(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, ""), ended.output
    return " ".join(ended.stderr.split())


ATTRS = {
    "model": "tiny-model",
    "revision": "abc123",
    "backend": "bridge",
    "weights_sha256": "0123456789abcdef" * 4,
    "versions": {"tlspectral": "0.1.0", "torch": "2.13.0"},
    "seed": 0,
    "null_draws": 300,
    "null_blocks": "shared",
    "score_check": {"worst_error": 2.5e-6, "tolerance": 1.3e-5, "layer": 1, "compared": "scores"},
    "detectors": {"n_sequences": 200, "segment_length": 64, "bos": 0},
    "control_variate": {},
    "rotary_valid_up_to": None,
    "columns": {},
}


def heads() -> pd.DataFrame:
    """Two layers of three heads: L1H2 leads by prev and stands furthest above its null, L0H1 furthest below."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({column.name: generator.uniform(0.2, 0.4, 6) for column in HEAD_COLUMNS})
    frame["layer"], frame["head"] = [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]
    frame["kv_head"], frame["rank"], frame["status"], frame["bilinear"] = 0, 8, "ok", "exact"
    frame["name"] = [f"L{layer}H{head}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]
    frame["prev"] = [0.01, 0.02, 0.03, 0.04, 0.05, 0.876]
    frame["prev_se"] = 0.0012
    frame["D_head_z"] = [-1.0, -7.5, 0.5, 1.5, 2.0, 4.2]
    frame["rope_imag_frac"] = np.nan
    frame.attrs = dict(ATTRS)
    return frame
