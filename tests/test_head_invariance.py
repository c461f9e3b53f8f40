"""What must not change a head table: backend, workers, order of layers and heads, grouping, other seeds."""

import numpy as np
import pandas as pd
import pytest
import zoo
from head_tables import (
    ALL,
    BEHAVIOUR,
    COUNTS,
    NULLS,
    SCALE_FREE,
    TEXTS,
    analyze,
    assert_same,
    built,
    table_of,
)
from reference_circuits import edited

# --- both backends ---


@zoo.needs_hooked
@pytest.mark.parametrize("fold_ln", [True, False])
@pytest.mark.parametrize("name", zoo.HOOKED_ARCHITECTURES)
def test_a_users_hooked_transformer_gives_the_table_of_the_bridge(name, fold_ln):
    """TransformerLens's default processing: norms folded or not, writing weights, values and unembedding centred."""
    bridge = table_of(name)
    hooked = table_of(name, "hooked") if fold_ln else analyze(zoo.hooked(name, fold_ln=False))
    assert_same(hooked[TEXTS + COUNTS], bridge[TEXTS + COUNTS])
    # Measured: at most 9e-8, norms folded in float32; a norm folded twice or not at all moves them by 1e-2.
    shares = [*SCALE_FREE, "rope_imag_frac", "hi_freq_dir", "rotary_fraction", "outside_m"]
    np.testing.assert_allclose(hooked[shares], bridge[shares], rtol=0, atol=1e-6)
    relative = ["spectral_radius", "freq_centroid"]
    np.testing.assert_allclose(hooked[relative], bridge[relative], rtol=1e-5)
    # Measured: 1e-7, 5e-8 and 1e-6 (a small self_match; 3e-8 of the spread of scores, its unit).
    np.testing.assert_allclose(hooked["self_match"], bridge["self_match"], rtol=1e-5, atol=1e-6)
    # Measured: 1e-6 degrees; 3e-5 of a condition number, which itself says how much rounding it multiplies.
    np.testing.assert_allclose(
        hooked[["prin_angle_mean", "prin_angle_max"]], bridge[["prin_angle_mean", "prin_angle_max"]], atol=1e-4
    )
    np.testing.assert_allclose(hooked["cond_eig"], bridge["cond_eig"], rtol=1e-3)
    # The same draws for nearly the same singular values. Measured: 6e-9; z, which divides by a spread of 1e-2, 8e-7.
    means = [column for column in NULLS if column.endswith(("null_mean", "null_std"))]
    np.testing.assert_allclose(hooked[means], bridge[means], rtol=0, atol=1e-6)
    z = [column for column in NULLS if column.endswith("_z")]
    np.testing.assert_allclose(hooked[z], bridge[z], rtol=0, atol=1e-5)
    # Not so: copying and positivity. center_unembed takes a mean over the vocabulary from W_U (test_copying).
    assert (hooked["positivity"] - bridge["positivity"]).abs().max() > 1e-3


# --- what must not matter ---


def test_neither_workers_nor_the_order_of_layers_change_a_bit():
    model = built("bridge", "gemma2")
    expected = analyze(model)
    assert_same(analyze(model, layers=[3, 1, 0, 2]), expected)
    fresh = analyze(model, null_blocks="fresh")
    assert_same(analyze(model, n_jobs=2, null_blocks="fresh", layers=(3, 2, 1, 0)), fresh)


@pytest.mark.parametrize("blocks", ["shared", "fresh"])
@pytest.mark.parametrize("layers", [[2], [3, 0], [1, 1, 2], range(1, 4)])
def test_a_part_of_the_table_is_that_part_of_the_table(layers, blocks):
    whole = analyze(built("bridge", "gemma2"), null_blocks=blocks)
    part = analyze(built("bridge", "gemma2"), null_blocks=blocks, layers=iter(layers))
    expected = whole[whole["layer"].isin(layers)]
    # D_head_pct runs over the rows computed.
    assert_same(part.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"))
    assert isinstance(part.index, pd.RangeIndex)


def test_seeds_and_kinds_of_blocks_give_their_own_null():
    model, draws = (
        built("bridge", "llama"),
        [c for c in NULLS if not c.startswith("dir_frac") and c.endswith("null_mean")],
    )
    rest = [column for column in ALL if column not in NULLS]
    tables = {
        (blocks, seed): analyze(model, null_blocks=blocks, seed=seed)
        for blocks in ("shared", "fresh")
        for seed in (0, 1)
    }
    for key, table in tables.items():
        assert_same(table, analyze(model, null_blocks=key[0], seed=key[1]))
        assert_same(table[rest], tables["shared", 0][rest])
        for other in tables:
            if other != key:
                assert (table[draws] != tables[other][draws]).all(axis=None)
        closed = ["dir_frac_null_mean", "dir_frac_null_std", "dir_frac_z"]  # without draws
        assert_same(table[closed], tables["shared", 0][closed])


def test_fresh_blocks_differ_between_heads_and_shared_ones_do_not():
    def all_alike(model):
        """All heads of layer 0 and 1 have the weights of head 0."""
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            for name in ("q_proj", "k_proj"):
                weight = getattr(layer.self_attn, name).weight
                first = getattr(model.model.layers[0].self_attn, name).weight[:12]
                weight.copy_(first.repeat(len(weight) // 12, 1))

    model = edited("llama", all_alike)
    shared, fresh = (analyze(model, null_blocks=blocks) for blocks in ("shared", "fresh"))
    assert shared["D_head"].nunique() == shared["D_head_null_mean"].nunique() == 1
    assert fresh["D_head"].nunique() == 1
    assert fresh["D_head_null_mean"].nunique() == 8


def test_permuting_heads_permutes_rows():
    order = [2, 0, 3, 1]

    def permute(model):
        for block in model.transformer.h:
            attention = block.attn
            for joint in (attention.c_attn.weight, attention.c_attn.bias):
                by_head = joint.reshape(*joint.shape[:-1], 3, 4, 12)
                joint.copy_(by_head[..., order, :].reshape(joint.shape))
            outputs = attention.c_proj.weight
            outputs.copy_(outputs.reshape(4, 12, -1)[order].reshape(outputs.shape))

    model = edited("gpt2", permute)
    found, plain = analyze(model, detectors=True), analyze(built("bridge", "gpt2"), detectors=True)
    expected = plain.iloc[[*order, *(4 + head for head in order)]]
    names = ["layer", "head", "name", "kv_head"]
    assert (found["D_head"] != plain["D_head"]).all()
    run = [*BEHAVIOUR, "outside_m"]
    # Measured: 2e-16 relative of weights alone, 2e-9 of runs in float32 that add heads in another order.
    weights = [column for column in ALL if column not in names + run]
    assert_same(found[weights], expected[weights], rtol=1e-11, atol=0)
    assert_same(found[run], expected[run], rtol=0, atol=1e-6)


def test_grouped_keys_are_repeated_keys():
    """A model with grouped keys and values has the table of the one that holds a copy per query head."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    grouped = zoo.hf_model("llama")
    config = type(grouped.config)(**{**grouped.config.to_dict(), "num_key_value_heads": 4})
    config._attn_implementation = "eager"
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].reshape(2, 12, -1).repeat_interleave(2, dim=0).reshape(48, -1)
    repeated = type(grouped)(config).eval()
    repeated.load_state_dict(state)
    model = build_bridge_from_module(repeated, type(repeated).__name__, hf_config=config, tokenizer=None)
    found, expected = analyze(model, detectors=True), analyze(built("bridge", "llama"), detectors=True)
    assert found["kv_head"].tolist() == [0, 1, 2, 3] * 2
    exact = [column for column in ALL if column not in [*BEHAVIOUR, "kv_head"]]
    assert_same(found[exact], expected[exact])
    assert_same(found[BEHAVIOUR], expected[BEHAVIOUR], rtol=0, atol=1e-6)  # float32 runs; measured 1e-8
