"""`check_head_types`: the effect of removing claimed heads beside that of random heads of the same layers."""

import numpy as np
import pandas as pd
import pytest
import torch
from described import assert_described
from planted_types import PLANTED, planted_bridge

import tlspectral as tls
from tlspectral.ablation import check_head_types
from tlspectral.ablation.type_checks import EXPECTED, _prepared, _preference, _random_sets, _wrong_copies
from tlspectral.heads.types.kinds import CANDIDATES
from tlspectral.heads.types.retrieval import planted_facts
from tlspectral.models.attention import attention_view


def claims():
    """A table of planted heads, without measuring any."""
    rows = [
        {"layer": layer, "head": head, "type": kind.name, "claimed": kind.name in PLANTED.get((layer, head), set())}
        for layer in range(4)
        for head in range(4)
        for kind in CANDIDATES
    ]
    return pd.DataFrame(rows)


def test_planted_heads_matter_where_they_are_expected_to():
    model = planted_bridge()
    table = check_head_types(model, claims(), random_sets=19, show_progress=False)
    assert_described(table)
    assert list(dict.fromkeys(table["type"])) == list(EXPECTED)
    assert [tuple(found) for _, found in table.groupby("type", sort=False)["task"]] == list(EXPECTED.values())
    rows = table.set_index(["type", "task"])
    # The head that writes against followers keeps them from being predicted, and the one that finds facts raises one.
    for kind, task in (("copy_suppression", "wrong copies"), ("retrieval", "planted facts")):
        assert rows.loc[(kind, task), "passed"]
        assert rows.loc[(kind, task), "delta"] > 10 * rows.loc[(kind, task), "delta_stderr"] > 0
    # Heads that write nothing change nothing.
    for kind in ("self", "first_token", "duplicate"):
        assert (table.loc[table["type"] == kind, "delta"] == 0).all()
        assert table.loc[table["type"] == kind, "passed"].tolist() == [False, True]
    task = tls.tasks.induction(n_sequences=8, seed=0)
    intact = tls.evaluate(model, task)
    with tls.ablate(model, [(1, 1), (1, 3)], "output"):
        effect = tls.tasks.paired_effect(tls.evaluate(model, task), intact)
    assert rows.loc[("induction", "copy"), "n_heads"] == 2
    assert rows.loc[("induction", "copy"), "delta"] == effect.value
    assert rows.loc[("induction", "copy"), "delta_stderr"] == effect.stderr


def test_random_heads_are_of_the_same_layers_while_there_are_any():
    everyone = [(layer, head) for layer in range(3) for head in range(4)]
    chosen = [(0, 1), (0, 2), (0, 3), (2, 0)]
    others = [head for head in everyone if head not in chosen]
    for seed in range(20):
        drawn = _alike(np.random.default_rng(seed), chosen, others)
        assert len(set(drawn)) == 4
        assert not set(drawn) & set(chosen)
        assert drawn[0] == (0, 0)
        assert sum(layer == 2 for layer, _ in drawn) >= 1
    with pytest.raises(ValueError, match="7 of 12 heads are claimed: too few are left"):
        _alike(np.random.default_rng(0), everyone[:7], everyone[7:])


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
