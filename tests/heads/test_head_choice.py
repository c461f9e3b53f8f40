"""Tables of a few heads: their rows are those of the whole table."""

import pandas as pd
import pytest
from streamed_checkpoints import analyze
from zoo import shared

from tlspectral.errors import BadHead
from tlspectral.models.checkpoints import layers as checkpoints

HEADS = [(1, 3), (0, 2), (1, 0)]


def assert_rows_of(part, whole, heads):
    keys = pd.MultiIndex.from_tuples(sorted(set(heads)), names=["layer", "head"])
    expected = whole.set_index(["layer", "head"]).loc[keys].reset_index()[list(whole)]
    pd.testing.assert_frame_equal(
        part.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )
    assert part["D_head_pct"].tolist() == (part["D_head"].rank() / len(part)).tolist()
    assert isinstance(part.index, pd.RangeIndex)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("gpt2", "fresh"), ("llama", "shared")])
def test_rows_of_a_loaded_model_are_those_of_the_whole_table(name, blocks):
    settings = {"null_blocks": blocks, "extras": ["score_asym", "position_share"], "detectors": name == "llama"}
    whole = analyze(shared("bridge", name), **settings)
    some = analyze(shared("bridge", name), heads=HEADS, **settings)
    assert_rows_of(some, whole, HEADS)
    assert some[["prev", "dup", "ind"]].notna().all(axis=None) == (name == "llama")
    top = whole.nlargest(2, "D_head")
    pairs = list(top[["layer", "head"]].itertuples(index=False, name=None))
    assert_rows_of(analyze(shared("bridge", name), heads=pd.concat([top, top]), **settings), whole, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["shared", "fresh"])
def test_rows_of_a_model_that_is_read_from_files_and_only_their_layers_are_read(folder, spied, blocks):
    whole = analyze(folder("gemma2"), null_blocks=blocks)
    read = spied(checkpoints.WeightFiles, "layer", at=1)
    heads = [(3, 1), (1, 0), (3, 0)]
    part = analyze(folder("gemma2"), heads=heads, null_blocks=blocks)
    assert read == [1, 3]
    assert_rows_of(part, whole, heads)


@pytest.mark.slow
def test_only_the_files_of_their_layers_are_fetched(hub, tmp_path):
    import tokenizer_kinds

    remote = tokenizer_kinds.save_tokenized("llama", tmp_path / "remote", max_shard_size="16KB")
    hub.publish("maker/model", remote)
    analyze("maker/model", heads=[(1, 2)])
    some = set(hub.fetched)
    analyze("maker/model")
    assert len(some) < len(set(hub.fetched))


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ([(0, 4)], "L0H4 does not exist: layer 0 has heads 0 to 3"),
        ([(2, 0)], "L2H0 does not exist: the model has layers 0 to 1"),
        ([], "heads= is empty"),
        ("L2", "L2 does not exist: the model has layers 0 to 1"),
        (["L0", "L-3"], "L-3 does not exist: the model has layers 0 to 1"),
    ],
)
@pytest.mark.parametrize("road", ["loaded", "streamed"])
def test_choices_that_are_refused(folder, road, heads, text):
    model = shared("bridge", "llama") if road == "loaded" else folder("llama")
    with pytest.raises(BadHead, match=text):
        analyze(model, heads=heads)
