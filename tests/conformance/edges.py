"""One sender taken out of what one head reads, and one score as a sum over sources, beside runs with edited streams."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from ablation_runs import LEARNED_POSITIONS, a_part, logits
from edge_recomputation import LENGTH, copy_loss, cut_beside_heads, cut_by_hand, edge_of, grabbed, recomputed, repeated
from ov_terms import PlainHead, whole_run
from score_terms import KEY, PARTS, PROMPT, QUERY, captured_of, own_score, plain_terms, scores_of_run, sources_of

import tlspectral as tls
from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import EditNotHonored, ScoreMismatch
from tlspectral.hooks import ablate
from tlspectral.hooks.parts import part_of
from tlspectral.models.stream.mlp import mlp_reads

from .rows import asked, of_heads_alone, right

# --- ablate into one head ---


@asked(every=12, what=("q", "k", "v"), kind=("output", "scores"))
@pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
def an_edge_is_what_plain_recomputation_gives(row, what, kind):
    senders, layer, head = edge_of(row.view)
    part = "output" if kind == "output" else a_part(row.name)
    into = f"L{layer}H{head}.{what}"
    if part == "rope_phase" and not row.read_right:
        message = "the model's scores do not follow from"
        with pytest.raises(EditNotHonored, match=message), ablate(row.model, senders, part, into=into):
            logits(row.model)
        return
    with ablate(row.model, senders, part, into=into):
        found = logits(row.model)
    expected = recomputed(row.model, senders, part, layer, head, what)
    # Logits of size 2 in float32. Measured over the zoo, on TransformerLens 3.9 and 4.3: at most 9e-7. The edge moves
    # them by a thousandth at least (median 0.1).
    assert float((found - expected).abs().max()) < 1e-5
    assert float((found - row.logits).abs().max()) > 1e-3


# --- edge_effects ---


def edges_of(row, what, measure, replace):
    options = {"measure": measure, "replace": replace, "task": tls.tasks.induction(repeated(row.view))}
    return tls.edge_effects(row.model, tls.hooks.receivers([(1, 1), (1, 2)], what), **options)


def row_of(table, sender, receiver):
    """The row of an edge into a head, of a table that counts a head to each of its receivers."""
    of_receiver = table["receiver_head"] == receiver[1]
    if not of_receiver.any():  # on a task heads that share keys or values have one row, of the first
        of_receiver = table["reached"].str.split(", ").map(lambda heads: f"L{receiver[0]}H{receiver[1]}" in heads)
    (found,) = table[of_receiver & (table["sender"] == f"L{sender[0]}H{sender[1]}")].itertuples()
    return found


@asked(right, every=9, what=("k", "q"))
def attention_over_an_edge_is_that_of_a_plain_run_with_the_edge_cut(row, what):
    replace, tokens = {"k": "mean", "q": "zero"}[what], repeated(row.view)
    table = edges_of(row, what, "ind", replace)
    queries = torch.arange(LENGTH + 1, 2 * LENGTH + 1)
    _, intact = grabbed(row.view, tokens, [row.view.hook_names(layer)["pattern"] for layer in (0, 1)])
    for receiver, sender in (((1, 1), (0, 1)), ((1, 1), (0, 0)), ((1, 2), (0, 2))):
        found = row_of(table, sender, receiver)
        _, pattern = cut_by_hand(row.view, tokens, sender, receiver, what, zero=replace == "zero")
        before = intact[row.view.hook_names(receiver[0])["pattern"]][:, receiver[1]]
        expected, plain = (float(p[:, queries, queries - LENGTH + 1].double().mean()) for p in (pattern, before))
        # Measured over the zoo: 4e-7, the model's own float32. A frozen norm or another group's keys are off by 1e-3.
        assert found.attention == pytest.approx(plain, abs=2e-6)
        assert found.delta == pytest.approx(expected - plain, abs=2e-6)
    # Measured: .0009 (BLOOM) to .1, so that a wrong edge is seen.
    assert table["delta"].abs().max() > 5e-4


@asked(right, every=12, what=("k", "v", "q"))
def a_task_loses_over_an_edge_what_it_loses_in_a_plain_run_with_the_edge_cut(row, what):
    tokens = repeated(row.view)
    table = edges_of(row, what, "task", "mean")
    intact = float(tls.evaluate(row.model, tls.tasks.induction(tokens)))
    for receiver, sender in (((1, 1), (0, 1)), ((1, 2), (0, 2))):
        cut, _ = cut_by_hand(row.view, tokens, sender, receiver, what, zero=False)
        expected = copy_loss(cut, tokens)
        # Measured over the zoo: 3e-7 nats. The largest effects are 6e-5 (NeoX) to 1e-2.
        assert row_of(table, sender, receiver).delta == pytest.approx(expected - intact, abs=2e-6)
    assert table["delta"].abs().max() > 4e-5


@asked(right, every=6, forms=True)
def edges_into_an_mlp_and_the_logits_and_at_a_position_are_plain_runs_with_them_cut(row):
    view, tokens = row.view, repeated(row.view)
    task = replace(tls.tasks.induction(tokens), positions={"S2": [LENGTH + 1, LENGTH + 3, 2]})
    at = torch.tensor(task.positions["S2"])
    intact = float(tls.evaluate(row.model, task))
    receivers = ["L1H1.k", *([] if mlp_reads(view, 1) is None else ["L1MLP"]), "logits"]
    options = {"senders": ["L0H1"], "task": task, "measure": "task"}
    for place in (None, at):
        table = tls.edge_effects(row.model, receivers, at=None if place is None else "S2", **options)
        found = table.set_index("input")["delta"]
        by_hand = {"k": cut_by_hand(view, tokens, (0, 1), (1, 1), "k", zero=False, at=place)[0]}
        by_hand |= {"mlp": cut_beside_heads(view, tokens, (0, 1), 1, at=place)} if len(receivers) > 2 else {}
        by_hand["logits"] = cut_beside_heads(view, tokens, (0, 1), None, at=place)
        assert set(found.index) == set(by_hand)
        for what, cut in by_hand.items():
            # Nats, in float32, as above. A norm that is held, or another position, is off by 1e-4 and more.
            assert found[what] == pytest.approx(copy_loss(cut, tokens) - intact, abs=2e-6), what
        assert found.abs().max() > 2e-5  # ten times the bound; the smallest, of Bloom, is 4.6e-5


# --- qk_attribution, ov_attribution ---


@functools.lru_cache(maxsize=1)
def last_layer_of(row):
    return captured_of(row.view, row.view.n_layers - 1)


@asked(of_heads_alone, every=3)
def terms_sum_to_the_score_and_each_is_that_of_a_plain_recomputation(row):
    view, name = row.view, row.name
    layer, head = view.n_layers - 1, 3 if view.n_heads(0) > 3 else 2
    if not row.read_right:
        with pytest.raises(ScoreMismatch, match="look for hooks"):
            tls.qk_attribution(row.model, PROMPT, (layer, head), QUERY, KEY)
        return
    table = tls.qk_attribution(row.model, PROMPT, (layer, head), QUERY, KEY)
    assert table["query_term"].equals(table["query_source"].rename("query_term"))
    attrs, found = table.attrs, last_layer_of(row)
    np.testing.assert_allclose(table[PARTS].sum(axis=1), table["total"], rtol=0, atol=1e-12)  # the same four numbers
    # Measured: at most 1.6e-2 of the tolerance of 1e-4 + 1e-5 |score|. A source that is left out is off by tenths.
    assert abs(attrs["remainder"]) <= 0.1 * attrs["tolerance"] <= 0.1 * (1e-4 + 1e-5 * abs(attrs["score"]))
    assert table["total"].sum() + attrs["remainder"] == pytest.approx(attrs["score"], abs=1e-12)
    scores = found.get(view.hook_names(layer).get("scores"))
    if scores is not None and attrs["softcap"] is None:
        assert attrs["score"] == float(scores[0, head, QUERY, KEY])
    assert attrs["attention"] == float(found[view.hook_names(layer)["pattern"]][0, head, QUERY, KEY])
    assert attrs["norm_behind_held"] == (name in ("gemma2", "gemma3", "olmo2"))
    sources = set(table["query_source"])
    assert ("positions" in sources) == (name in LEARNED_POSITIONS)
    assert ("alibi" in sources) == (name == "bloom")
    assert sources - {"bias", "alibi"} == set(table["key_source"]) - {"bias", "alibi"}
    terms = plain_terms(view, layer, head, found)
    pairs = zip(table["query_source"], table["key_source"], strict=True)
    rows = dict(zip(pairs, table[PARTS].to_numpy().tolist(), strict=True))
    alibi = rows.pop(("alibi", "alibi"), None)
    if alibi is not None:
        slope = view.raw(layer).alibi.slopes[head]
        # The bridge adds slope * position; a HookedTransformer counts positions from the query.
        place = KEY if row.backend == "bridge" else KEY - QUERY
        np.testing.assert_allclose(alibi, [0, 0, 0, slope * place], rtol=0, atol=1e-5)
    # Exact angles against the model's float32 tables: measured 1.5e-7 at terms of 4. A wrong factor is off by tenths.
    for pair, parts in rows.items():
        np.testing.assert_allclose(parts, terms.pop(pair), rtol=0, atol=2e-6, err_msg=str(pair))
    assert np.abs(list(terms.values()) or [0.0]).max() == 0.0, "only sources that write nothing have no row"
    assert list(table["total"].abs()) == sorted(table["total"].abs(), reverse=True)


@asked(of_heads_alone, every=3)
def what_a_head_writes_is_the_sum_of_a_plain_recomputation(row):
    view, layer = row.view, row.view.n_layers - 1
    found, _ = whole_run(row.model, view, PROMPT)
    direction = torch.randn(view.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head, along = PlainHead(view, found, layer, 1, QUERY), direction.numpy()
    size = np.linalg.norm(head.own) * float(direction.norm())
    table = tls.ov_attribution(row.model, PROMPT, (layer, 1), QUERY, direction=direction, by="source")
    for one in table[:40].itertuples():
        # Measured 1e-16, float64.
        assert abs(one.contribution - head.term(one.source, one.position) @ along) < 1e-12 * size
    # The head's own z in float32: measured 6e-8. A norm, a gate or a bias that is left out is off by hundredths.
    assert abs(table["contribution"].sum() - head.own @ along) < 1e-6 * size
    assert table.attrs["remainder"] < 1e-6


@asked(lambda row: right(row) and of_heads_alone(row), every=6)
def modes_and_frequencies_sum_to_the_score_of_sources(row):
    layer = row.view.n_layers - 1
    scores = tls.scores(row.model, PROMPT, (layer, 1))
    found = {"source": tls.qk_attribution(row.model, PROMPT, (layer, 1), QUERY, KEY)}
    for by in ("mode", *(["frequency"] if row.view.rotary(layer) is not None else [])):
        found[by] = tls.qk_attribution(row.model, PROMPT, (layer, 1), QUERY, KEY, by=by)
        # Sources are of float32 writes: measured 1.4e-6. A mode or a frequency that is left out is off by hundredths.
        np.testing.assert_allclose(found[by][PARTS].sum(), found["source"][PARTS].sum(), rtol=0, atol=1e-5)
        if row.name != "bloom":  # whose ALiBi is known but for a constant of each query
            assert found[by]["total"].sum() == pytest.approx(scores.iloc[QUERY, KEY], abs=1e-5)


@asked(lambda row: right(row) and of_heads_alone(row), every=6)
def terms_of_a_part_sum_to_what_ablate_removes_from_the_score(row):
    layer = row.view.n_layers - 1
    for head in (0, row.view.n_heads(layer) - 1):
        table = tls.qk_attribution(row.model, PROMPT, (layer, head), QUERY, KEY)
        scores = scores_of_run(row.view, layer, head, last_layer_of(row))
        for part, removed in (("symmetric",) * 2, ("antisymmetric",) * 2, ("phase", "rope_phase")):
            if scores.key.rotation is None and part == "phase":
                assert not table["phase"].any()
                continue
            added, _ = part_of(removed).change(scores, torch.ones(2 * [PROMPT.shape[1]]).bool())
            # Measured: 1.2e-6, by the float32 rounding of queries and keys. The plain transpose, without
            # the factors of a query/key norm, is off by tenths.
            assert table[part].sum() == pytest.approx(-float(added[0, 0, QUERY, KEY]), abs=1e-5), part


@asked(lambda row: right(row) and of_heads_alone(row), every=6)
def what_a_score_loses_is_what_a_run_with_edited_streams_says(row):
    view = row.view
    layer, head, count = view.n_layers - 1, 1, 6
    table = tls.qk_attribution(row.model, PROMPT, (layer, head), QUERY, KEY, remove=count)
    written, point = sources_of(view, layer, last_layer_of(row)), view.hook_names(layer)["residual"]

    @functools.cache
    def score(of_query=None, *of_key):
        """The score of a run in which the head's layer reads streams without what these sources wrote."""
        at_query = 0 if of_query is None else written[of_query][QUERY]
        at_key = sum(written[source][KEY] for source in of_key)

        def edit(residual, hook):
            edited = in_float64(residual).clone()
            edited[0, QUERY] -= at_query
            edited[0, KEY] -= at_key
            return edited.to(residual)

        return own_score(view, layer, head, captured_of(view, layer, edits=[(point, edit)]))

    intact, compared = score(), 0
    for each in table[:count].itertuples():
        if {each.query_source, each.key_source} & {"bias", "alibi"}:
            continue
        a, b = each.query_source, each.key_source
        expected = intact - score(a) - score(None, b) + score(a, b)
        # Measured: 1.5e-6, by float32 in the four runs. With frozen norms it would be `total`, off by 0.09 and more.
        assert each.measured == pytest.approx(expected, abs=1e-5)
        compared += 1
    assert compared > 0
    assert table["measured"][count:].isna().all()
    no_norm = view.raw(layer).norm.kind == "none" and view.raw(layer).q_norm is None
    if not no_norm:
        assert (table["measured"] - table["total"])[:count].abs().max() > 1e-2, "frozen norms would not be seen"
    gone = table.attrs["removed_key_sources"]
    of_gone = table["key_source"].isin(gone)
    assert table.attrs["joint_score_predicted"] == pytest.approx(table.loc[of_gone, "total"].sum(), abs=1e-10)
    if not {"bias", "alibi"} & set(gone):
        expected = intact - score(None, *gone)
        assert table.attrs["joint_score_measured"] == pytest.approx(expected, abs=1e-5)
