"""Planted heads, silent, rank-deficient and defective: their status, and no false numbers around them."""

import json

import pytest
import torch
from head_tables import NULLS, SCALE_FREE, analyze, assert_same, built
from reference_circuits import edited

SPECTRAL = [
    *SCALE_FREE, "cond_eig", "spectral_radius", "prin_angle_mean", "prin_angle_max", "self_match",
    "rope_imag_frac", "freq_centroid", "hi_freq_dir", *NULLS,
]  # fmt: skip


def plant_heads(model):
    """Layer 1 of llama: head 0 is zero, head 1 has rank 3, head 2 reads keys where no query is, head 3 is left."""
    layer = model.model.layers[1]
    queries, keys = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    queries[:12] = 0
    generator = torch.Generator().manual_seed(0)
    queries[12:24] = torch.randn(12, 3, generator=generator) @ torch.randn(3, 48, generator=generator) / 3
    queries[24:36, 24:] = 0  # key head 1 is read by heads 2 and 3: only this query head moves
    keys[12:, :24] = 0


def test_planted_heads_get_their_status_and_no_false_numbers():
    model = edited("llama", plant_heads)
    table = analyze(model, detectors=True)
    assert table["status"].tolist() == ["ok"] * 4 + ["zero", "rank_deficient", "defective", "ok"]
    zero, deficient, nilpotent = (table.loc[row] for row in (4, 5, 6))
    assert zero["rank"] == 0
    assert zero[SPECTRAL].isna().all()
    assert zero[["prev", "dup", "ind", "copying", "positivity"]].notna().all()  # it still averages and writes
    assert deficient["rank"] == 3
    assert deficient[SPECTRAL].notna().all()
    assert nilpotent["rank"] == 12
    # Measured: 1e-16 of the norm.
    assert nilpotent["lam_mass"] < 1e-12
    assert nilpotent["henrici"] == pytest.approx(1, abs=1e-12)
    assert nilpotent["dir_frac"] == pytest.approx(0.5**0.5, abs=1e-12)
    assert nilpotent[["prin_angle_mean", "prin_angle_max"]].tolist() == pytest.approx([90, 90], abs=1e-6)
    undefined = ["D_head", "D_head_z", "D_head_null_pct", "D_head_pct"]
    assert nilpotent[undefined].isna().all()
    assert nilpotent[[column for column in SPECTRAL if column not in undefined]].notna().all()
    measured = table["D_head"].dropna()
    assert table["D_head_pct"].dropna().tolist() == (measured.rank() / len(measured)).tolist()
    plain = analyze(built("bridge", "llama"), detectors=True)
    assert_same(table.loc[:3].drop(columns="D_head_pct"), plain.loc[:3].drop(columns="D_head_pct"))


def test_a_model_without_a_single_head_that_does_anything():
    """Only biases are left, which lie outside M."""

    def silence(model):
        for block in model.transformer.h:
            block.attn.c_attn.weight.zero_()

    table = analyze(edited("gpt2", silence))
    assert (table["status"] == "zero").all()
    assert table["D_head_pct"].isna().all()
    assert (table["outside_m"] == 1).all()
    json.dumps(table.attrs, allow_nan=False)
