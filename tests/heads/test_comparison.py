"""Two head tables side by side: a changed head alone differs, and tables that do not fit are refused."""

import functools
import json

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

import tlspectral as tls
from tlspectral.heads import compare_heads
from tlspectral.heads.comparison import COMPARED_COLUMNS
from tlspectral.tables import read_table, write_table

CHANGED = (1, 2)
WEIGHT_COLUMNS = ("dir_frac", "D_head", "henrici", "content_pos_frac", "self_match", "rope_imag_frac", "freq_centroid")
analyzed = functools.partial(tls.analyze_heads, null_draws=10, detectors=False)


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


UNSEEN = r"weights of layer 1 differ between a and b, and no head of it changed by 0.02 .* adds qk_change and ov_change"


@pytest.mark.slow
def test_the_changed_head_alone_differs_whatever_the_order_of_rows(base, tuned):
    with pytest.warns(UserWarning, match=UNSEEN):
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
    with pytest.warns(UserWarning, match=UNSEEN):
        forth, back = compare_heads(base, tuned), compare_heads(tuned, base)
    pd.testing.assert_frame_equal(forth.filter(like="_diff"), -back.filter(like="_diff"))
    with pytest.warns(UserWarning, match=UNSEEN):
        assert forth.equals(compare_heads(base.sample(frac=1, random_state=0), tuned.iloc[::-1]))
    assert forth["change_rank"].isna().all()  # two random heads of so few dimensions lie further apart than these
    assert forth[["layer", "head"]].equals(base[["layer", "head"]])


def test_an_unknown_band_or_difference_is_neither_inside_nor_outside(base):
    other = base.copy()
    other.loc[0, "D_head"] = np.nan
    other.loc[1, "D_head_null_std"] = np.nan
    table = compare_heads(base, other)
    assert table["D_head_outside"].isna().tolist() == [True, True, *[False] * (len(base) - 2)]
    assert table["D_head_outside"].dtype == "boolean"
    assert "self_match_band" not in table


def test_attrs_say_which_models_and_survive_a_file(base, tuned, tmp_path):
    base, tuned = base.copy(), tuned.copy()
    base.attrs |= {"model": "base", "revision": "abc"}
    tuned.attrs |= {"model": "tuned"}
    with pytest.warns(UserWarning, match=UNSEEN):
        table = compare_heads(base, tuned)
    assert table.attrs["weights"] == {"differ": [1], "equal": [0]}
    weights = base.attrs["weights_sha256"]
    assert table.attrs["a"] == {"model": "base", "revision": "abc", "weights_sha256": weights}
    assert table.attrs["b"]["model"] == "tuned"
    assert table.attrs["settings"] == {"seed": 0, "null_draws": 10, "null_blocks": "shared", "detectors": None}
    assert json.loads(json.dumps(table.attrs, allow_nan=False)) == table.attrs
    write_table(table, tmp_path / "comparison.parquet")
    assert read_table(tmp_path / "comparison.parquet").attrs == table.attrs


def test_behaviour_is_compared_where_both_ran_the_same_detectors():
    model = tls.load_model("tiny-rope")
    heads = analyzed(model, detectors=True)
    table = compare_heads(heads, heads)
    assert (table["prev_diff"] == 0).all()
    assert {"prev_band", "dup_band", "ind_band"} <= set(table)
    assert table.attrs["settings"]["detectors"]["segment_length"] == heads.attrs["detectors"]["segment_length"]
    for detectors, said in (({**heads.attrs["detectors"], "segment_length": 16}, "' segment_length is .* and 16"),
                            ({**heads.attrs["detectors"], "max_se": None}, "' max_se is 0.02 in a and None"),
                            (None, " is .* in a and None")):  # fmt: skip
        with pytest.raises(ValueError, match=f"different settings: detectors{said} in b"):
            compare_heads(heads, with_attrs(heads, detectors=detectors))


@pytest.mark.slow
def test_tables_that_ran_as_many_sequences_as_their_heads_needed_are_compared():
    model = tls.load_model("tiny-rope")
    few, more = (analyzed(model, detectors=True, n_sequences=n, max_se=0.05) for n in (20, 23))
    counts = [table.attrs["detectors"]["n_sequences"] for table in (few, more)]
    assert counts == [20, 23]
    table = compare_heads(few, more)
    assert (table["prev_diff"] != 0).any()
    assert table.attrs["settings"]["detectors"] == {"max_se": 0.05, "segment_length": 31, "bos": 0, "seed": 0}


def with_attrs(heads, **attrs):
    other = heads.copy()
    other.attrs = {**heads.attrs, **attrs}
    return other


def renamed(heads):
    """The table without its attrs, as pandas' own functions leave it."""
    return pd.DataFrame(heads.to_dict("list"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda a: a.assign(layer=a["layer"] + 2), r"no head in common: .* \[0, 1\] and .* \[2, 3\]"),
        (lambda a: a.drop(columns="henrici"), r"table b has no column henrici: .* analyze_heads"),
        (lambda a: a.assign(layer=0, head=0), r"table b has a head twice"),
        (lambda a: a.assign(kv_head=0), r"differ in architecture: kv_head of L0H2 is 1 and 0"),
        (lambda a: a.assign(rotary_fraction=np.nan), r"rotary_fraction of L0H0 is 1.0 and nan"),
        (lambda a: with_attrs(a, seed=3), r"different settings: seed is 0 in a and 3 in b"),
        (lambda a: with_attrs(a, null_draws=300), r"null_draws is 10 in a and 300 in b"),
        (lambda a: renamed(a), r"table b has no model, seed, .*read_table"),
    ],
)
def test_tables_that_do_not_fit_are_refused(base, other, words):
    with pytest.raises(ValueError, match=words):
        compare_heads(base, other(base))


# --- two models ---


@pytest.fixture(scope="module")
def models():
    return zoo.shared("bridge", "llama"), changed_model(0.3)


@pytest.mark.slow
def test_two_models_are_compared_by_their_operators_too(models):
    table = compare_heads(*models)
    assert list(table)[8:12] == ["behaviour_rank", "spectrum_rank", "qk_change", "ov_change"]
    assert table["name"].iloc[0] == "L1H2"
    factors = [tls.qk_operators(model)["L1H2"].w_q for model in models]
    assert 0.1 < table["qk_change"].iloc[0] < 2 * (factors[1] - factors[0]).norm() / factors[0].norm()
    assert (table["qk_change"].iloc[1:] == 0).all()
    assert (table["ov_change"] == 0).all()
    assert table.attrs["weights"] == {"differ": [1], "equal": [0]}
    assert table.attrs["outside"] == table.attrs["moved"] == {}
    assert (table["counterpart"] == table["name"]).all()
    assert table.attrs["likeness"]["embedding"] == pytest.approx(1)
    # The other columns are those of the tables with the defaults.
    tables = [tls.analyze_heads(model) for model in models]
    with pytest.warns(UserWarning, match=UNSEEN):
        of_tables = compare_heads(*tables)
    of_models = ["qk_change", "ov_change", "counterpart", "counterpart_likeness"]
    in_order = table.sort_values(["layer", "head"], ignore_index=True).drop(columns=of_models)
    pd.testing.assert_frame_equal(in_order, of_tables.sort_values(["layer", "head"], ignore_index=True))
    assert {"qk_change", "ov_change"}.isdisjoint(of_tables)


@pytest.mark.slow
def test_a_model_is_given_in_any_form_that_analyze_heads_takes(tmp_path):
    folder = zoo.save_folder("llama", tmp_path / "llama")
    files = tls.load_model(folder, weights="files")
    for one in (zoo.hf_model("llama"), str(folder), files):
        table = compare_heads(zoo.shared("bridge", "llama"), one)
        assert (table[["qk_change", "ov_change"]] == 0).all(axis=None)
        assert table["change_rank"].isna().all()
    assert "unknown" in table.attrs["weights"]  # hashes of files are of less


@pytest.mark.slow
def test_a_comparison_of_models_survives_a_file(models, tmp_path):
    table = compare_heads(*models)
    write_table(table, tmp_path / "comparison.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "comparison.parquet"), table)
    assert read_table(tmp_path / "comparison.parquet").attrs == table.attrs


def test_a_table_and_a_model_are_refused_and_names_of_files(base, models):
    for pair, said in (((base, models[1]), "a is a DataFrame and b is a TransformerBridge"),
                       ((models[0], base), "a is a TransformerBridge and b is a DataFrame"),
                       ((base, "tiny-rope"), "a is a DataFrame and b is a str")):  # fmt: skip
        with pytest.raises(TypeError, match=f"takes two models or two tables: {said}. Give both models, or .*analyze"):
            compare_heads(*pair)
    for pair, which in ((("heads.parquet", base), "a"), ((models[0], "heads.csv"), "b")):
        with pytest.raises(TypeError, match=rf"{which} is the file name of a table: give .*read_table\('heads"):
            compare_heads(*pair)
    with pytest.raises(TypeError, match="neither a TransformerBridge nor"):
        compare_heads(models[0], {"layer": 1})


def test_two_trainings_are_refused_before_tables_are_made(monkeypatch):
    monkeypatch.setattr("tlspectral.heads.comparison.analyze_heads", None)
    with pytest.raises(ValueError, match="share no common basis"):
        compare_heads("tiny-rope", "tiny-rope-sym")
