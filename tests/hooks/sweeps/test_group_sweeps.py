"""Sweeps of whole key/value groups: a planted group, random groups as the control, and sets without a control."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from zoo import needs_hooked, shared

import tlspectral as tls
import tlspectral.hooks.sweeps.layer_effects as layer_effects_module
from tlspectral.hooks.sweeps.controls import head_sets, set_control
from tlspectral.models.reading import attention_view
from tlspectral.plots import ablation_effects

IDS = torch.randint(3, 90, (12, 10), generator=torch.Generator().manual_seed(2))
TASK = tls.Task(IDS, lambda logits, tokens, mask: logits[:, -1, 5] - logits[:, -1, 6], predict=-1)


@pytest.fixture(scope="module")
def planted():
    """Two layers of four groups with two heads each; only group 2 of layer 1 writes much."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4, "vocab_size": 90}
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:24] *= 30  # heads 4 and 5
    return tls.load_model(model)


def swept(model, heads="groups", **options):
    return tls.ablation_sweep(model, tls.parts.Output("zero"), heads=heads, task=TASK, **options)


def test_the_group_that_matters_is_found_with_the_least_possible_p(planted):
    table = swept(planted, control="random")
    assert table["name"].tolist() == [f"L{layer}KV{group}" for layer in (0, 1) for group in range(4)]
    assert table.attrs["sets"]["L1KV2"] == ["L1H4", "L1H5"]
    row = table.set_index("name").loc["L1KV2"]
    # It changes the metric by .172, the other seven by .015 at most.
    assert table["name"][table["delta"].abs().idxmax()] == "L1KV2"
    assert abs(row["delta"]) > 10 * table.loc[table["name"] != "L1KV2", "delta"].abs().max()
    assert row["control_p"] == row["control_p_floor"] == 0.25
    others = table.loc[table["name"].isin(["L1KV0", "L1KV1", "L1KV3"]), "delta"]
    assert sorted(row["control_draws"]) == sorted(others)
    assert (table["control_p_floor"] == 0.25).all()
    # Over two layers there are 15 other pairs of groups, so a smaller p is possible.
    pair = swept(planted, {"pair": ["L0KV0", "L1KV2"]}, control="random").iloc[0]
    assert len(pair["control_draws"]) == 15
    assert pair["control_p_floor"] == 1 / 16
    # Three of the others have the planted group too.
    assert sum(abs(effect) > 0.5 * abs(pair["delta"]) for effect in pair["control_draws"]) == 3


def test_a_group_is_removed_as_by_zeroing_its_values(planted):
    """A hook of TransformerLens on the values of one key/value head, which all heads of the group read."""

    def zero_group(values, hook):
        values = values.clone()
        values[:, :, 2] = 0
        return values

    logits = planted.run_with_hooks(IDS, fwd_hooks=[("blocks.1.attn.hook_v", zero_group)])
    with tls.ablate(planted, "L1KV2", tls.parts.Output("zero")):
        # Zeros in both: equal when measured. A wrong pair of heads differs by .57.
        torch.testing.assert_close(planted(IDS), logits, rtol=0, atol=1e-6)
    by_hand = float((logits[:, -1, 5] - logits[:, -1, 6]).mean().detach())
    # float32 replay: 3e-9 measured; the effect is .17
    assert swept(planted)["value"].iloc[6] == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("part", ["output", "antisymmetric", tls.parts.LongRange(3, 1)], ids=str)
def test_groups_are_sets_named_after_them(part):
    model = shared("bridge", "llama")
    table = tls.ablation_sweep(model, part, heads="groups", task=TASK, control="random")
    lists = {
        "L0KV0": ["L0H0", "L0H1"],
        "L0KV1": [(0, 2), (0, 3)],
        "L1KV0": "L1KV0",
        "L1KV1": np.array([[1, 2], [1, 3]]),
    }
    expected = tls.ablation_sweep(model, part, heads=lists, task=TASK, control="random")
    pd.testing.assert_frame_equal(table, expected, check_exact=True)
    assert table.attrs["sets"] == expected.attrs["sets"]
    assert table.attrs["control_of_sets"] == dict.fromkeys(lists, "groups")
    # A row, a frame of rows and a column of names are the groups again.
    for rows in (table.iloc[2], table.iloc[[2]], table["name"].iloc[[2]]):
        again = tls.ablation_sweep(model, part, heads={"L1KV0": rows}, task=TASK)
        assert again["delta"].iloc[0] == pytest.approx(table["delta"].iloc[2], abs=1e-6)  # float32, other batches


@pytest.mark.slow
def test_without_shared_keys_groups_are_heads():
    model = shared("bridge", "gpt2")
    table = swept(model)
    assert table["name"].iloc[5] == "L1KV1"
    heads = swept(model, None)
    # Equal when measured; batches may differ. Effects are .012 at least.
    np.testing.assert_allclose(table["delta"], heads["delta"], rtol=0, atol=1e-6)
    assert swept(model, {"a": "L0KV1"}, control="random").attrs["control_of_sets"] == {"a": "heads"}


@needs_hooked
@pytest.mark.slow
def test_groups_of_a_hooked_transformer():
    tables = [swept(shared(backend, "llama"), control="random") for backend in ("bridge", "hooked")]
    assert tables[0]["name"].tolist() == tables[1]["name"].tolist()
    # Folded norms, float32: measured 1.3e-7; effects are .027 at least.
    np.testing.assert_allclose(tables[0]["delta"], tables[1]["delta"], rtol=0, atol=1e-5)
    assert tables[0]["control_p"].equals(tables[1]["control_p"])


# --- the control ---


def control(by_layer, model="llama"):
    return set_control(attention_view(shared("bridge", model)), by_layer)


def test_random_groups_have_as_many_groups_of_the_same_layers(planted):
    chosen = {0: [2, 3], 1: [0, 1, 6, 7]}
    drawn = set_control(attention_view(planted), chosen)
    assert (drawn.kind, drawn.others) == ("groups", 4 * 6 - 1)
    sets = drawn.sets(100, np.random.default_rng(0))
    assert len({tuple(one) for one in sets}) == len(sets) == 23
    own = [(layer, head) for layer, heads in chosen.items() for head in heads]
    for one in sets:
        assert one != own
        assert Counter(layer for layer, _ in one) == {0: 2, 1: 4}
        groups = Counter((layer, head // 2) for layer, head in one)
        assert set(groups.values()) == {2}
    assert drawn.sets(5, np.random.default_rng(1)) == drawn.sets(5, np.random.default_rng(1)) != sets[:5]


def test_random_groups_favour_no_group(planted):
    """All other pairs of four groups are as likely, those with one of the chosen groups included."""
    drawn = set_control(attention_view(planted), {1: [0, 1, 4, 5]})
    sets = [drawn.sets(1, np.random.default_rng(seed))[0] for seed in range(300)]
    counts = Counter(head // 2 for one in sets for _, head in one)
    # As for heads (test_controls): of five other pairs two hold group 0, three group 1. Standard deviation 8.5, twice.
    for group, share in ((0, 2 / 5), (2, 2 / 5), (1, 3 / 5), (3, 3 / 5)):
        assert counts[group] == pytest.approx(2 * 300 * share, abs=70)


@pytest.mark.parametrize(
    ("by_layer", "model", "kind", "others"),
    [
        ({0: [0, 1]}, "llama", "groups", 1),
        ({0: [1, 2]}, "llama", "heads", 5),  # of two groups
        ({0: [0, 1], 1: [3]}, "llama", "heads", 6 * 4 - 1),  # one group and a half
        ({0: [0, 1], 1: [0, 1, 2, 3]}, "llama", "groups", 1),  # fills one of its layers
        ({0: [0, 1, 2, 3]}, "llama", "none", 0),
        ({0: [0, 1]}, "gpt2", "heads", 5),
        ({0: [0, 1, 2, 3]}, "gpt2", "none", 0),
        ({0: [0, 1]}, "falcon", "heads", 5),
        ({0: [0, 1, 2, 3]}, "falcon", "none", 0),
    ],
)
def test_only_whole_groups_are_compared_with_groups(by_layer, model, kind, others):
    drawn = control(by_layer, model)
    assert (drawn.kind, drawn.others) == (kind, others)
    sets = drawn.sets(3, np.random.default_rng(7))
    assert len(sets) == min(3, others)
    if kind == "heads":  # as before there were groups
        assert sets == head_sets(dict.fromkeys(by_layer, 4), by_layer, 3, np.random.default_rng(7))


def test_a_set_that_fills_its_layers_has_no_control_and_says_so():
    model = shared("bridge", "llama")
    sets = {"all": ["L0", "L1"], "layer": ["L0KV0", "L0KV1"], "half": "L0KV1"}
    with pytest.warns(
        UserWarning, match=r"\['all', 'layer'\]: a set of all heads of its layers has no other heads as a"
    ):
        table = swept(model, sets, control="random")
    assert table.attrs["control_of_sets"] == {"all": "none", "layer": "none", "half": "groups"}
    columns = [name for name in table if name.startswith("control_") and name != "control_draws"]
    assert table.loc[:1, columns].isna().all(axis=None)
    assert table["control_draws"].tolist()[:2] == [[], []]
    assert table["control_p_floor"].iloc[2] == 0.5
    plain = swept(model, sets)
    np.testing.assert_allclose(table["delta"], plain["delta"], rtol=0, atol=1e-6)  # float32, other batches
    assert "control_of_sets" not in plain.attrs


@pytest.mark.slow
def test_under_one_key_head_no_group_has_a_control():
    with pytest.warns(UserWarning, match=r"\['L0KV0', 'L1KV0'\]: a set of all heads of its layers has no other"):
        table = swept(shared("bridge", "falcon"), control="random")
    assert table["name"].tolist() == ["L0KV0", "L1KV0"]
    assert table["control_p"].isna().all()
    assert table["delta_p"].notna().all()
    ablation_effects(table)  # draws no control


def test_more_draws_than_groups_are_said():
    with pytest.warns(UserWarning, match=r"draws=19, but the control of 'L0KV0' is other sets .* most 1: .* 1 / 2"):
        table = swept(shared("bridge", "llama"), control="random", draws=19)
    assert table["control_draws"].map(len).tolist() == [1] * 4


@pytest.mark.slow
def test_a_group_is_run_once_and_a_folder_gives_the_same(planted, monkeypatch, tmp_path):
    counted, real = [], layer_effects_module.replayed_values

    def count(run, sequences, replays):
        counted.append(len(replays))
        return real(run, sequences, replays)

    monkeypatch.setattr(layer_effects_module, "replayed_values", count)
    table = swept(planted, control="random")
    assert sum(counted) == 8  # without this, 8 groups and 3 others for each
    kept = swept(planted, control="random", folder=tmp_path)
    pd.testing.assert_frame_equal(kept, table, rtol=0, atol=1e-6)  # float32, other batches
    counted.clear()
    pd.testing.assert_frame_equal(swept(planted, control="random", folder=tmp_path), kept, check_exact=True)
    assert counted == []


@pytest.mark.slow
def test_a_picture_names_the_control(planted):
    table = swept(planted, control="random")
    figure = ablation_effects(table, table.nlargest(3, "delta"))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[1].startswith(
        "3 random sets of key/value groups of the same layers, from the least to the largest: no"
    )
    assert len(figure.axes[0].get_yticklabels()) == 3
    assert len(ablation_effects(table, "L1KV2").axes[0].get_yticklabels()) == 1


def test_a_screen_of_groups_is_refused():
    with pytest.raises(ValueError, match="screen='gradient' estimates single heads, and heads= has sets"):
        swept(shared("bridge", "llama"), screen="gradient")
