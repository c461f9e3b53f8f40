"""`cache_prices`: equal to a masked run of transformers, paired with random sets, and what is refused."""

import functools
import tempfile

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import transformers
import zoo
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, IncompatibleCheckpoint
from tlspectral.hooks import short_caches
from tlspectral.hooks.short_caches import _distant_attention
from tlspectral.hooks.sweeps import layer_effects
from tlspectral.models.reading import attention_view, measured
from tlspectral.models.running.long_prompts import strips_of
from tlspectral.models.running.prompts import packed_prompts

ROWS = torch.randint(3, 97, (8, 24), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(1))
WINDOW, SINKS = 5, 2


def llama():
    """The shared model: two layers, four query heads and two key/value groups in each."""
    return shared("bridge", "llama")


@functools.cache
def prices(*, names=(), **options):
    """Prices on `ROWS` of the model `llama`, of sets if they are named."""
    groups = {name: [*groups] for name, groups in names} or True
    return tls.cache_prices(llama(), ROWS, windows=[WINDOW], sinks=SINKS, **{"groups": groups, **options})


def masked_losses(model, heads, window, sinks):
    """Loss of each row behind window and sinks in a model of transformers, keys of `heads` hidden by a mask of ours."""
    length = ROWS.shape[1]
    at = torch.arange(length)
    kept = (at <= at[:, None]) & ((at[:, None] - at < window) | (at < sinks))
    masks = []
    for layer, block in enumerate(model.model.layers):
        seen = torch.stack([kept if (layer, head) in heads else at <= at[:, None] for head in range(4)])
        mask = torch.where(seen, 0.0, -torch.inf)[None].expand(len(ROWS), -1, -1, -1)

        def masked(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        masks.append(block.self_attn.register_forward_pre_hook(masked, with_kwargs=True))
    with torch.no_grad():
        logits = model(ROWS).logits
    for handle in masks:
        handle.remove()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten(), reduction="none")
    return losses.view(len(ROWS), -1)[:, window + sinks :].mean(1).double().numpy()


def test_a_price_is_that_of_a_masked_run_of_transformers():
    with tempfile.TemporaryDirectory() as folder:
        path = zoo.save_folder("llama", folder)
        plain = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        model = tls.load_model(path)
        sets = {"both": ["L0KV1", "L1KV0"]}
        alone = tls.cache_prices(model, ROWS, windows=[WINDOW, 9], sinks=SINKS)
        together = tls.cache_prices(model, ROWS, windows=[WINDOW, 9], sinks=SINKS, groups=sets)
    groups = {
        f"L{layer}KV{group}": {(layer, 2 * group), (layer, 2 * group + 1)} for layer in range(2) for group in range(2)
    }
    groups["both"] = groups["L0KV1"] | groups["L1KV0"]
    assert len(alone) == 2 * 4
    for row in pd.concat([alone, together]).itertuples():
        intact, hidden = (masked_losses(plain, heads, row.window, SINKS) for heads in ((), groups[row.name]))
        # Losses of 5 nats in float32, measured 2e-7; a key that stays hidden or seen by mistake moves them by 1e-3.
        assert row.loss == pytest.approx(hidden.mean(), abs=2e-6)
        assert row.delta == pytest.approx((hidden - intact).mean(), abs=2e-6)
        assert row.delta_se == pytest.approx(scipy.stats.sem(hidden - intact), abs=2e-6)
    assert alone["delta"].abs().min() > 1e-4


def test_a_set_is_paired_with_each_random_set():
    # Of two groups in each layer, a set with one of each has three others: these are all random sets.
    others = {f"L0KV{a} L1KV{b}": [f"L0KV{a}", f"L1KV{b}"] for a in range(2) for b in range(2)}
    table = prices(names=tuple((name, tuple(groups)) for name, groups in others.items())).set_index("name")
    assert (table["could_differ"] == 2).all()
    assert (table["excess_p_floor"] == 0.25).all()
    for name, row in table.iterrows():
        differences = row["delta"] - table["delta"].drop(name)
        assert sorted(row["excess_draws"]) == pytest.approx(sorted(differences), abs=1e-12)
        assert row["excess"] == pytest.approx(differences.mean(), abs=1e-12)
        assert row["excess_p"] == (1 + (differences >= 0).sum()) / 4
        assert len(row["excess_draws_se"]) == 3
        assert 0 < row["excess_se"] < 1
    alone = prices().set_index("name")
    row = alone.loc["L1KV0"]
    assert row["excess_draws"] == [pytest.approx(row["delta"] - alone.loc["L1KV1", "delta"], abs=1e-12)]
    assert row["excess_se"] == pytest.approx(row["excess_draws_se"][0], abs=1e-15)


def test_of_a_whole_layer_no_random_set_can_differ():
    row = prices(names=(("whole", ("L1",)),)).iloc[0]
    assert (row["could_differ"], row["n_groups"], row["excess_draws"]) == (0, 2, [])
    assert np.isnan([row["excess"], row["excess_p"], row["excess_p_floor"]]).all()
    row = prices(names=(("mixed", ("L1", "L0KV0")),)).iloc[0]
    assert (row["could_differ"], len(row["excess_draws"])) == (1, 1)


def test_groups_are_chosen_by_distant_attention_on_other_rows():
    table = prices(chosen_on=OTHERS, share=0.25, groups=False)
    at = torch.arange(24)
    distant = (at[:, None] - at >= WINDOW) & (at >= SINKS)
    mass = tls.detect_heads(llama(), prompts=OTHERS, pattern=distant.double())
    mass = mass.assign(group=mass["head"] // 2).groupby(["layer", "group"])["pattern"].max()
    layer, group = mass.idxmin()
    assert table.attrs["sets"] == {str(WINDOW): {"least distant attention": [f"L{layer}KV{group}"]}}
    own = prices().set_index("name").loc[f"L{layer}KV{group}"]
    assert table.loc[0, "delta"] == pytest.approx(own["delta"], abs=1e-6)  # float32 of other batches
    with pytest.raises(ValueError, match="chosen on rows that price nothing"):
        prices(chosen_on=ROWS[3:4])


def test_distant_attention_is_the_mean_attention_to_the_hidden_keys():
    """For several windows at once, rows of unequal length, and strip by strip."""
    rows = packed_prompts(attention_view(llama()), [OTHERS[0], OTHERS[1, :19], OTHERS[2, :23]])
    at = torch.arange(24)

    def of_detectors(window, sinks):
        def distant(tokens):
            n = len(tokens)
            return ((at[:n, None] - at[:n] >= window) & (at[:n] >= sinks)).double()

        return tls.detect_heads(
            llama(), prompts=[row[:n] for row, n in zip(rows.tokens, rows.lengths, strict=True)], pattern=distant
        )

    for sinks in (0, 2):
        with measured(llama()) as view:
            found = _distant_attention(view, rows, [5, 9], sinks)
            with strips_of(7):
                by_strips = _distant_attention(view, rows, [5, 9], sinks)
            with strips_of(1):  # the first strip has fewer keys than sinks
                by_query = _distant_attention(view, rows, [5, 9], sinks)
        for window in (5, 9):
            expected = of_detectors(window, sinks).set_index(["layer", "head"])["pattern"]
            for pair, value in expected.items():
                # Measured: 1e-7, sums of float32; heads differ by 1e-2.
                by_way = [way[pair][window] for way in (found, by_strips, by_query)]
                assert by_way == pytest.approx([value] * 3, abs=1e-6)


def test_fewer_than_eight_rows_have_no_error():
    seven = tls.cache_prices(llama(), ROWS[:7], windows=WINDOW, sinks=SINKS)
    assert seven[["delta_se", "excess_se"]].isna().all(axis=None)
    assert np.isnan(seven["excess_draws_se"].tolist()).all()
    assert seven["excess_p"].notna().all()
    with pytest.warns(UserWarning, match="of 8 prompts 7 are distinct"):
        equal = tls.cache_prices(llama(), ROWS[[0, *range(7)]], windows=WINDOW, sinks=SINKS)
    assert equal["delta_se"].isna().all()


def test_a_folder_is_resumed_and_the_table_is_kept(tmp_path):
    table = prices(folder=tmp_path / "prices")
    files = sorted((tmp_path / "prices").glob("**/*"))
    again = tls.cache_prices(llama(), ROWS, windows=[WINDOW], sinks=SINKS, folder=tmp_path / "prices")
    assert files == sorted((tmp_path / "prices").glob("**/*"))
    tls.write_table(again, tmp_path / "prices.parquet")
    read = tls.read_table(tmp_path / "prices.parquet")
    for one in (again, read):
        pd.testing.assert_frame_equal(one.drop(columns=["excess_draws", "excess_draws_se"]),
                                      table.drop(columns=["excess_draws", "excess_draws_se"]))  # fmt: skip


def test_a_long_set_is_resumed_from_its_random_sets(tmp_path, monkeypatch):
    calls = []

    def set_values(part, rows, sets, intact):
        calls.append(len(sets))
        return layer_effects.set_values(part, rows, sets, intact)

    monkeypatch.setattr(short_caches, "set_values", set_values)
    monkeypatch.setattr(short_caches, "TOKENS_OF_JOB", 2 * ROWS.numel())  # two sets of groups in a job
    names, folder = (("some", ("L0KV0", "L1KV1")),), tmp_path / "prices"
    table = prices(names=names, draws=3, folder=folder)
    assert calls == [2, 2]
    removed = sorted(folder.glob("**/*.parquet"))[-1]
    removed.unlink()
    prices.cache_clear()
    pd.testing.assert_frame_equal(prices(names=names, draws=3, folder=folder), table)
    assert calls == [2, 2, 2]
    assert removed.exists()


def test_a_folder_of_the_model_without_hooks_is_refused_with_them(tmp_path):
    """Random sets of a set that was stopped would otherwise run under other hooks than the set itself."""
    model, options = zoo.bridge("llama"), {"windows": [WINDOW], "sinks": SINKS, "folder": tmp_path / "prices"}
    tls.cache_prices(model, ROWS, **options)
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: 0.5 * z)
    with (
        pytest.warns(UserWarning, match="hook_z"),
        pytest.raises(IncompatibleCheckpoint, match="hooks on the model"),
    ):
        tls.cache_prices(model, ROWS, **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"windows": []}, ValueError, "prices nothing: give numbers of keys"),
        ({"windows": [0]}, ValueError, "a window is a number of keys"),
        ({"windows": [21]}, ValueError, "row 0 has 24 tokens, and behind a window of 21 and 2 first tokens nothing"),
        ({"groups": False}, ValueError, "groups=False prices nothing"),
        ({"groups": {}}, ValueError, "groups={} prices nothing"),
        (
            {"groups": ["L0KV1"]},
            TypeError,
            "groups= must be True .*, or a dict of sets; found",
        ),
        ({"groups": {"a": []}}, ValueError, "the set 'a' has no heads"),
        ({"groups": {"a": ["L0H1"]}}, ValueError, "has L0H1, a part of L0KV0, whose heads share one cache"),
        ({"groups": {"a": ["L9"]}}, BadHead, "does not exist"),
        ({"chosen_on": OTHERS[:, :6]}, ValueError, "chosen_on: row 0 has 6 tokens"),
        ({"chosen_on": OTHERS, "share": 0.01}, ValueError, "of 4 groups is none or all of them"),
        ({"draws": 0}, ValueError, "draws is a number of random sets"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        tls.cache_prices(llama(), ROWS, **{"windows": [WINDOW], "sinks": SINKS, **options})
