"""Hybrids: layers without heads are skipped and listed in every function, and their mixers are senders."""

import functools
import tempfile
from importlib.metadata import version

import numpy as np
import pytest
import torch
from edge_recomputation import columns_of, copy_loss, grabbed, patched, read_from, repeated
from families import save
from family_configs import MORE_FORMS
from pair_prompts import prompt_pairs
from zoo import prompt

import tlspectral as tls
from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import intact_run, logits_at
from tlspectral.models.stream.writes import mixed
from tlspectral.positional import BlockPrompt

HYBRIDS = {
    "bamba": (9, 18),
    "granitemoehybrid": (5, 15),
    "jamba": (4, 12),
    "lfm2": (2, 5),
    "lfm2_moe": (2, 5),
    "nemotron_h": (8, 17),
    "olmo_hybrid": (3, 7),
    "recurrent_gemma": (2, 5),
}
"""The layers with heads that can be read, as the published models begin."""
if int(version("transformer-lens").split(".")[0]) >= 4:  # TransformerLens 3.9 cannot split their gated queries
    HYBRIDS |= {"qwen3_5_text": (3, 7), "qwen3_next": (3, 7)}

SHARING = {
    "gemma4_text": MORE_FORMS["gemma4_text"]["keys of earlier layers"],
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
}

BLOCKS = BlockPrompt(torch.tensor([3, 4]), torch.tensor([[5, 6], [7, 8], [9, 10]]).unbind(), torch.tensor([5]))

# The fast tests ask of one convolution and, what is quick, of one linear attention. Of the others what is quick is
# slow; what runs many functions is slow of two state spaces, and full of their like.
ON_BOTH_LINES = (pytest.mark.slow, pytest.mark.tl4)
SLOW, FULL = ("bamba", "nemotron_h"), ("granitemoehybrid", "jamba", "lfm2_moe", "recurrent_gemma")
QUICK = dict.fromkeys(SLOW + FULL, ON_BOTH_LINES)
DEAR = {
    "olmo_hybrid": ON_BOTH_LINES,
    **dict.fromkeys(SLOW, pytest.mark.slow),
    **dict.fromkeys(FULL, (pytest.mark.slow, pytest.mark.full)),
}


def families(marks, *others):
    hybrids = [pytest.param(family, marks=marks.get(family, ())) for family in HYBRIDS]
    return pytest.mark.parametrize("family", [*hybrids, *others])


of_hybrids, of_kinds = families(QUICK), families(DEAR)


@functools.cache
def hybrid(family):
    with tempfile.TemporaryDirectory() as folder:
        save(family, SHARING.get(family, {}), folder)
        return tls.load_model(folder)


@pytest.mark.slow
@pytest.mark.tl4
@of_kinds
def test_every_function_lists_the_layers_that_it_skips(family):
    model = hybrid(family)
    view = attention_view(model)
    first, last = HYBRIDS[family]
    assert view.layers == [first, last]
    assert sorted([first, last, *(one.layer for one in view.skipped)]) == list(range(view.n_layers))
    task = tls.tasks.induction(repeated(view))
    tables = {
        "heads": tls.analyze_heads(model, null_draws=2),
        "detectors": tls.detect_heads(model, n_sequences=2, segment_length=6),
        "sweep": tls.ablation_sweep(model, "output", heads=f"L{last}", task=task),
        "edges": tls.edge_effects(model, f"L{last}H1.k", task=task),
        "composition": tls.k_composition(model, f"L{last}H1"),
        "all composition": tls.k_composition(model),
        "attribution": tls.qk_attribution(model, prompt()[:1], f"L{last}H1", 6, 3),
        "writes": tls.ov_attribution(model, prompt()[:1], f"L{last}H1", 6, by="source"),
        "positional": tls.positional_symbolic(model, BLOCKS),
    }
    for name, table in tables.items():
        skipped = table.attrs["skipped_layers"]
        assert [each["layer"] for each in skipped] == [one.layer for one in view.skipped], name
        assert {each["reason"] for each in skipped} == {one.reason for one in view.skipped}, name
    for name in ("heads", "detectors", "positional"):
        assert sorted(set(tables[name]["layer"])) == [first, last], name
    assert set(tables["edges"]["layer"]) == {first}
    pairs = tables["all composition"]
    assert (set(pairs["layer"]), set(pairs["receiver_layer"])) == ({first}, {last})
    assert list(tls.verify_scores(model).index) == [first, last]
    alone = tls.analyze_heads(model, heads=[f"L{last}H1"], null_draws=2, detectors=False)
    assert alone["name"].tolist() == [f"L{last}H1"]


@pytest.mark.fast(1)
@pytest.mark.tl4
@of_hybrids
def test_heads_of_a_skipped_layer_are_refused_with_the_reason(family):
    model = hybrid(family)
    for ask in (
        lambda: tls.analyze_heads(model, heads="L0H1"),
        lambda: tls.qk_operators(model)["L0H1"],
        lambda: tls.ablation_hooks(model, "L0", "output"),
        lambda: tls.edge_effects(model, "L0H0.k", task="induction"),
    ):
        with pytest.raises(UnsupportedArchitecture, match=r"layer 0: a \w+ layer; it has no query-key operator"):
            ask()


def mixer_write(view, layer, captured):
    """What the mixer of a layer adds, from the points of TransformerLens alone."""
    names = view.hook_names(layer)
    write = captured[names["residual_after"]] - captured[names["residual"]]
    return write - captured[names["mlp_out"]] if names["mlp_out"] in captured else write


@pytest.mark.fast(1)
@pytest.mark.tl4
@of_hybrids
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_an_edge_of_a_mixer_is_that_of_a_plain_run_with_the_edge_cut(family, what):
    model = hybrid(family)
    view, (first, last) = attention_view(model), HYBRIDS[family]
    first -= family == "nemotron_h"  # which has an MLP alone in front of its attention
    tokens = repeated(view)
    names = [name for point, name in view.hook_names(first - 1).items() if name in model.hook_dict]
    intact, captured = grabbed(view, tokens, names)
    write = mixer_write(view, first - 1, captured)
    values = read_from(model, last, what, write - write.mean((0, 1)), tokens)
    cut = patched(model, last, what, columns_of(view, last, 1, what, values), values, tokens)
    expected, plain = (copy_loss(logits, tokens) for logits in (cut, intact))
    task = tls.tasks.induction(tokens)
    table = tls.edge_effects(model, f"L{last}H1.{what}", senders=[f"L{first - 1}MIX"], measure="task", task=task)
    assert table["sender"].tolist() == [f"L{first - 1}MIX"]
    # Measured: 1e-7 nats, of effects of 1e-5 (Granite, whose layers add half of what they compute) to 1e-2.
    assert float(table["delta"].iloc[0]) == pytest.approx(expected - plain, abs=1e-6)
    assert abs(expected - plain) > 2e-6


@pytest.mark.fast(2)
@pytest.mark.tl4
@families(QUICK, "gemma3n", "gemma4_text", "glm_moe_dsa")
def test_replay_behind_mixers_or_where_layers_share_keys_is_the_whole_run(family):
    model = hybrid(family)
    view, tokens = attention_view(model), prompt()
    whole = logits_at(view, tokens, slice(None)).detach()
    layers = range(1, view.n_layers)
    intact = intact_run(view, tokens, slice(None), layers, batch=1, reduce=lambda batch, logits: None)
    for layer in layers:
        # Measured: at most 8e-7. A state that is carried from one copy of the batch to the next moves logits by 1e-2.
        torch.testing.assert_close(intact.replay([layer] * 2, slice(None)), whole.repeat(2, 1, 1), rtol=0, atol=5e-6)
    replays = intact.replay(layers, slice(None))
    torch.testing.assert_close(replays, whole.repeat(len(layers), 1, 1), rtol=0, atol=5e-6)


@of_hybrids
def test_the_terms_of_a_score_sum_to_it_with_mixers_among_the_sources(family):
    model, last = hybrid(family), HYBRIDS[family][1]
    view = attention_view(model)
    table = tls.qk_attribution(model, prompt()[:1], f"L{last}H1", 6, 3)
    assert abs(table.attrs["remainder"]) <= 0.1 * table.attrs["tolerance"]
    mixers = {f"L{layer}MIX" for layer in range(last) if view.writes_more(layer)}
    assert mixers <= set(table["key_source"])
    assert {f"L{layer}MIX" for layer, *_ in view.skipped} <= mixers


@of_kinds
@pytest.mark.filterwarnings("ignore:2 distinct pairs")
def test_circuits_of_all_edges_and_of_none_are_the_runs_of_the_two_prompts(family):
    # `pairs_of` compares both with plain runs, so that a circuit is measured at all.
    model, last = hybrid(family), HYBRIDS[family][1]
    clean, other = prompt_pairs(2, 24, seed=0, at=3)
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    edges = tls.edge_effects(model, [f"L{last}H1.q", "logits"], task=task, replace="counterfactual")
    assert np.isfinite(edges["delta"]).all()
    assert {"embedding", f"L{last - 1}MIX", f"L{last}H0"} <= set(edges["sender"])
    found = tls.edge_effects(model, task=task, screen="gradient")
    every = tls.run_circuit(model, zip(found["sender"], found["receiver"], strict=True), task)
    plain = tls.evaluate(model, task)
    # Measured: equal. Another set of edges moves the score by tenths.
    np.testing.assert_allclose(every.value, plain.value, rtol=0, atol=1e-5)


def test_a_mixer_beside_heads_writes_what_its_module_puts_out():
    model = hybrid("falcon_h1")
    view = attention_view(model)
    assert view.layers == [0, 1, 2]
    names, module = list(view.hook_names(0).values()), "blocks.0.mamba.hook_out"
    _, captured = grabbed(view, prompt(), [*names, module])
    factors = model.original_model.config
    assert 1.0 not in (factors.ssm_out_multiplier, factors.attention_out_multiplier, factors.key_multiplier)
    expected = captured[module].double() * factors.ssm_out_multiplier
    # Measured: 4e-8, at a stream of 1. Without the factor on the attention it is off by 1e-2.
    torch.testing.assert_close(mixed(view, 0, captured, in_float64), expected, rtol=0, atol=2e-6)
    table = tls.qk_attribution(model, prompt()[:1], "L2H1", 6, 3)
    assert abs(table.attrs["remainder"]) <= 0.1 * table.attrs["tolerance"]
    assert {"L0MIX", "L1MIX", "L0MLP", "L1H3"} <= set(table["key_source"])


def test_a_mixer_that_does_not_exist_is_refused():
    model = hybrid("lfm2")
    with pytest.raises(BadHead, match="L2MIX does not exist: layer 2 has only heads and an MLP"):
        tls.edge_effects(model, "L5H1.k", senders=["L2MIX"], task="induction")


@of_hybrids
def test_a_model_of_skipped_layers_alone_is_refused(family):
    view = attention_view(hybrid(family))
    object.__setattr__(view, "n_layers", 2)  # a view of the first layers
    with pytest.raises(UnsupportedArchitecture, match=r"layer 0: a \w+ layer; it has no query-key operator"):
        _ = view.layers
