"""A profile that is kept draw by draw: continued to the same tables, refused where it is another one."""

import pandas as pd
import pytest
from zoo_words import reader

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.hooks import ablate
from tlspectral.positional import positional_symbolic_profile


def profile(model=None, **changes):
    given = {"n_pairs": 7, "n_blocks": 4, "queries": 2, "draws": 1, "seed": 5, "show_progress": False}
    return positional_symbolic_profile(model or reader(), "plain", **given | changes)


@pytest.mark.parametrize("mode", ["prompt", "key"])
def test_a_kept_profile_is_the_measured_one(mode, tmp_path, monkeypatch):
    """Also with a draw that is added later, and beside the draws of the other mode."""
    settings = {"mode": mode, "per_frequency": True}
    expected = profile(draws=2, **settings)
    settings["checkpoint_dir"] = tmp_path
    for draws in (1, 2):
        profile(draws=draws, **settings)
    monkeypatch.setattr("tlspectral.positional.draws.BlockReading", None)
    kept = profile(draws=2, **settings)
    for name, table in expected.tables.items():
        pd.testing.assert_frame_equal(kept.tables[name], table, check_exact=True)
        assert kept.tables[name].attrs == table.attrs
    monkeypatch.undo()
    other = {**settings, "mode": "key" if mode == "prompt" else "prompt"}
    profile(**other)
    # Two draws of one mode and one of the other; of words the three swaps are a part of their own.
    assert len(list(tmp_path.glob("*.parquet"))) == (5 if mode == "prompt" else 4)


def test_a_folder_of_another_profile_is_refused(tmp_path):
    settings = {"mode": "key", "checkpoint_dir": tmp_path}
    profile(**settings)
    changes = {"seed": 6, "exclude_first_block": False, "per_frequency": True, "queries": 1, "n_blocks": 3}
    for name, value in changes.items():
        with pytest.raises(IncompatibleCheckpoint, match="was made with other"):
            profile(**settings | {name: value})
    with pytest.raises(IncompatibleCheckpoint, match="other weights"):
        profile(reader("qwen3"), **settings)
    model = reader()
    with ablate(model, [(0, 1)], "output"), pytest.raises(IncompatibleCheckpoint, match="other hooks on the model"):
        profile(model, **settings)
