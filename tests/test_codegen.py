"""CodeGen divides its scores after the mask: parts, edges and sums of its heads are those of plain recomputation."""

import numpy as np
import pytest
import torch
import zoo
from ablation_runs import in_dtype, logits, recorded
from edge_recomputation import recomputed
from score_terms import KEY, PARTS, PROMPT, QUERY, captured_of, plain_terms
from test_edges import LENGTH, cut_by_hand, repeated
from test_hook_operators import CASES, case_name, worst_error
from zoo import shared

import tlspectral as tls
from tlspectral.errors import ScoreMismatch
from tlspectral.hooks import ablate
from tlspectral.models.attention import attention_view

CODEGEN = ("bridge", "codegen")
SOURCES, TARGET = [(0, 1), (0, 2)], (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_masked_that_the_query_does_not_attend_to(dtype):
    model = in_dtype(*CODEGEN, dtype)
    view, tokens = attention_view(model), zoo.prompt()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    names = [view.hook_names(1)[point] for point in ("scores", "pattern")]
    seen = {}
    keep = [(name, lambda x, hook, name=name: seen.update({name: x.clone()})) for name in names]
    with torch.no_grad(), model.hooks(fwd_hooks=keep):
        model(tokens, attention_mask=mask)
    scores, pattern = seen[names[0]], seen[names[1]]
    expected = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    expected[0, :, :, :5] = False
    expected = expected.expand(scores.shape)
    # The masked scores of this model lie above half of the lowest number of their type.
    assert scores.dtype == torch.float32
    assert float(scores.min()) > torch.finfo(torch.float32).min / 2
    found = view.unmasked(1, scores)
    assert torch.equal(found[:, :, 5:], expected[:, :, 5:])  # queries of padding attend to anything
    assert not pattern[~found & expected.any(-1, keepdim=True)].any()


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_ablated_heads_follow_explicit_operators(case):
    # float32 against float64: measured 5e-7; a part left in moves a pattern by tenths.
    assert worst_error(shared(*CODEGEN), *CODEGEN, case) < 1e-6


def test_a_window_is_an_explicit_mask():
    model = shared(*CODEGEN)
    before = recorded(model, ("pattern",))[0, "pattern"]
    with ablate(model, "L0H2", "long_range", window=3, sinks=1):
        during = recorded(model, ("pattern",))[0, "pattern"]
    query, key = torch.arange(24)[:, None], torch.arange(24)
    expected = before[:, 2] * ((query - key < 3) | (key < 1))
    # float32: measured 1e-7; one key too many moves it by tenths.
    torch.testing.assert_close(during[:, 2], expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-6)
    assert torch.equal(during[:, [0, 1, 3]], before[:, [0, 1, 3]])


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("part", ["output", "rope_phase"])
def test_an_edge_is_what_plain_recomputation_gives(what, part):
    model = shared(*CODEGEN)
    with ablate(model, SOURCES, part, into=TARGET, input=what):
        found = logits(model)
    expected = recomputed(model, "bridge", SOURCES, part, *TARGET, what)
    # float32, logits of size 1: measured 3e-7. The edges move them by .02 and more.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float((found - logits(model)).abs().max()) > 1e-2


@pytest.mark.parametrize("what", ["q", "k"])
def test_effects_of_edges_are_those_of_plain_runs_with_the_edge_cut(what):
    model = shared(*CODEGEN)
    view = attention_view(model)
    tokens = repeated(view)
    table = tls.edge_effects(model, TARGET, input=what, tokens=tokens, show_progress=False).set_index("source")
    queries = torch.arange(LENGTH + 1, 2 * LENGTH + 1)
    plain = recorded(model, ("pattern",), tokens)[1, "pattern"][:, 1]
    for head in range(4):
        _, cut = cut_by_hand(view, "bridge", tokens, (0, head), TARGET, what, zero=False)
        before, after = (float(p[:, queries, queries - LENGTH + 1].double().mean()) for p in (plain, cut))
        # float32: measured 2e-8; the largest effect is .009 (queries) and .019 (keys).
        assert table.loc[f"L0H{head}", "attention"] == pytest.approx(before, abs=2e-6)
        assert table.loc[f"L0H{head}", "delta"] == pytest.approx(after - before, abs=2e-6)
    assert table["delta"].abs().max() > 1e-3


def test_rows_of_a_score_are_those_of_a_plain_recomputation():
    model = shared(*CODEGEN)
    view = attention_view(model)
    table, found = tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY), captured_of(view, 1)
    assert table.attrs["score"] == float(found[view.hook_names(1)["scores"]][0, 2, QUERY, KEY])
    assert table["total"].sum() == pytest.approx(table.attrs["score"], abs=1e-5)  # float32 scores: measured 3e-7
    terms = plain_terms(view, 1, 2, found)
    for row in table.itertuples():
        expected = terms.pop((row.query_source, row.key_source))
        # Exact angles against float32 tables: measured 8e-8 at terms of 1.5.
        np.testing.assert_allclose([getattr(row, part) for part in PARTS], expected, rtol=0, atol=2e-6)


def test_an_edited_pattern_is_refused_in_16_bits_too():
    model = in_dtype(*CODEGEN, torch.bfloat16)
    # 4 eps of the largest score, of 9; it was 4 eps of a masked one.
    assert tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY).attrs["tolerance"] < 1
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern.roll(1, -1))]),
        pytest.raises(ScoreMismatch, match="differs from the model's own attention"),
    ):
        tls.qk_attribution(model, PROMPT, "L1H2", QUERY, KEY)
