"""Hooks of some rows of a batch: what they see and edit, and which acts first on its rows."""

import pytest
import torch
import zoo

from tlspectral.errors import EditNotHonored
from tlspectral.models.hooking.placing import acts_first
from tlspectral.models.hooking.some_rows import OfRows
from tlspectral.models.reading import attention_view

POINT = "blocks.0.attn.hook_z"


class Named:
    name = POINT


def test_a_hook_edits_its_rows_of_a_copy():
    whole = torch.arange(24.0).reshape(4, 3, 2)
    found = OfRows(lambda x, hook: -x, slice(1, 3), 4)(whole, Named)
    assert torch.equal(found[1:3], -whole[1:3])
    assert torch.equal(found[[0, 3]], whole[[0, 3]])
    assert bool((whole >= 0).all())
    assert OfRows(lambda x, hook: None, slice(1, 3), 4)(whole, Named) is None


@pytest.mark.parametrize("table", [torch.ones(1, 4, 6), torch.ones(4, 6)], ids=["of one row", "of four positions"])
def test_what_has_no_rows_is_seen_whole_and_not_edited(table):
    seen = []
    assert OfRows(lambda x, hook: seen.append(x.shape), slice(0, 2), 4)(table, Named) is None
    assert seen == [table.shape]
    with pytest.raises(EditNotHonored, match="not a row for each of the 4 rows of this run"):
        OfRows(lambda x, hook: x * 2, slice(0, 2), 4)(table, Named)


def test_ids_of_tokens_have_rows():
    seen = []
    OfRows(lambda x, hook: seen.append(x.tolist()), slice(1, 2), 2)(torch.tensor([[1, 2], [3, 4]]), Named)
    assert seen == [[[3, 4]]]


def test_a_hook_of_other_rows_does_not_act_before():
    """The scores of its rows are as the model made them, so that they are compared with its queries and keys."""
    model = zoo.bridge("llama")
    view, point = attention_view(model), model.hook_dict[POINT]

    def some(start, stop):
        def hook(z, hook):
            return None

        return hook, (POINT, OfRows(hook, slice(start, stop), 4))

    hooks = [some(0, 2), some(2, 4), some(1, 3), some(3, 4)]
    with view.hooks_on([placed for _, placed in hooks]):
        assert [acts_first(point, hook) for hook, _ in hooks] == [True, True, False, False]
        assert not acts_first(point, lambda z, hook: None)
    with model.hooks(fwd_hooks=[(POINT, lambda z, hook: z)]), view.hooks_on([placed for _, placed in hooks]):
        assert not any(acts_first(point, hook) for hook, _ in hooks)
