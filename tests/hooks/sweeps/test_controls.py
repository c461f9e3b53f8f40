"""Is it more than a random part? `control_excess`, `control_p`, and other heads as the control of an output."""

import functools
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from ablation_runs import repetitions
from zoo import shared

import tlspectral as tls
import tlspectral.hooks.edges.measuring as measuring
import tlspectral.hooks.sweeps.sweep as sweep_module
from tlspectral.errors import BadHead
from tlspectral.hooks import ablation_sweep
from tlspectral.hooks.parts import LongRange, Output
from tlspectral.hooks.sweeps import sweep_jobs
from tlspectral.hooks.sweeps.controls import head_sets
from tlspectral.models.reading import attention_view
from tlspectral.tasks import induction

sweep = functools.partial(ablation_sweep, control="random")


def drawn():
    return induction(repetitions())


def by_hand(delta, effects):
    """Excess and p of one effect beside its control effects, counted one by one."""
    larger = sum(1 for effect in effects if abs(effect) >= abs(delta))
    return abs(delta) - sum(abs(effect) for effect in effects) / len(effects), (1 + larger) / (1 + len(effects))


# --- sweeps ---


def z_by_hand(row):
    draws = pd.Series(row.control_draws)
    return (row.delta - draws.mean()) / draws.std()


SETS = {"a": ["L0H1", "L0H2", "L1H2"], "b": ["L0H0", "L1H0", "L1H3"]}


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("symmetric", {"heads": ["L0H1", "L1H2"]}),
        ("symmetric", {"heads": "L0H1", "at": [3, -2]}),
        (Output("zero"), {"heads": SETS}),
    ],
    ids=["heads", "positions", "sets"],
)
def test_z_stands_beside_every_control_of_a_sweep(part, options):
    table = sweep(shared("bridge", "llama"), part, task=drawn(), draws=19, **options)
    # Standard deviations by another library: 1e-15.
    assert table["excess_z"].tolist() == pytest.approx([z_by_hand(row) for row in table.itertuples()], rel=1e-9)
    few = sweep(shared("bridge", "llama"), part, task=drawn(), draws=2, **options)
    assert few["excess_z"].isna().all()
    assert "excess_z" not in ablation_sweep(shared("bridge", "llama"), part, task=drawn(), **options)


def test_a_sweep_says_which_heads_its_sets_are():
    table = ablation_sweep(shared("bridge", "llama"), "output", task=drawn(), heads=SETS)
    assert table.attrs["sets"] == SETS
    assert "sets" not in ablation_sweep(shared("bridge", "llama"), "output", task=drawn(), heads="L0H1").attrs


@pytest.mark.slow
@pytest.mark.parametrize("part", ["symmetric", "rope_phase"], ids=str)
def test_a_part_is_compared_with_random_parts(part, monkeypatch):
    """The larger of effect and random parts decides, whatever the number of draws; five are as before."""
    model, kept = shared("bridge", "llama"), []
    real = sweep_jobs.layer_effects
    monkeypatch.setattr(sweep_jobs, "layer_effects", lambda *a: [kept.append(one) or one for one in real(*a)])
    tables = {draws: sweep(model, part, task=drawn(), draws=draws) for draws in (None, 1, 19)}
    for draws, table in tables.items():
        effects, kept = kept[:2], kept[2:]
        intact = table.attrs["intact_value"]
        random = np.concatenate([layer.controls.mean(2) for layer in effects]) - intact
        assert random.shape == (8, draws or 5)
        assert table.attrs["draws"] == (draws or 5)
        for row, own in zip(table.itertuples(), random, strict=True):
            assert row.control_delta == pytest.approx(own.mean(), rel=1e-9)
            assert row.control_draws == pytest.approx(own, rel=1e-9)
            assert (row.control_excess, row.control_p) == pytest.approx(by_hand(row.delta, own), rel=1e-9)
        assert table["control_delta_se"].isna().all() == (draws == 1)
    assert tables[19]["control_p"].min() < 1 / 6  # finer than five draws allow
    assert (tables[None]["control_excess"] < 0).any()
    assert (tables[None]["control_excess"] > 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("part", [Output(), Output("resample"), LongRange(3, sinks=1)], ids=str)
def test_a_head_is_compared_with_the_other_heads_of_its_layer(part):
    model = shared("bridge", "llama")
    plain = ablation_sweep(model, part, task=drawn())
    table = sweep(model, part, task=drawn())
    pd.testing.assert_frame_equal(table[list(plain)], plain, check_exact=True)
    assert table.attrs["draws"] == 3
    for row in table.itertuples():
        others = plain.query(f"layer == {row.layer} and head != {row.head}")["delta"]
        assert row.control_delta == pytest.approx(others.mean(), rel=1e-9)
        assert (row.control_excess, row.control_p) == pytest.approx(by_hand(row.delta, others), rel=1e-9)
    # A head drawn at random has each rank as often as any other.
    for _, rows in table.groupby("layer"):
        assert sorted(rows["control_p"]) == [0.25, 0.5, 0.75, 1.0]
    assert (table["control_p_floor"] == 0.25).all()
    one = sweep(model, part, task=drawn(), heads="L1H2")
    # Runs in batches of other sizes: measured 1e-7; effects are 1e-3.
    pd.testing.assert_frame_equal(one, table.iloc[[6]].reset_index(drop=True), rtol=0, atol=1e-5)


def test_fewer_other_heads_are_drawn_at_random():
    model = shared("bridge", "llama")
    deltas = ablation_sweep(model, "output", task=drawn()).set_index(["layer", "head"])["delta"]
    found = set()
    for seed in range(12):
        row = sweep(model, "output", task=drawn(), heads="L1H2", draws=1, seed=seed).iloc[0]
        (other,) = [head for head in (0, 1, 3) if abs(deltas[1, head] - row["control_delta"]) < 1e-5]
        found.add(other)
        assert row["control_p"] == (1.0 if abs(deltas[1, other]) >= abs(deltas[1, 2]) else 0.5)
        assert row["control_p_floor"] == 0.5
    assert found == {0, 1, 3}
    with pytest.warns(UserWarning, match=r"draws=50, but .* other heads of the layer, at most 3: .* 1 / 4"):
        assert sweep(model, "output", task=drawn(), heads="L1H2", draws=50).attrs["draws"] == 3


def test_a_screened_sweep_has_the_control_of_what_was_measured(monkeypatch):
    monkeypatch.setattr(sweep_module, "SCREENED", 1)
    model = shared("bridge", "llama")
    whole = sweep(model, "output", task=drawn())
    table = sweep(model, "output", task=drawn(), screen="gradient")
    measured = table["measured"] != ""
    assert measured.sum() == 2
    names = ["control_delta", "control_excess", "control_p"]
    # Batches of other sizes: measured 1e-7; effects are 1e-3.
    pd.testing.assert_frame_equal(table.loc[measured, names], whole.loc[measured, names], rtol=0, atol=1e-5)
    assert table.loc[~measured, names].isna().all(axis=None)


def test_a_layer_with_one_head_has_no_other_heads(monkeypatch):
    model = shared("bridge", "llama")
    monkeypatch.setattr(type(attention_view(model)), "n_heads", lambda view, layer: 1 if layer else 4)
    with pytest.raises(ValueError, match="layer 1: the control of 'output' is other heads, and this layer has one"):
        sweep(model, "output", task=drawn())


@pytest.mark.slow
def test_the_mean_over_other_heads_is_not_taken_off_in_a_summary():
    """Over all heads of a layer, effects less those of the other heads sum to 0."""
    model = shared("bridge", "llama")
    heads = tls.analyze_heads(model, null_draws=5)
    for part, controls in (("output", {"none"}), ("symmetric", {"none", "score_rms", "random"})):
        table = sweep(model, part, task=drawn())
        assert ("delta_above_control" in table.attrs["sums_per_sequence"]) == ("random" in controls)
        assert set(tls.hooks.summarize_sweep(table, heads)["size_control"]) == controls


# --- sets of heads ---


def test_random_sets_have_as_many_heads_of_the_same_layers():
    chosen = [(0, 1), (2, 0), (2, 3)]

    def drawn(draws, seed=0):
        return head_sets({0: 4, 2: 4}, {0: [1], 2: [3, 0]}, draws, np.random.default_rng(seed))

    sets = drawn(10)
    assert len(sets) == len({tuple(one) for one in [chosen, *sets]} - {tuple(chosen)}) == 10
    for one in sets:
        assert [layer for layer, _ in one] == [0, 2, 2]
        assert len(set(one)) == 3
        assert all(0 <= head < 4 for _, head in one)
    assert sets == drawn(10)
    assert sets != drawn(10, seed=1)
    every = drawn(1000)
    assert len({tuple(one) for one in every}) == len(every) == 4 * 6 - 1


def test_random_sets_favour_no_head():
    """All other pairs of four heads are as likely, those with one of the chosen heads included."""
    sets = [head_sets({1: 4}, {1: [0, 2]}, 1, np.random.default_rng(seed))[0] for seed in range(300)]
    counts = Counter(head for one in sets for head in one)
    # Of five other pairs, two hold head 0 and two hold head 2; three hold head 1 or head 3. Standard deviation 8.5.
    for head, share in ((0, 2 / 5), (2, 2 / 5), (1, 3 / 5), (3, 3 / 5)):
        assert counts[1, head] == pytest.approx(300 * share, abs=35)


def test_sets_that_cannot_be_drawn_are_refused():
    model = shared("bridge", "llama")
    for heads, draws, error, said in (
        ([], 19, ValueError, "the set 'chosen' has no heads"),
        ("L0H1", 0, ValueError, "draws is how many controls each effect has, a whole number from 1 up; found 0"),
        ("L1H9", 19, BadHead, "L1H9 does not exist"),
    ):
        with pytest.raises(error, match=said):
            ablation_sweep(model, "output", heads={"chosen": heads}, control="random", draws=draws)


# --- edges (bands: test_bands) ---


@pytest.mark.slow
@pytest.mark.parametrize("draws", [1, 7])
def test_an_edge_is_compared_with_draws_of_its_own_sender(draws, monkeypatch):
    kept, real = [], measuring._attention_deltas
    monkeypatch.setattr(measuring, "_attention_deltas", lambda *given: kept.append(real(*given)) or kept[-1])
    table = tls.edge_effects(
        tls.load_model("tiny-rope"),
        ["L1H0.k", "L1H1.k"],
        measure="ind",
        control=draws,
    )
    assert table.attrs["draws"] == draws
    drawn_deltas = np.concatenate([deltas.mean(2) for _, deltas in kept])  # [edges, 1 + draws]
    for row, (delta, *random) in zip(table.itertuples(), drawn_deltas, strict=True):
        assert row.delta == pytest.approx(delta, rel=1e-12)
        assert len(random) == draws
        assert (row.control_excess, row.control_p) == pytest.approx(by_hand(delta, random), rel=1e-12)
    # The previous-token head does more than any random write of its size; the other three heads do less.
    first = table["sender"] == "L0H3"
    assert (table.loc[first, "control_p"] == 1 / (1 + draws)).all()
    assert (table["control_p_floor"] == 1 / (1 + draws)).all()
    pooled = table.groupby(["receiver", "receiver_head"])["control_draws"].transform(lambda of: of.map(len).sum())
    assert table["pvalue_floor"].tolist() == (1 / (1 + pooled)).tolist()
    assert (table.loc[first, "pvalue"] == table.loc[first, "pvalue_floor"]).all()
    assert (table["control_excess"] > 0).tolist() == first.tolist()
    assert table["control_delta_se"].isna().all() == (draws == 1)


def test_z_stands_beside_the_control_of_edges():
    model = tls.load_model("tiny-rope")
    table = tls.edge_effects(model, ["L1H0.k"], senders=["L0H3", "L0H1"], measure="ind", control=19)
    # Standard deviations by another library: 1e-15.
    assert table["excess_z"].tolist() == pytest.approx([z_by_hand(row) for row in table.itertuples()], rel=1e-9)
    few = tls.edge_effects(model, ["L1H0.k"], senders=["L0H3"], measure="ind", control=18)
    assert few["excess_z"].isna().all()
