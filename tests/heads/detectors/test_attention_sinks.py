"""The table of sinks: its columns, its order, what it says of the model, and prompts that equal each other."""

import torch
import zoo
from described import assert_described
from zoo import shared

import tlspectral as tls
from tlspectral.models.reading import attention_view


def first_key(pattern, hook):
    """Half of the attention to key 0, the rest as it was."""
    made = 0.5 * pattern
    made[..., 0] += 0.5
    return made


def test_a_table_is_described_and_says_of_which_model():
    model, view = shared("bridge", "llama"), attention_view(shared("bridge", "llama"))
    ids = zoo.prompt(2, 40)
    with model.hooks(fwd_hooks=[(view.hook_names(1)["pattern"], first_key)]):
        table = tls.heads.attention_sinks(model, torch.cat([ids, ids[:1]]))
    assert_described(table)
    assert table[["layer", "prompt", "key"]].to_numpy().tolist() == [[1, 0, 0], [1, 1, 0], [1, 2, 0]]
    assert table["share"][0] == table["share"][2] > 0.5
    assert (table.attrs["n_sequences"], table.attrs["batch"]) == (3, 25)
    assert {"model", "weights_by_layer", "n_layers"} <= set(table.attrs)


def test_padding_is_no_query_and_no_key():
    model, row = shared("bridge", "llama"), zoo.prompt(1, 30)
    filled = torch.cat([torch.zeros(1, 12, dtype=torch.long), row], dim=1)
    mask = (torch.arange(42) >= 12).long()[None]
    given = {"input_ids": filled, "attention_mask": mask}
    alone, padded = (tls.heads.attention_sinks(model, one).attrs["sinks"] for one in (row, given))
    assert alone == padded
    assert alone["n_keys"] == 30
