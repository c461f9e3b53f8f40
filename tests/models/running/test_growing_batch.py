"""Copies of the same sequences that join a pass at layers of their own: which rows a block runs, and with what."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zoo

from tlspectral.errors import EditNotHonored, UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.models.running.growing_batch import BlockArguments
from tlspectral.models.running.partial_runs import intact_run, logits_at

LAYERS = [0, 0, 1, 3]


def run_of(model, n=2, length=9, batch=5):
    view = attention_view(model)
    tokens, predicted = zoo.prompt(n, length), slice(-2, None)
    return intact_run(view, tokens, predicted, range(view.n_layers), batch=batch, reduce=lambda now, logits: None)


def rows_of_blocks(model):
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, output: seen.append(len(given[0])))
    return seen


MODELS = [("bridge", "gemma2"), ("bridge", "bloom"), pytest.param("hooked", "llama", marks=zoo.needs_hooked)]


@pytest.mark.parametrize(("backend", "name"), MODELS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_block_runs_the_rows_that_have_joined(backend, name, n):
    model = getattr(zoo, backend)(name)
    last = len(model.blocks) - 1
    intact, layers = run_of(model, n), [min(layer, last) for layer in LAYERS]
    seen = rows_of_blocks(model)
    with torch.no_grad():
        replays = intact.replay(layers, slice(None))
    assert seen == [n * sum(one <= layer for one in layers) for layer in range(last + 1)]
    whole = logits_at(intact.view, intact.tokens, intact.predicted).detach()
    # Batches of other sizes: 2e-7 measured in float32, where rows of the other prompt differ by more than 1.
    torch.testing.assert_close(replays, whole.repeat(4, 1, 1), rtol=0, atol=2e-6)


def test_as_many_rows_as_tokens_are_no_positions():
    """A mask or table of positions has as many rows as the batch then, and stays whole."""
    model = zoo.bridge("llama")
    intact, seen = run_of(model, n=1, length=4), rows_of_blocks(model)
    with torch.no_grad():
        replays = intact.replay([0, 0, 1, 1], slice(None))
    assert seen == [2, 4]
    whole = logits_at(intact.view, intact.tokens, intact.predicted).detach()
    torch.testing.assert_close(replays, whole.repeat(4, 1, 1), rtol=0, atol=2e-6)


def test_all_begin_together_where_the_axis_of_rows_is_not_known():
    """In a pass of as many rows as the intact one had, which happens where memory ran out."""
    model = zoo.bridge("llama")
    intact = run_of(model, n=4, batch=2)
    whole = logits_at(intact.view, intact.tokens[:1], intact.predicted).detach()
    seen = rows_of_blocks(model)
    with torch.no_grad():
        replays = intact.replay([0, 1], slice(0, 1))
    assert seen == [2, 2]
    torch.testing.assert_close(replays, whole.repeat(2, 1, 1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_what_a_user_puts_on_a_block_acts_once_on_every_row(register):
    """Also on rows that join behind it, whose stored stream has passed it."""
    model = zoo.bridge("gemma2")
    after = lambda module, given, output: (output[0] * 1.1, *output[1:]) if isinstance(output, tuple) else output * 1.1  # noqa: E731
    before = lambda module, given: (given[0] * 1.1, *given[1:])  # noqa: E731
    for block in model.blocks:
        getattr(block, register)(before if "pre" in register else after)
    intact = run_of(model)
    whole = logits_at(intact.view, intact.tokens, intact.predicted).detach()
    with torch.no_grad():
        replays = intact.replay(LAYERS, slice(None))
    torch.testing.assert_close(replays, whole.repeat(4, 1, 1), rtol=0, atol=2e-6)


def test_hooks_act_on_the_rows_of_their_copies():
    """In the layer where these join and behind it, and on what has no rows not at all."""
    model = zoo.bridge("gemma2")
    intact, shapes = run_of(model), []

    def off(name, copies):
        def edit(z, hook):
            shapes.append((name, len(z)))
            return torch.zeros_like(z)

        return copies, [(name, edit)]

    seen = ("blocks.2.attn.hook_cos", lambda cos, hook: shapes.append((hook.name, len(cos))))
    first, second = "blocks.0.attn.hook_z", "blocks.2.attn.hook_z"
    hooks = [off(first, slice(0, 1)), off(second, slice(1, 3)), (slice(2, 3), [seen])]
    with torch.no_grad():
        replays = intact.replay(LAYERS, slice(None), hooks)
    assert sorted(shapes) == [(first, 2), ("blocks.2.attn.hook_cos", 1), (second, 4)]
    edits = [[first], [second], [second], []]
    for found, points in zip(replays.split(2), edits, strict=True):
        with torch.no_grad(), model.hooks(fwd_hooks=[(name, lambda z, hook: torch.zeros_like(z)) for name in points]):
            expected = logits_at(intact.view, intact.tokens, intact.predicted)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    tables = (slice(0, 1), [("blocks.1.attn.hook_cos", lambda cos, hook: cos * 0)])
    with torch.no_grad(), pytest.raises(EditNotHonored, match="not a row for each of the 6 rows"):
        intact.replay(LAYERS, slice(None), [tables])


# --- what a block is given ---


@dataclass
class Kept:
    keys: Any
    frozen: bool = False


def given(rows):
    return (torch.ones(rows, 1, 4, 4), None), {
        "tables": (torch.ones(1, 4, 6), torch.ones(3, rows, 4)),
        "bias": torch.arange(rows * 2.0)[:, None].expand(-1, 4),
        "kept": Kept(torch.ones(rows, 5)),
        "named": {"flag": True, "positions": torch.ones(4, 4)},
    }


def test_arguments_are_cut_along_the_axis_of_rows():
    stream = torch.ones(3, 4, 8)
    noted = BlockArguments.of_block((stream, *given(3)[0]), given(3)[1])
    (mask, none), named = noted.cut(given(4), 4, 2, "blocks.0")
    assert (mask.shape, none) == ((2, 1, 4, 4), None)
    assert [one.shape for one in named["tables"]] == [(1, 4, 6), (3, 2, 4)]
    assert named["bias"][:, 0].tolist() == [0, 1, 2, 3]  # two heads of each row
    assert (named["kept"].keys.shape, named["kept"].frozen) == ((2, 5), False)
    assert named["named"]["positions"].shape == (4, 4)
    assert named["named"]["flag"] is True


@pytest.mark.parametrize(
    "changed",
    [(torch.ones(5, 1, 4, 4), None), (None, None), (torch.ones(4, 4, 4), None), (torch.ones(4, 1, 4, 4),)],
    ids=["rows", "no mask", "axes", "fewer"],
)
def test_arguments_of_another_form_are_refused(changed):
    noted = BlockArguments.of_block((torch.ones(3, 4, 8), torch.ones(3, 1, 4, 4), None), {})
    with pytest.raises(UnsupportedArchitecture, match=r"blocks.0: a block is given other arguments in passes of 3 and"):
        noted.cut((changed, {}), 4, 2, "blocks.0")
