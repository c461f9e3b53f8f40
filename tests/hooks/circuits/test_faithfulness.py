"""`faithfulness` and `run_circuit`: planted circuits, nulls of equal size, areas, refusals."""

import copy
import inspect

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import zoo
from attribution_nodes import EDGES, HEAD, QUERY
from pair_prompts import edges_of, prompt_pairs

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.hooks.circuits import circuit as room
from tlspectral.hooks.circuits.estimates import edge_estimates
from tlspectral.hooks.circuits.pairs import pairs_of
from tlspectral.models.reading import attention_view

PLANTED = {"embedding", "L0H1", "L0H3", "L1H2"}
CLEAN, OTHER = prompt_pairs(8, 9, seed=5)


@pytest.fixture(scope="module")
def planted():
    """A Llama in which two paths carry all: the embedding through L0H1 and L1H2, and through L0H3."""
    model = copy.deepcopy(zoo.hf_model("llama"))
    size = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            block.mlp.down_proj.weight.zero_()
            weight = block.self_attn.o_proj.weight.clone().zero_()
            for head in range(model.config.num_attention_heads):
                if f"L{index}H{head}" in PLANTED:
                    columns = slice(head * size, (head + 1) * size)
                    weight[:, columns] = 3 * block.self_attn.o_proj.weight[:, columns]
            block.self_attn.o_proj.weight.copy_(weight)
    return tls.load_model(model)


def task_of(model):
    """Answers by which the two sides differ in every pair: those that the clean run prefers."""
    with torch.no_grad():
        change = model(CLEAN)[:, -1] - model(OTHER)[:, -1]
    return tls.logit_difference(CLEAN, change.argmax(-1).tolist(), change.argmin(-1).tolist(), counterfactual=OTHER)


def ranked(model, task):
    pairs = pairs_of(attention_view(model), task)
    table = edges_of(pairs.graph, pairs.graph.possible)
    return pairs, table.assign(estimate=edge_estimates(pairs, "EAP-IG").terms.sum(0)[0][pairs.graph.places(table)])


def test_a_planted_circuit_is_recovered(planted):
    asked = task_of(planted)
    pairs, table = ranked(planted, asked)
    inside = table["sender"].isin(PLANTED) & (
        table["receiver"].isin([f"L1KV1.{what}" for what in "kv"] + ["L1H2.q", "logits"])
        | table["receiver"].isin([f"L0KV{group}.{what}" for group in (0, 1) for what in "kv"] + ["L0H1.q", "L0H3.q"])
    )
    assert table.loc[~inside, "estimate"].abs().max() == 0  # nothing is written there, or nothing reads it
    # The pairs differ before the last token, which alone is read by the logits and asks in L1H2.
    idle = (table["sender"] == "embedding") & table["receiver"].isin(["L1H2.q", "logits"])
    assert table.loc[inside & ~idle, "estimate"].abs().min() > 0
    whole, without = (tls.run_circuit(planted, table[chosen], asked) for chosen in (inside, ~inside))
    intact, none = pairs.plain_values().mean(1)
    assert float(whole) == pytest.approx(intact, abs=1e-4)  # float32: 1e-6 measured, a gap of 1
    assert float(without) == pytest.approx(none, abs=1e-4)
    one_path = inside & ~table[["sender", "receiver"]].eq("L1H2").any(axis=1) & (table["sender"] != "L1H2")
    assert 0.05 < (float(tls.run_circuit(planted, table[one_path], asked)) - none) / (intact - none) < 0.95


@pytest.mark.slow
def test_the_heads_of_the_induction_model_carry_the_copied_token():
    """Of [BOS, r, r] the pair has another token behind the first copy of the last one: values alone tell them apart."""
    model = tls.load_model("tiny-rope")
    stream = torch.Generator().manual_seed(0)
    clean, other, correct, wrong = [], [], [], []
    for place in range(3, 15):
        drawn = torch.randperm(model.cfg.d_vocab - 1, generator=stream) + 1
        clean.append(torch.cat([torch.tensor([0]), drawn[:20], drawn[: place + 1]]))
        other.append(clean[-1].clone())
        other[-1][place + 2] = drawn[20]
        correct.append(int(drawn[place + 1]))
        wrong.append(int(drawn[20]))
    asked = tls.logit_difference(clean, correct, wrong, counterfactual=other)
    _, table = ranked(model, asked)
    strongest = table.sort_values("estimate", key=abs, ascending=False).head(8)
    induction = [f"L1H{head}" for head in range(4)]
    assert set(strongest["sender"] + strongest["receiver"]) == {
        *(f"{head}logits" for head in induction),
        *(f"embedding{head}.v" for head in induction),
    }
    with pytest.warns(UserWarning, match=r"share of 0\.1 every random circuit is the circuit itself"):
        found = tls.faithfulness(model, table, asked, sizes=[0.05, 0.1, 1.0], null=4)
    by_size = found[found["circuit"] == "edges"].set_index("n_edges")
    assert by_size.loc[8, "faithfulness"] > 0.7  # .78 measured
    assert by_size.loc[81, "faithfulness"] == pytest.approx(1, abs=1e-5)
    assert list(by_size["n_live"]) == sorted(by_size["n_live"])


@pytest.mark.slow
def test_nulls_have_the_size_and_the_shape_of_the_circuit(planted):
    asked = task_of(planted)
    pairs, table = ranked(planted, asked)
    graph, rng = pairs.graph, np.random.default_rng(0)
    mask = graph.kept(table.sort_values("estimate", key=abs, ascending=False).head(20))
    layers = [(one.layer, one.input) for one in graph.receivers], [(one.layer, one.kind) for one in graph.senders]

    def profile(kept):
        rows, places = np.nonzero(kept)
        return sorted((layers[0][row], layers[1][place]) for row, place in zip(rows, places, strict=True))

    for _ in range(5):
        relabelled, random = room.relabelled_circuit(graph, mask, rng), room.random_circuit(graph, mask, rng)
        assert graph.on_a_path(relabelled).sum() == graph.on_a_path(mask).sum()
        assert profile(relabelled) == profile(random) == profile(mask)
        assert not (relabelled | random)[~graph.possible].any()
    found = tls.faithfulness(planted, table, asked, sizes=[0.1, 0.3], null=3)
    assert found.groupby("circuit").size().to_dict() == {"edges": 2, "random": 6, "relabelled": 6}
    assert found.loc[found["circuit"] != "edges", "low"].isna().all()
    edges = found[found["circuit"] == "edges"].dropna(subset="low")  # at .3 pairs differ by less than .05 of the gap
    assert len(edges) == 1
    assert (edges["low"] <= edges["faithfulness"]).all()
    assert (edges["faithfulness"] <= edges["high"]).all()


@pytest.mark.slow
def test_fewer_than_eight_pairs_have_no_interval(planted):
    asked = task_of(planted)
    _, table = ranked(planted, asked)
    answers = asked.metric.correct[:7], asked.metric.wrong[:7]
    seven = tls.logit_difference(CLEAN[:7], *answers, counterfactual=OTHER[:7])
    found = tls.faithfulness(planted, table, seven, sizes=[0.1], null=0)
    assert found[["low", "high"]].isna().all(axis=None)
    whole = tls.faithfulness(planted, table, asked, sizes=[0.1], null=0).iloc[0]
    pairs = pairs_of(attention_view(planted), asked)
    kept = pairs.graph.kept(table.sort_values("estimate", key=abs, ascending=False).head(int(whole["n_edges"])))
    intact, none = pairs.plain_values()
    carried = pairs.circuit_values([kept])[0] - none
    # A t test at either end is at its edge: p of .05.
    for end in (whole["low"], whole["high"]):
        found_p = scipy.stats.ttest_1samp(carried - end * (intact - none), 0).pvalue
        assert found_p == pytest.approx(0.05, abs=1e-3)  # float32 values in another batch


def test_every_circuit_of_edges_says_how_many_pairs_it_has_not_seen(planted):
    asked = task_of(planted)
    _, table = ranked(planted, asked)
    found = tls.faithfulness(planted, table, asked, sizes=[0.1, 0.2, 1.0], null=1)
    edges = found[found["circuit"] == "edges"]
    assert found.loc[found["circuit"] != "edges", ["unseen", "worst"]].isna().all(axis=None)
    assert edges["unseen"].tolist() == pytest.approx([1 - 0.05 ** (1 / 8)] * 3, abs=1e-12)
    little, some, every = (edges.iloc[row] for row in range(3))
    assert little["worst"] == little["low"] < 0  # unseen pairs that carry nothing would raise it
    assert 0 < some["worst"] == pytest.approx(0.05 ** (1 / 8) * some["low"], abs=1e-12)
    # All edges carry all of each pair: eight pairs without a failure show no more than .69.
    assert every[["low", "high"]].isna().all()
    assert every["worst"] == pytest.approx(0.05 ** (1 / 8), abs=1e-5)  # float32 values of both ends
    # Copies of a pair are one pair.
    answers = asked.metric.correct[:4], asked.metric.wrong[:4]
    twice = tls.logit_difference(
        [*CLEAN[:4], *CLEAN[:4]], *[[*given, *given] for given in answers], counterfactual=[*OTHER[:4], *OTHER[:4]]
    )
    with pytest.warns(UserWarning, match="of 8 prompts 4 are distinct"):
        found = tls.faithfulness(planted, table, twice, sizes=[0.1], null=0)
    assert found["unseen"].iloc[0] == pytest.approx(1 - 0.05 ** (1 / 4), abs=1e-12)


@pytest.mark.slow
def test_the_procedure_scores_pairs_by_circuits_that_were_chosen_without_them(planted):
    clean, other = prompt_pairs(18, 9, seed=6)
    with torch.no_grad():
        change = planted(clean)[:, -1] - planted(other)[:, -1]
    asked = tls.logit_difference(clean, change.argmax(-1).tolist(), change.argmin(-1).tolist(), counterfactual=other)
    given = {"sizes": [0.05, 0.2, 1.0], "choose": "bootstrap", "method": "EAP", "draws": 6}
    found = tls.faithfulness(planted, None, asked, **given)
    counts = found.groupby(["circuit", "share"]).size().unstack(fill_value=0)
    assert counts.loc["edges"].tolist() == [6, 6, 6]
    assert counts.loc["random"].tolist() == counts.loc["relabelled"].tolist() == [6, 6, 0]
    curve = found[found["circuit"] == "procedure"]
    assert len(curve) == 3
    assert curve["faithfulness"].iloc[-1] == pytest.approx(1.0, abs=1e-5)  # all edges, float32
    # By hand: each sample's circuit, and the pairs out of it.
    pairs, rng = pairs_of(attention_view(planted), asked), np.random.default_rng(0)
    terms = edge_estimates(pairs, "EAP").terms[:, 0]
    intact, none = pairs.plain_values()
    size = round(0.2 * pairs.graph.possible.sum())
    of_pair = [[] for _ in range(18)]
    for draw in range(6):
        times = rng.multinomial(18, np.full(18, 1 / 18))
        estimate = np.abs(np.tensordot(times, terms, 1))
        estimate[~pairs.graph.possible] = -1
        kept = np.zeros(estimate.size, dtype=bool)
        kept[np.argsort(-estimate.ravel(), kind="stable")[:size]] = True
        [value] = pairs.circuit_values([kept.reshape(estimate.shape)])
        out = times == 0
        row = found[(found["circuit"] == "edges") & (found["draw"] == draw)].iloc[1]
        # float32 in other batches, and edges without effect that tie: 1e-6 measured, values of 1.
        assert row["faithfulness"] == pytest.approx((value - none)[out].mean() / (intact - none)[out].mean(), abs=1e-4)
        for place in np.flatnonzero(out):
            of_pair[place].append(value[place])
    known = np.array([bool(values) for values in of_pair])
    mean = np.array([np.mean(values) for values in of_pair if values])
    expected = (mean - none[known]).mean() / (intact - none)[known].mean()
    assert curve["faithfulness"].iloc[1] == pytest.approx(expected, abs=1e-4)
    assert set(found.columns).isdisjoint({"low", "high"})
    for options, said in (
        ({"edges": None}, "give a table of edges, or edges=None with"),
        ({"edges": found, "choose": "bootstrap"}, "give a table of edges, or edges=None with"),
        ({"edges": None, "choose": "bootstrap", "draws": 0}, "draws is how many bootstrap samples"),
    ):
        with pytest.raises(ValueError, match=said):
            tls.faithfulness(planted, task=asked, **options)
    with pytest.raises(ValueError, match="needs 16 distinct pairs, and the task has 8"):
        tls.faithfulness(planted, None, task_of(planted), choose="bootstrap")


@pytest.mark.slow
def test_stable_edges_come_first_where_they_rank(planted):
    asked = task_of(planted)
    table = tls.edge_effects(planted, task=asked, screen=10, method="EAP")
    turned = table.assign(selected=1 - table["estimate"].abs().rank(pct=True))
    pairs = pairs_of(attention_view(planted), asked)
    order = room._ranked(pairs.graph, turned, "selected")
    assert order.tolist()[:5] == room._ranked(pairs.graph, turned.assign(estimate=turned["selected"])).tolist()[:5]
    assert set(order) == set(room._ranked(pairs.graph, table))
    with pytest.raises(ValueError, match="rank= must be 'selected' or None"):
        room._ranked(pairs.graph, table, "effect")
    with pytest.raises(ValueError, match="needs a value of selected for each edge"):
        room._ranked(pairs.graph, table.assign(selected=np.nan), "selected")


def test_areas_are_trapezoids_over_the_share():
    table = pd.DataFrame({"share_expanded": [0.01, 0.1, 1.0], "faithfulness": [0.0, 0.5, 1.0]})
    areas = room._areas(table)
    assert areas == {
        "cpr": pytest.approx(0.09 * 0.25 + 0.9 * 0.75),
        "cmd": pytest.approx(0.09 * 0.75 + 0.9 * 0.25),
        "cpr_log": pytest.approx(0.5),
        "cmd_log": pytest.approx(0.5),
    }


def test_live_edges_lie_on_a_path(planted):
    graph = pairs_of(attention_view(planted), task_of(planted)).graph
    chain = [("embedding", "L0KV0.v"), ("L0H1", "L1H2.q"), ("L1H2", "logits")]
    dead = [("embedding", "L1H3.q"), ("L0H2", "L0MLP")]
    mask = graph.kept(chain + dead)
    live = edges_of(graph, graph.on_a_path(mask))
    assert set(zip(live["sender"], live["receiver"], strict=True)) == {*chain}
    assert not graph.on_a_path(graph.kept(chain[:2])).any()


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([("L9H0", "logits")], "'L9H0' is not a sender of this model"),
        ([("L0H0", "L0H1.q")], "there is no edge from L0H0 to L0H1.q: the receiver reads before the sender writes"),
        ([("embedding", "L5MLP")], "L5MLP does not exist"),
        ([("embedding", "L1KV7.k")], "L1KV7.k does not exist"),
    ],
)
def test_edges_that_do_not_exist_are_refused(planted, edges, words):
    with pytest.raises(BadHead, match=words):
        tls.run_circuit(planted, edges, task_of(planted))


@pytest.mark.parametrize(
    ("pairs", "metric", "said"),
    [
        (8, None, r"The gap is \S+ with standard error \S+: give more pairs, or others that the model tells apart$"),
        (1, None, r"The gap is \S+ for one distinct pair, so its error is unknown: give two distinct pairs or more$"),
        (
            8,
            lambda logits, tokens, mask: logits[:, 0, 0] * 0,
            "The gap is 0.000 on every pair: give pairs whose two prompts ",
        ),
    ],
)
def test_a_gap_without_shares_is_refused_with_what_was_found(planted, pairs, metric, said):
    clean, other = CLEAN[:pairs], OTHER[:pairs]
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    if metric is not None:
        task = tls.Task(clean, metric, predict=-1, counterfactual=other)
    with pytest.raises(ValueError, match=f"too close for a share of their gap\. {said}"):
        tls.faithfulness(planted, ranked(planted, task_of(planted))[1], task)
    if pairs == 8 and metric is None:
        open_context = r"`ablate` context on L0H0 \(output\) is open"
        with tls.ablate(planted, "L0H0", "output"), pytest.raises(ValueError, match=f"tells apart; an {open_context}"):
            tls.faithfulness(planted, ranked(planted, task_of(planted))[1], task)


def test_what_is_no_share_is_refused_and_shared_pairs_are_named(planted):
    asked = task_of(planted)
    pairs, table = ranked(planted, asked)
    with pytest.raises(ValueError, match="has no counterfactual prompts"):
        tls.run_circuit(planted, [], tls.logit_difference(CLEAN, 7, 10))
    with pytest.raises(ValueError, match=r"must be a table .*; found AttributionResult: .*; .* has edges, .*'L0H1'"):
        inspect.unwrap(room._ranked)(pairs.graph, EDGES)
    with pytest.raises(ValueError, match="has neither estimate nor delta"):
        tls.faithfulness(planted, table[["sender", "receiver"]], asked)
    with pytest.warns(UserWarning, match=r"share of 0\.9999 every random circuit is the circuit itself"):
        tls.faithfulness(planted, table, asked, sizes=[0.9999], null=2)
    table.attrs["pairs_sha256"] = pairs.digests[:3]
    with pytest.warns(UserWarning, match="3 of 8 pairs are among those on which the edges were found"):
        tls.faithfulness(planted, table, asked, sizes=[1.0])
    with pytest.warns(UserWarning, match="3 of 8 pairs are among those on which the edges were found"):
        tls.run_circuit(planted, table.head(4), asked)
    with pytest.warns(UserWarning, match="3 of 8 pairs are among those"):  # the same pairs, exchanged
        tls.run_circuit(planted, table.head(4), asked.denoising())


@pytest.mark.parametrize(
    ("edges", "task", "words"),
    [
        (["L0H1"], None, "edges= must be a table of edge_effects, or a list of pairs of names .*; found 'L0H1'"),
        (EDGES, None, r"found AttributionResult.*has edges, .* give the names: \('L0H1', 'L1H2\.q'\)"),
        ([(HEAD, QUERY, -1.0)], None, r"give the names: \('L0H1', 'L1H2\.q'\)"),
        (("L0H1", "logits"), None, "found 'L0H1'"),
        ("L0H1->logits", None, "found 'L0H1->logits'"),
        ([("L0H1", "logits", 3)], None, r"found \('L0H1', 'logits', 3\)"),
        (None, None, "found None"),
        (pd.DataFrame({"sender": ["L0H1"]}), None, "the table of edges has no column receiver"),
        ([], "induction", "induction has no counterfactual prompts: give Task"),
        ([], "other", "'other' is not a task: task must be a tls.Task"),
    ],
)
def test_what_names_no_edges_or_no_task_is_refused(planted, edges, task, words):
    with pytest.raises(ValueError, match=words):
        # Unwrapped, since the type check of the tests would refuse some of these first.
        inspect.unwrap(tls.run_circuit)(planted, edges, task or task_of(planted))


@pytest.mark.parametrize("sizes", [[-1], [2], [0], [], 0.1, ["all"], [True], [float("nan")]])
def test_sizes_that_are_no_shares_are_refused(planted, sizes):
    with pytest.raises(ValueError, match="sizes= must be a list of shares of all edges, above 0 and at most 1; found"):
        inspect.unwrap(tls.faithfulness)(planted, pd.DataFrame(), task_of(planted), sizes=sizes)


@pytest.mark.parametrize("null", [-1, True, 1.5, "many"])
def test_a_null_that_is_no_number_is_refused(planted, null):
    with pytest.raises(ValueError, match=r"null is how many circuits of each size are drawn, .* from 0 up; found"):
        inspect.unwrap(tls.faithfulness)(planted, pd.DataFrame(), task_of(planted), null=null)


def test_numbers_of_any_library_are_sizes_and_a_null(planted):
    asked = task_of(planted)
    _, table = ranked(planted, asked)
    plain = tls.faithfulness(planted, table, asked, sizes=[0.25, 0.5], null=1)
    # Unwrapped, since the type check of the tests takes no number of numpy's for an int.
    given = inspect.unwrap(tls.faithfulness)(planted, table, asked, sizes=np.array([0.25, 0.5]), null=np.int64(1))
    pd.testing.assert_frame_equal(given, plain)
    assert given.attrs["null"] == 1
    assert given.attrs["batch"] == pairs_of(attention_view(planted), task_of(planted)).rows_at_once


def test_a_table_of_other_edges_than_the_circuits_is_refused_or_named(planted):
    """Positions, other weights and several effects of an edge; a warning of another task, measure or replacement."""
    asked = task_of(planted)
    _, table = ranked(planted, asked)
    table.attrs = {
        **attention_view(planted).origin(),
        "task": asked.label,
        "measure": "task",
        "replace": "counterfactual",
    }
    plain = tls.faithfulness(planted, table, asked, sizes=[0.1], null=0)["faithfulness"].item()
    attrs, at_two = table.attrs, pd.concat([table, table.assign(estimate=0.0)])
    at_two.attrs = attrs
    for kept in (at_two.assign(position=["answer", "END"] * len(table)), table.assign(position="END")):
        for call in (tls.run_circuit, tls.faithfulness):
            with pytest.raises(ValueError, match=r"has effects at positions .*END.*: make the table without at="):
                call(planted, kept, asked)
    with pytest.raises(ValueError, match="the table of edges has several rows for sender embedding, receiver "):
        tls.faithfulness(planted, at_two, asked)
    twice = pd.concat([table, table])
    assert tls.faithfulness(planted, twice, asked, sizes=[0.1], null=0)["faithfulness"].item() == plain
    with pytest.raises(ValueError, match="the column estimate of the table of edges is empty"):
        tls.faithfulness(planted, table.assign(estimate=np.nan), asked)
    for call in (tls.run_circuit, tls.faithfulness):
        with pytest.raises(ValueError, match="the table of edges was made from other weights than the circuit's model"):
            call(zoo.shared("bridge", "llama"), table, asked)
    for name, value in (("measure", "ind"), ("replace", "mean"), ("task", "induction")):
        table.attrs = {**attrs, name: value}
        with pytest.warns(
            UserWarning, match=f"the effects in the table of edges are of {name}='{value}', and the circuit"
        ):
            tls.run_circuit(planted, table.head(3), asked)
        with pytest.warns(UserWarning, match=f"are of {name}='{value}', and the circuit is of {name}="):
            tls.faithfulness(planted, table, asked, sizes=[0.1], null=0)


def test_pairs_are_known_again_beside_prompts_of_another_length():
    """Those of two tasks of which one has a longer prompt; each that is there twice counts."""
    model, (clean, other) = zoo.shared("bridge", "llama"), prompt_pairs(4, 7, seed=5)
    longer, its_pair = prompt_pairs(1, 9, seed=6)
    [a, b, c, _], [x, y, z, _] = clean, other
    fit = tls.logit_difference([a, b, longer[0]], 7, 10, counterfactual=[x, y, its_pair[0]])
    edges = tls.edge_effects(model, "logits", senders=["L0H1"], task=fit)
    for prompts, their_pairs, said in (
        ([a, b, c], [x, y, z], "2 of 3 pairs are among those"),
        ([a, a, a, c], [x, x, x, z], "3 of 4 pairs are among those"),
    ):
        answers = [7, 8, 9, 11][: len(prompts)]  # of equal prompts other ones, so that each is an observation
        with pytest.warns(UserWarning, match=said):
            tls.run_circuit(model, edges, tls.logit_difference(prompts, answers, 10, counterfactual=their_pairs))
    again = tls.logit_difference([a, c], 7, 10, counterfactual=[y, z])
    tls.run_circuit(model, edges, again)  # a prompt with another pair is another pair: a warning is an error


@pytest.mark.slow
def test_edge_effects_of_pairs_are_estimated_measured_and_named(planted, tmp_path):
    asked = task_of(planted)
    pairs, ranks = ranked(planted, asked)
    table = tls.edge_effects(planted, task=asked, screen=10, method="EAP-IG", folder=tmp_path)
    assert len(table) == len(ranks)
    assert list(table["estimate"].abs()) == sorted(table["estimate"].abs(), reverse=True)
    both = table.merge(ranks, on=["sender", "receiver"], suffixes=("", "_plain"))
    np.testing.assert_allclose(both["estimate"], both["estimate_plain"], rtol=1e-12)  # float64 sums, in another order
    counts = table["measured"].value_counts().to_dict()
    assert (counts.pop("top"), counts.pop("11 to 100")) == (10, 6)  # fewer edges than a hundred
    assert table["delta"].notna().sum() == 16 + counts.pop("logits", 0)
    assert {*counts} == {""}
    assert table["delta"].notna().equals(table["measured"] != "")
    stable = table["selected"] >= 0.9
    assert table.loc[~table["sender"].isin(PLANTED), "selected"].max() == 0  # their estimate is 0 in every sample
    assert 0 < stable.sum() <= 10
    assert 0 < table.attrs["overlap_quarter"] <= table.attrs["overlap_half"] <= 1
    assert (table.attrs["screen"], table.attrs["units"], table.attrs["n_units"]) == (10, "pairs", 8)
    names = table.set_index(["sender", "receiver"])["eap_name"]
    assert names["L0H1", "L1KV1.v"] == "a0.h1->a1.h2<v>, a0.h1->a1.h3<v>"
    assert names["embedding", "L1MLP"] == "input->m1"
    assert names["L1H2", "logits"] == "a1.h2->logits"
    assert table.attrs["pairs_sha256"] == pairs.digests
    assert -1 <= table.attrs["rank_correlation_top"] <= 1
    again = tls.edge_effects(planted, task=asked, screen=10, method="EAP-IG", folder=tmp_path)
    pd.testing.assert_frame_equal(again, table)
    chosen = tls.edge_effects(
        planted, ["logits", "L1MLP"], senders=["L1H2", "embedding"], task=asked, replace="counterfactual"
    )
    assert list(zip(chosen["sender"], chosen["receiver"], strict=True)) == [
        ("embedding", "L1MLP"),
        ("L1H2", "L1MLP"),
        ("embedding", "logits"),
        ("L1H2", "logits"),
    ]
    kept = pairs.graph.possible.copy()
    kept[pairs.graph.places([("L1H2", "logits")])] = False
    cut = pairs.circuit_values([kept])[0] - pairs.plain_values()[0]
    assert chosen["delta"].iloc[-1] == pytest.approx(cut.mean(), abs=1e-5)  # float32, a gap of 1


@pytest.mark.slow
def test_errors_of_estimates_are_those_of_each_pair_alone(planted):
    asked = task_of(planted)
    pairs = pairs_of(attention_view(planted), asked)
    each = []
    for row in range(8):
        answers = asked.metric.correct[row : row + 1], asked.metric.wrong[row : row + 1]
        alone = pairs_of(
            attention_view(planted),
            tls.logit_difference(CLEAN[row : row + 1], *answers, counterfactual=OTHER[row : row + 1]),
        )
        each.append(edge_estimates(alone, "EAP").terms[0, 0])
    found = edge_estimates(pairs, "EAP")
    assert (found.units, found.sizes.tolist()) == ("pairs", [1] * 8)
    np.testing.assert_allclose(found.terms[:, 0] * 8, each, atol=1e-5)  # float32 in other batches: 1e-6, effects of .1
    table = tls.edge_effects(planted, task=asked, screen=5, method="EAP")
    expected = scipy.stats.sem(np.stack(each), axis=0)[pairs.graph.places(table)]
    np.testing.assert_allclose(table["estimate_se"], expected, atol=1e-6)


def margins(logits, tokens, mask):
    return logits[:, -1, 7] - logits[:, -1, 10]


def centred_margins(logits, tokens, mask):
    found = margins(logits, tokens, mask)
    return found / found.std()


@pytest.mark.slow
def test_where_a_screen_knows_no_pairs_it_says_so(planted, monkeypatch):
    asked = task_of(planted)
    with pytest.warns(UserWarning, match="4 distinct pairs: other pairs may choose other edges"):
        tls.edge_effects(planted, task=asked.split(0.5)[0], screen=3, method="EAP")
    monkeypatch.setattr("tlspectral.hooks.circuits.estimates._MOST_BYTES", 0)
    monkeypatch.setattr("tlspectral.hooks.circuits.estimates._LEAST_BLOCKS", 3)
    blocks = tls.edge_effects(planted, task=asked, screen=3, method="EAP")
    assert (blocks.attrs["units"], blocks.attrs["n_units"]) == ("blocks", 3)
    assert blocks["estimate_se"].notna().all()
    monkeypatch.undo()
    for metric, units in ((margins, "pairs"), (centred_margins, "all")):
        task = tls.Task(CLEAN, metric, counterfactual=OTHER)
        table = tls.edge_effects(planted, task=task, screen=3, method="EAP")
        assert table.attrs["units"] == units
        assert table[["estimate_se", "selected"]].isna().to_numpy().all() == (units == "all")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "replace='counterfactual' and receivers=None need paired prompts"),
        ({"measure": "ind"}, "measure='ind' needs receivers="),
        ({"replace": "zero"}, "edges are replaced by the counterfactual"),
        ({"replace": "mean"}, "replace='mean' needs receivers="),
        ({"control": "random"}, "control= needs receivers="),
        ({"receivers": "L1H0.q", "screen": "gradient"}, "screen= needs paired prompts"),
        ({"receivers": "L1H0.q", "screen": 5}, "screen= needs paired prompts"),
        ({"screen": 0}, "a number of edges, 1 or more, not 0"),
        ({"screen": True}, "screen= must be 'gradient' or a whole number"),
    ],
)
def test_edges_of_pairs_refuse_what_they_do_not_have(planted, arguments, words):
    with pytest.raises(ValueError, match=words):
        tls.edge_effects(planted, **arguments)
