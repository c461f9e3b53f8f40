"""The picture of hook points is true: each is there, in that order, with that shape, under both names."""

import re
from functools import partial

import pytest
import torch
import zoo

from tlspectral.models.reading.blocks import hook_names
from tlspectral.models.reading.view import attention_view

ROW = re.compile(r"^ {8}(\w*) +\|[ |<>-]*((?:attn\.)?hook_\w+)(?: +((?:\w+\.)*hook_\w+))? +(batch, .*)$", re.MULTILINE)
SIZES = {"d_model": zoo.WIDTH, "heads": zoo.HEADS, "key heads": 2, "d_head": zoo.WIDTH // zoo.HEADS}


def drawn():
    """Rows of the picture: key, name, name in a bridge, shape."""
    return ROW.findall(hook_names.__doc__)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_the_picture_of_hook_points_is_true(backend):
    model, rows, tokens = zoo.shared(backend, "llama"), drawn(), zoo.prompt()
    names = {f"blocks.0.{name}": shape for _, name, _, shape in rows}
    found = {}

    def keep(passed, hook, name):
        found[name] = passed.clone()

    model.run_with_hooks(tokens, fwd_hooks=[(name, partial(keep, name=name)) for name in names])
    assert list(found) == list(names)  # in the order of the pass
    sizes = {**SIZES, "batch": tokens.shape[0], **dict.fromkeys(("pos", "query", "key"), tokens.shape[1])}
    for name, shape in names.items():
        assert found[name].shape == tuple(sizes[one] for one in shape.split(", ")), name
    by_key = attention_view(model).hook_names(0)
    assert {key: f"blocks.0.{name}" for key, name, *_ in rows if key} == {
        key: name for key, name in by_key.items() if key not in ("cos", "sin")
    }
    others = {f"blocks.0.{other}": f"blocks.0.{name}" for _, name, other, _ in rows if other}
    assert len(others) > 7
    if backend == "bridge":
        model.run_with_hooks(tokens, fwd_hooks=[(other, partial(keep, name=other)) for other in others])
        assert all(torch.equal(found[other], found[name]) for other, name in others.items())
        assert {by_key["cos"], by_key["sin"]} == {"blocks.0.attn.hook_cos", "blocks.0.attn.hook_sin"}
