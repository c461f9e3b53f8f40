"""Tables about the heads of one model as one table: rows, names, documentation, and what is refused."""

import pandas as pd
import pytest

import tlspectral as tls
from tlspectral.tables import describe_columns, join, read_table, write_table

ORIGIN = {"model": "tiny", "backend": "bridge", "weights_by_layer": {"0": "a" * 64, "1": "b" * 64}, "n_layers": 2}
PAIRS = {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1]}


def heads():
    table = pd.DataFrame({**PAIRS, "name": ["L0H0", "L0H1", "L1H0", "L1H1"], "prev": [0.1, 0.2, 0.3, 0.4]})
    table.attrs = {**ORIGIN, "seed": 3, "table": "analyze_heads"}
    return table


def sweep(part="rope_phase", **attrs):
    table = pd.DataFrame({**PAIRS, "part": part, "delta": [1.0, 2.0, 3.0, 4.0]}).iloc[::-1]
    table.attrs = {**ORIGIN, "task": "induction", "table": "ablation_sweep", **attrs}
    return table


def kinds():
    rows = [(0, 1, "induction", 0.9, True), (0, 1, "self", 0.2, False), (1, 1, "induction", 0.1, False)]
    table = pd.DataFrame(rows, columns=["layer", "head", "kind", "score", "strong"])
    table.attrs = {**ORIGIN, "table": "a table that nothing makes"}
    return table


def test_every_number_stands_in_the_row_of_its_head_and_the_tables_are_left_as_they_were():
    one, other = heads(), sweep()
    joined = join(one, other, kinds(), text=sweep("output"))
    for table, copy in ((one, heads()), (other, sweep())):
        pd.testing.assert_frame_equal(table, copy)
        assert table.attrs == copy.attrs
    assert list(joined) == ["layer", "head", "name", "prev", "rope_phase_delta", "induction_score", "induction_strong",
                            "self_score", "self_strong", "text_output_delta"]  # fmt: skip
    assert list(joined["name"]) == list(heads()["name"])
    assert list(joined["rope_phase_delta"]) == list(joined["text_output_delta"]) == [1.0, 2.0, 3.0, 4.0]
    assert joined["induction_score"].tolist()[1::2] == [0.9, 0.1]
    assert joined["induction_score"].isna().tolist() == [True, False, True, False]
    assert joined["induction_strong"].dtype == "boolean"
    assert joined["induction_strong"].tolist() == [pd.NA, True, pd.NA, False]
    assert joined["self_score"].notna().sum() == 1


def test_numbers_and_several_keys_are_spelled_into_the_names():
    table = pd.DataFrame({"layer": 0, "head": [0, 0, 1, 1], "frequency": [0, 1] * 2, "kind": "a b", "n": [1, 2, 3, 4]})
    table.attrs = ORIGIN
    joined = join(heads().iloc[:2], table)
    assert list(joined)[4:] == ["a_b_frequency_0_n", "a_b_frequency_1_n"]
    assert joined["a_b_frequency_1_n"].dtype == "int64"  # nothing is missing, so nothing is converted
    assert joined["a_b_frequency_1_n"].tolist() == [2, 4]


def test_columns_keep_their_meaning_in_the_frame_and_in_a_file(tmp_path):
    original = tls.tables.describe_table("ablation_sweep").set_index("name").loc["delta"]
    joined = join(heads(), sweep("output"), text=sweep("output"), mine=kinds())
    join(heads(), sweep("output"), text=sweep(), mine=kinds())  # no column of another join answers for one of this
    described = describe_columns(joined).set_index("name")
    assert list(described.index) == list(joined)
    for name in ("output_delta", "text_output_delta"):
        assert described.loc[name, "meaning"] == f"{original['meaning']} Where part output."
        assert described.loc[name, "unit"] == original["unit"] != ""
        assert joined.attrs["columns"][name] == described.loc[name, "meaning"]
    assert described.loc["mine_self_score", "meaning"] == ""  # nothing is invented
    write_table(joined, tmp_path / "joined.parquet")
    again = read_table(tmp_path / "joined.parquet")
    pd.testing.assert_frame_equal(again, joined)
    pd.testing.assert_frame_equal(describe_columns(again), describe_columns(joined))
    assert again.attrs["joined"]["text"] == {"task": "induction", "table": "ablation_sweep"}
    assert again.attrs["seed"] == 3


def test_a_joined_table_can_be_joined_and_reported():
    joined = join(join(heads().assign(dir_frac=0.5, D_head=0.5), sweep("output")), sweep("rope_phase"))
    assert set(joined.attrs["joined"]) == {"ablation_sweep", "ablation_sweep_2"}
    assert {"output_delta", "rope_phase_delta"} <= set(joined)
    assert "Where part rope_phase." in tls.report.report(joined)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (lambda: sweep(weights_by_layer={"1": "c" * 64}), "other weights than .* ablation_sweep: the hash of layer 1"),
        (lambda: sweep(weights_by_layer={"7": "c" * 64}), "are of one model: they have no layer in common"),
        (lambda: sweep(backend="hooked", model="other"), "of model tiny, the rows of .* are of model other"),
        (lambda: sweep(n_layers=4), "of n_layers 2, the rows of .* are of n_layers 4"),
        (lambda: sweep().assign(layer=[9, 1, 0, 0]), "holds L9H1, which the table of heads lacks"),
        (lambda: pd.concat([sweep(), sweep()]), "several rows for layer 1, head 1, part rope_phase"),
        (lambda: heads().drop(columns="name"), "has the column prev, which stands there already: .*other=table"),
        (lambda: pd.concat([heads()] * 2), "several rows for layer 0, head 0: .*none of part, .* tells them apart"),
        (lambda: sweep().assign(part=None), "a row without part"),
        (lambda: sweep().assign(part=["a b", "a_b", "a b", "a_b"], layer=0, head=[0, 0, 1, 1]), "spelled alike"),
        (lambda: sweep().assign(receiver="L1H1.k"), "layer and head of the table ablation_sweep are those of a sender"),
        (lambda: sweep().drop(columns="head"), "has no column head"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(table, said):
    with pytest.raises(ValueError, match=said):
        join(heads(), table())


def test_a_table_of_heads_has_a_row_for_each():
    with pytest.raises(ValueError, match="the table of heads has several rows"):
        join(pd.concat([heads()] * 2), sweep())
