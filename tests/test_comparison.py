"""Two head tables side by side: a changed head alone differs, and tables that do not fit are refused."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.heads import compare_heads
from tlspectral.heads.comparison import COMPARED_COLUMNS
from tlspectral.studies.fingerprint.statistics import weight_noise_band
from tlspectral.tables import read_table, write_table

CHANGED = (1, 2)
WEIGHT_COLUMNS = ("dir_frac", "D_head", "henrici", "content_pos_frac", "self_match", "rope_imag_frac", "freq_centroid")


def analyzed(model, **arguments):
    return tls.analyze_heads(model, **{"null_draws": 10, "detectors": False, **arguments})


def changed_model(size: float):
    """The tiny Llama with the query weights of one head moved by `size` of their spread."""
    model = zoo.bridge("llama")
    layer, head = CHANGED
    projection = model.blocks[layer].attn.q.original_component.weight
    d_head = projection.shape[0] // 4
    rows = slice(head * d_head, (head + 1) * d_head)
    with torch.no_grad():
        noise = torch.randn(projection[rows].shape, generator=torch.Generator().manual_seed(0))
        projection[rows] += size * projection.std() * noise
    return model


@pytest.fixture(scope="module")
def base():
    return analyzed(zoo.bridge("llama"))


@pytest.fixture(scope="module")
def tuned():
    return analyzed(changed_model(0.3))


@pytest.fixture(scope="module")
def noise():
    return weight_noise_band(zoo.bridge("llama"), draws=20)


def test_the_changed_head_alone_differs_whatever_the_order_of_rows(base, tuned, noise):
    table = compare_heads(base, tuned)
    assert list(table.filter(like="_diff")) == [f"{name}_diff" for name in COMPARED_COLUMNS]
    at = (table["layer"] == CHANGED[0]) & (table["head"] == CHANGED[1])
    for name in WEIGHT_COLUMNS:
        difference = table[f"{name}_diff"]
        assert (difference[~at] == 0).all(), name
        assert difference[at].item() != 0, name
        expected = tuned.loc[at, name].item() - base.loc[at, name].item()  # b less a
        assert difference[at].item() == expected
    assert table["prev_diff"].isna().all()  # no detectors were run
    same = compare_heads(base, base).filter(like="_diff")
    assert ((same == 0) | same.isna()).all(axis=None)
    forth, back = compare_heads(base, tuned), compare_heads(tuned, base)
    pd.testing.assert_frame_equal(forth.filter(like="_diff"), -back.filter(like="_diff"))
    assert forth.equals(compare_heads(base.sample(frac=1, random_state=0), tuned.iloc[::-1]))
    assert forth["change_rank"].isna().all()  # two random heads of so few dimensions lie further apart than these
    assert forth[["layer", "head"]].equals(base[["layer", "head"]])
    with_noise = compare_heads(base, tuned, noise_a=noise)
    assert with_noise.equals(compare_heads(base, tuned, noise_a=noise.iloc[::-1]))


def test_rounding_explains_small_changes_and_not_large_ones(base, tuned, noise):
    # Moved by 1e-9 of its spread, the weight stays within its float32 rounding of 6e-8 of its size.
    stand_in = noise.copy()  # the band of another model is the same but for the changed weight
    del stand_in.attrs["weights_sha256"], stand_in.attrs["weights_by_layer"]
    within = compare_heads(base, analyzed(changed_model(1e-9)), noise_a=noise, noise_b=stand_in)
    beyond = compare_heads(base, tuned, noise_a=noise, noise_b=stand_in)
    assert beyond["change_rank"].isna().all()  # 0.009 at most: more than rounding, less than the floor of 0.02
    at = (beyond["layer"] == CHANGED[0]) & (beyond["head"] == CHANGED[1])
    for name in ("dir_frac", "D_head", "rope_imag_frac"):
        assert not within[f"{name}_outside"].any()
        assert beyond[f"{name}_outside"].tolist() == at.tolist()
        np.testing.assert_allclose(beyond[f"{name}_band"], 2 * np.sqrt(2) * noise[f"{name}_sd"], rtol=1e-12)
    larger = compare_heads(base, analyzed(changed_model(1.0)), noise_a=noise, noise_b=stand_in)
    assert larger[["layer", "head"]].iloc[0].tolist() == list(CHANGED)
    assert larger["spectrum_of"].dropna().tolist() == ["D_head"]
    assert larger["spectrum_change"].iloc[0] == larger["D_head_diff"].iloc[0]
    one_sided = compare_heads(base, tuned, noise_b=stand_in)
    detected = analyzed(tls.load_model("tiny-rope"), detectors=True)
    assert {"prev_band", "dup_band", "ind_band"} <= set(compare_heads(detected, detected))
    np.testing.assert_allclose(one_sided["D_head_band"], 2 * noise["D_head_sd"], rtol=1e-12)
    assert "self_match_band" not in one_sided  # the noise table does not have it


def test_an_unknown_band_or_difference_is_neither_inside_nor_outside(base, noise):
    other, holes = base.copy(), noise.copy()
    other.loc[0, "D_head"] = np.nan
    holes.loc[1, "D_head_sd"] = np.nan
    table = compare_heads(base, other, noise_a=holes)
    assert table["D_head_outside"].isna().tolist() == [True, True, *[False] * (len(base) - 2)]
    assert table["D_head_outside"].dtype == "boolean"


def test_attrs_say_which_models_and_survive_a_file(base, tuned, noise, tmp_path):
    base, tuned, noise = base.copy(), tuned.copy(), noise.copy()
    base.attrs |= {"model": "base", "revision": "abc"}
    tuned.attrs |= {"model": "tuned"}
    noise.attrs |= {"model": "base", "revision": "abc"}
    table = compare_heads(base, tuned, noise_a=noise)
    weights = base.attrs["weights_sha256"]
    assert table.attrs["a"] == {"model": "base", "revision": "abc", "weights_sha256": weights}
    assert table.attrs["b"]["model"] == "tuned"
    assert table.attrs["settings"] == {"seed": 0, "null_draws": 10, "null_blocks": "shared", "detectors": None}
    assert table.attrs["noise"] == {"a": {"storage": ["float32"], "draws": 20, "seed": 0}}
    assert json.loads(json.dumps(table.attrs, allow_nan=False)) == table.attrs
    write_table(table, tmp_path / "comparison.parquet")
    assert read_table(tmp_path / "comparison.parquet").attrs == table.attrs


def test_behaviour_is_compared_where_both_ran_the_same_detectors():
    model = tls.load_model("tiny-rope")
    heads = analyzed(model, detectors=True)
    table = compare_heads(heads, heads)
    assert (table["prev_diff"] == 0).all()
    assert table.attrs["settings"]["detectors"]["segment_length"] == heads.attrs["detectors"]["segment_length"]
    for detectors, said in (({**heads.attrs["detectors"], "segment_length": 16}, "' segment_length is .* and 16"),
                            (None, " is .* in a and None")):  # fmt: skip
        with pytest.raises(ValueError, match=f"other settings: detectors{said} in b"):
            compare_heads(heads, with_attrs(heads, detectors=detectors))


def with_attrs(heads, **attrs):
    other = heads.copy()
    other.attrs = {**heads.attrs, **attrs}
    return other


def renamed(heads):
    """The table without its attrs, as pandas' own functions leave it."""
    return pd.DataFrame(heads.to_dict("list"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda a, noise: {"b": a.assign(layer=a["layer"] + 2)}, r"no head in common: .* \[0, 1\] and .* \[2, 3\]"),
        (lambda a, noise: {"b": a.drop(columns="henrici")}, r"table b has no column henrici: .* analyze_heads"),
        (lambda a, noise: {"b": a.assign(layer=0, head=0)}, r"table b has some head twice"),
        (lambda a, noise: {"b": a.assign(kv_head=0)}, r"differ in architecture: kv_head of L0H2 is 1 and 0"),
        (lambda a, noise: {"b": a.assign(rotary_fraction=np.nan)}, r"rotary_fraction of L0H0 is 1.0 and nan"),
        (lambda a, noise: {"b": with_attrs(a, seed=3)}, r"other settings: seed is 0 in a and 3 in b"),
        (lambda a, noise: {"b": with_attrs(a, null_draws=300)}, r"null_draws is 10 in a and 300 in b"),
        (lambda a, noise: {"b": renamed(a)}, r"table b does not say its model, seed, .*read_table"),
        (lambda a, noise: {"b": a, "noise_b": noise.iloc[:-1]}, "noise_b lacks 1 of 8 heads, such as L1H3"),
        (
            lambda a, noise: {"b": a, "noise_a": with_attrs(noise, model="other", backend="another")},
            "the table a is of model .*, the rows of noise_a are of model other",
        ),
        (lambda a, noise: {"b": a, "noise_a": a}, "noise_a has no column dir_frac_sd: .* weight_noise_band"),
    ],
)
def test_tables_that_do_not_fit_are_refused(base, noise, given, words):
    with pytest.raises(ValueError, match=words):
        compare_heads(base, **given(base, noise))
