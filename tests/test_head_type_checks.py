"""`check_head_types`: the effect of removing claimed heads beside that of random heads of the same layers."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from described import assert_described
from planted_types import PLANTED, planted_bridge

import tlspectral as tls
from tlspectral.ablation import check_head_types
from tlspectral.ablation.type_checks import (
    EXPECTED,
    Expectation,
    _preference,
    _prepared,
    _random_sets,
    _row,
    _task,
    _wrong_copies,
)
from tlspectral.heads.types.kinds import CANDIDATES
from tlspectral.heads.types.retrieval import planted_facts
from tlspectral.models.attention import attention_view
from tlspectral.tasks import scored_sequences


def claims(*names):
    """A table of planted heads, some or all types of them, without measuring any."""
    rows = [
        {"layer": layer, "head": head, "type": kind.name, "score": 0.5 + 0.1 * head, "claimed": kind.name in planted}
        for layer in range(4)
        for head in range(4)
        for planted in [PLANTED.get((layer, head), set())]
        for kind in CANDIDATES
        if kind.name in (names or EXPECTED)
    ]
    return pd.DataFrame(rows)


@functools.cache
def checked():
    return check_head_types(
        planted_bridge(),
        claims("induction", "first_token", "copy_suppression", "retrieval"),
        random_sets=2,
        show_progress=False,
    )


def test_every_type_has_expectations_on_two_tasks():
    assert list(EXPECTED) == [kind.name for kind in CANDIDATES]
    assert all(matters.cost != "no more" and other.cost == "no more" for matters, other in EXPECTED.values())


def test_planted_heads_matter_where_they_are_expected_to():
    table = checked()
    assert_described(table)
    assert list(dict.fromkeys(table["type"])) == ["induction", "first_token", "copy_suppression", "retrieval"]
    for name, rows in table.groupby("type", sort=False):
        assert list(zip(rows["task"], rows["expected"], strict=True)) == list(EXPECTED[str(name)])
    rows = table.set_index(["type", "task"])
    # The head that writes against followers keeps them from being predicted, and the one that finds facts raises one.
    for kind, task in (("copy_suppression", "wrong copies"), ("retrieval", "planted facts"), ("induction", "copy")):
        assert rows.loc[(kind, task), "delta"] > 10 * rows.loc[(kind, task), "delta_stderr"] > 0
    # A head that writes nothing changes nothing.
    assert (table.loc[table["type"] == "first_token", "delta"] == 0).all()
    assert rows.loc[("first_token", "text"), "heads"] == "L0H3"
    assert rows.loc[("induction", "copy"), "n_claimed"] == 2
    assert rows.loc[("induction", "copy"), "heads"] == "L1H3, L1H1"  # by score


def test_deltas_are_those_of_whole_runs_under_ablate():
    model = planted_bridge()
    view = attention_view(model)
    task, others = (_task(view, "copy", 0, reference) for reference in (False, True))
    reference = scored_sequences(view, others).tokens
    intact = tls.evaluate(model, task)
    row = checked().set_index(["type", "task"]).loc[("induction", "copy")]
    with tls.ablate(model, [(1, 1), (1, 3)], "output", replace="mean", reference=reference):
        effect = tls.tasks.paired_effect(tls.evaluate(model, task), intact)
    # Measured: 4e-8, blocks replayed from layer 1.
    assert row["delta"] == pytest.approx(effect.value, abs=1e-5)
    assert row["delta_stderr"] == pytest.approx(effect.stderr, abs=1e-5)
    with tls.ablate(model, [(0, 0), (2, 1)], "output"):
        effect = tls.tasks.paired_effect(tls.evaluate(model, task), intact)
    assert _prepared(view, "copy", 0).without([(0, 0), (2, 1)], "zero").mean() == pytest.approx(effect.value, abs=1e-5)


@pytest.mark.parametrize(
    ("cost", "own", "pvalue", "passed"),
    [
        ("more", 20.0, 0.05, True),
        ("more", 18.5, 0.10, False),
        ("more", 19.0, 0.10, False),  # a set that costs as much counts
        ("no more", 20.0, 0.05, False),
        ("no more", 18.5, 0.10, True),
        ("less", 0.0, 0.05, True),
        ("less", 1.0, 0.10, False),
    ],
)
def test_a_row_compares_heads_with_random_sets(cost, own, pvalue, passed):
    random = [np.array([value - 1.0, value + 1.0]) for value in range(1, 20)]
    row = _row(Expectation("text", cost), [np.array([own - 2.0, own + 2.0]), *random])
    assert row["pvalue"] == pytest.approx(pvalue, abs=1e-12)
    assert row["passed"] is passed
    assert (row["delta"], row["delta_stderr"]) == (own, 2.0)
    assert (row["random_min"], row["random_mean"], row["random_max"]) == (1.0, 10.0, 19.0)


def test_random_sets_are_of_the_same_layers_while_there_are_any_and_differ():
    everyone = [(layer, head) for layer in range(3) for head in range(4)]
    chosen = [(0, 1), (0, 2), (2, 0)]
    others = [head for head in everyone if head not in chosen]
    sets = _random_sets(np.random.default_rng(0), chosen, others, 3)
    for drawn in sets:
        assert len(set(drawn)) == 3
        assert not set(drawn) & set(chosen)
        assert sorted(layer for layer, _ in drawn) == [0, 0, 2]
    assert len({frozenset(drawn) for drawn in sets}) == 3
    # Layers 0 and 2 have only three different sets: the rest are of any layer, and different too.
    more = _random_sets(np.random.default_rng(0), chosen, others, 19)
    assert len({frozenset(drawn) for drawn in more}) == 19
    with pytest.raises(ValueError, match="4 heads are removed and 3 are not claimed: too few are left"):
        _random_sets(np.random.default_rng(0), everyone[:4], everyone[9:], 3)


def test_metrics_are_those_of_loops():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (3, 7), generator=generator)
    logits = torch.randn(3, 5, 9, generator=generator)
    found = _wrong_copies(logits, tokens, torch.ones_like(tokens))
    for row in range(3):
        total = 0.0
        for position in range(1, 6):
            probabilities = logits[row, position - 1].softmax(-1)
            copied = set(tokens[row, : position + 1].tolist()) - {int(tokens[row, position + 1])}
            total += sum(float(probabilities[token]) for token in copied)
        # float32
        assert float(found[row]) == pytest.approx(total / 5, abs=1e-6)
    facts = planted_facts(attention_view(planted_bridge()), None, 3, seed=0)
    assert facts is not None
    last = torch.randn(3, 1, 60, generator=generator)
    preferred = _preference(facts.says, facts.answer)(last, facts.tokens, facts.tokens)
    for row in range(3):
        of_facts = last[row, 0, facts.says[row]]
        asked = int(facts.asked[row])
        others = [float(of_facts[fact]) for fact in range(8) if fact != asked]
        assert float(preferred[row]) == pytest.approx(np.mean(others) - float(of_facts[asked]), abs=1e-5)


def test_tables_that_do_not_fit_are_refused():
    model = planted_bridge()
    with pytest.raises(ValueError, match="claims no head"):
        check_head_types(model, claims().assign(claimed=False), show_progress=False)
    with pytest.raises(ValueError, match="claimed"):
        check_head_types(model, claims().drop(columns="claimed"), show_progress=False)
    wrong = claims()
    wrong["layer"] += 4
    with pytest.raises(ValueError, match="layers 0 to 3"):
        check_head_types(model, wrong, show_progress=False)
