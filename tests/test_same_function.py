"""Tables are of the function that a model computes, not of how its norms are written down."""

import pandas as pd
import pytest
import torch
import zoo
from same_function import KINDS, OF_MLPS, PROMPTS, TABLES, built, has, written

pytestmark = zoo.needs_hooked


SLOW = ("faithfulness", "EAP", *(f"ablation_sweep {name}" for name in ("symmetric", "mode", "zero", "random")))
"""Tables that take lines of others."""


def cases():
    """Fast: tables of one kind, and of every kind the edges into MLPs."""
    for kind in KINDS:
        for table in filter(lambda name, kind=kind: has(kind, name), TABLES):
            fast = table == "edge_effects" or (kind == "RMS gated" and table not in SLOW)
            yield pytest.param(kind, table, marks=[] if fast else pytest.mark.slow)


def require_close(expected, found, relative):
    assert list(found) == list(expected)
    for column in expected:
        one, other = expected[column], found[column]
        if pd.api.types.is_float_dtype(one):
            assert other.isna().equals(one.isna()), column
            assert not ((other - one).abs() > relative * one.abs().max()).any(), column
        else:
            assert other.equals(one), column


@pytest.mark.parametrize("kind", KINDS)
def test_the_three_ways_are_one_function_and_no_gain_is_1(kind):
    ways = written(kind)
    expected, folded, moved = (zoo.logits(model, PROMPTS) for model in ways.values())
    assert torch.equal(moved, expected)  # factors are powers of two
    # Logits of 20 in float32: measured 8e-5. A norm whose weights are left out moves them by more than 1.
    torch.testing.assert_close(folded, expected, rtol=0, atol=5e-4)
    for name in ("as trained", "moved"):
        for block in ways[name].blocks:
            assert min(float(norm.w.detach().std()) for norm in (block.ln1, block.ln2)) > 0.2
    assert all(type(block.ln2).__name__.endswith("Pre") for block in ways["folded"].blocks)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("kind", "table"), cases())
def test_a_table_does_not_depend_on_where_the_gains_of_norms_stand(kind, table):
    expected, folded, moved = (TABLES[table](model, kind) for model in written(kind).values())
    assert len(expected) > 0
    require_close(expected, moved, 0.0)
    # Folding rounds weights in float32: at most 2.4e-5 of the largest value of a column was measured. A gain that acts
    # twice on what an MLP reads is off by tenths of it.
    require_close(expected, folded, 2e-4)
    if table in OF_MLPS:
        value = {"edge_effects": "delta", "run_circuit": "value", "faithfulness": "faithfulness"}.get(table, "estimate")
        assert float(expected[value].abs().max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch", ["use_split_qkv_input", "use_hook_mlp_in", "use_attn_result", "ungroup_grouped_query_attention"]
)
def test_a_table_does_not_depend_on_the_hook_points_that_are_switched_on(switch):
    kind = "RMS gated"
    model = built(**KINDS[kind])
    model.load_state_dict(written(kind)["as trained"].state_dict())
    getattr(model.eval(), f"set_{switch}")(True)
    for table in (*OF_MLPS, "edges into heads", "qk_attribution source", "ablation_sweep mode", "detect_heads"):
        expected = TABLES[table](written(kind)["as trained"], kind)
        require_close(expected, TABLES[table](model, kind), 2e-4)  # as above; copies of the stream round otherwise
