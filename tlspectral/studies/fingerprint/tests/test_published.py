"""The published tables in the package: what is in them, whose they are, and how they fit one another."""

import numpy as np
import pandas as pd
import pytest
from described import assert_described

from tlspectral.studies.fingerprint.published import (
    PUBLISHED_CHECKPOINTS,
    PUBLISHED_HEADS,
    published_checkpoints,
    published_constrained,
    published_folder,
    published_heads,
    published_kernels,
)

HEADS = {
    "gpt2": (12, 12),
    "opt-1.3b": (24, 32),
    "gpt-neo-1.3b": (24, 16),
    "bloom-1b1": (24, 16),
    "pythia-410m": (24, 16),
    "pythia-1.4b": (24, 16),
    "llama-3-8b": (32, 32),
}
ROTARY = {"pythia-410m", "pythia-1.4b", "llama-3-8b"}


@pytest.mark.parametrize("name", PUBLISHED_HEADS)
def test_every_head_of_every_model_is_there(name):
    table = published_heads(name)
    layers, heads = HEADS[name]
    assert sorted(zip(table["layer"], table["head"], strict=True)) == [
        (i, j) for i in range(layers) for j in range(heads)
    ]
    assert table.notna().all().all()
    assert ("rope_imag_frac" in table) == (name in ROTARY)
    assert table[["dir_frac", "D_head", "prev", "ind"]].apply(lambda column: column.between(0, 1).all()).all()


def test_tables_say_whose_they_are():
    tables = [
        published_heads("gpt2"),
        published_checkpoints("pythia-160m"),
        published_kernels(),
        *vars(published_constrained()).values(),
    ]
    assert_described(*map(published_heads, PUBLISHED_HEADS), released=True)
    assert_described(*map(published_checkpoints, PUBLISHED_CHECKPOINTS), released=True)
    for table in tables[2:]:
        assert_described(table, released=True)
    for table in tables:
        assert table.attrs["licence"] == "CC-BY-4.0"
        assert "qk-spectral-fingerprint" in table.attrs["source"]
    assert tables[0].attrs["model"] == "gpt2"
    assert tables[0].attrs["baseline_ce"] == pytest.approx(3.657209)
    notice = (published_folder() / "NOTICE.md").read_text(encoding="utf-8")
    for said in ("CC-BY-4.0", "Li Hengyu", "Changed:", "Unchanged"):
        assert said in notice


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'gpt3': there are gpt2, .*llama-3-8b"):
        published_heads("gpt3")
    with pytest.raises(ValueError, match="'gpt2': there are pythia-410m, pythia-160m"):
        published_checkpoints("gpt2")
    with pytest.raises(ValueError, match="strength 3"):
        published_constrained(3.0)


def test_both_histories_have_the_same_names():
    tracks = {name: published_checkpoints(name) for name in PUBLISHED_CHECKPOINTS}
    for name, track in tracks.items():
        assert len(track) == 22
        assert track["step"].is_monotonic_increasing
        assert track["tokens"].iloc[-1] == 143_000 * 1024 * 2048
        percentiles = track[["D_head_pct", "rope_imag_frac_pct"]].to_numpy() * track["n_heads"].to_numpy()[:, None]
        # Percentiles are ranks over a number of heads: multiples of 1/2 up to rounding.
        np.testing.assert_allclose(2 * percentiles, np.rint(2 * percentiles), atol=1e-9, err_msg=name)
    own = {"kcomp", "ind"}
    shared = [{column for column in track if column.split("_")[0] not in own} for track in tracks.values()]
    assert shared[0] == shared[1]
    assert {"prev", "D_head_median", "rope_imag_frac_pct", "icl_score"} <= shared[0]


def test_the_last_checkpoint_is_the_head_of_the_static_table():
    last = published_checkpoints("pythia-410m").iloc[-1]
    head = published_heads("pythia-410m").set_index(["layer", "head"]).loc[(5, 2)]
    for column in ("dir_frac", "D_head", "rope_imag_frac"):
        assert last[column] == head[column]
    # Detectors on 150 sequences instead of 200.
    assert last["prev"] == pytest.approx(head["prev"], abs=2e-4)
    assert last["prev"] != head["prev"]


def test_kernels_are_of_four_heads_and_one_of_them_ablated():
    curves = published_kernels()
    counted = curves.groupby(["ablated", "layer", "head"])["offset"].agg(list)
    assert counted.index.tolist() == [(False, 3, 1), (False, 4, 9), (False, 5, 2), (False, 9, 5), (True, 5, 2)]
    assert all(sorted(offsets) == list(range(-20, 1)) for offsets in counted)
    at_zero = curves[(curves["offset"] == 0) & (curves["layer"] == 5)]["score"]
    assert at_zero.nunique() == 1  # sin 0 = 0: no phase at offset 0


def test_constrained_runs_are_complete():
    tables = published_constrained()
    runs = tables.evaluations.groupby(["arm", "seed"]).size()
    assert len(runs) == 25
    assert (runs == 61).all()
    assert len(tables.heads) == 8 * len(tables.evaluations)
    assert set(tables.evaluations.loc[tables.evaluations["arm"].str.endswith("_free"), "strength"]) == {0.0}
    assert set(tables.evaluations.loc[~tables.evaluations["arm"].str.endswith("_free"), "strength"]) == {10.0}
    phase = tables.heads.groupby(tables.heads["arm"].str.startswith("ape"))["rope_imag_frac_raw"]
    assert phase.apply(lambda values: values.isna().mean()).to_dict() == {True: 1.0, False: 0.0}
    assert set(tables.kernels["step"]) == {6000}
    assert len(tables.kernels) == 25 * 8 * 9


@pytest.mark.parametrize(("score", "best"), [("prev", "prev_best"), ("ind", "ind_best")])
def test_heads_and_evaluations_are_of_the_same_runs(score, best):
    tables = published_constrained()
    keys = ["arm", "seed", "step"]
    largest = tables.heads.groupby(keys)[score].max().rename("largest")
    joined = tables.evaluations.set_index(keys).join(largest)
    # Single precision; neighbouring evaluations differ by 1e-3 and more.
    np.testing.assert_allclose(joined["largest"], joined[best], atol=1e-6)


def test_side_runs_stand_apart():
    tables = published_constrained(1.0)
    penalised = tables.evaluations.loc[tables.evaluations["strength"] == 1.0]
    last = penalised.groupby(["arm", "seed"])["step"].max()
    assert last.groupby("arm").agg(list).to_dict() == {
        "ape_sym": [3000],
        "rope_imag": [6000, 6000, 6000],
        "rope_sym": [3000],
    }
    assert set(tables.kernels["arm"]) == {"ape_free", "rope_free", "rope_imag"}


def test_the_tables_are_small():
    assert sum(path.stat().st_size for path in published_folder().iterdir()) < 2_000_000


def test_a_table_is_read_anew():
    first = published_heads("gpt2")
    first["prev"] = 0.0
    pd.testing.assert_frame_equal(published_heads("gpt2"), published_heads("gpt2"))
    assert published_heads("gpt2")["prev"].max() > 0.9
