"""What heads write to the residual stream, and what a layer's queries, keys and values read from it."""

import pytest
import torch
import zoo
from attention_models import every_model
from zoo import shared

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.models.attention.writes import (
    INPUT_POINTS,
    head_writes,
    layer_reads,
    require_sum_of_writes,
    z_of,
)
from tlspectral.rotary import in_float64, widened


def captured_run(view, tokens):
    points = ("residual", "residual_after", "attention_out", "mlp_out", "z", "query", "key", "value")
    names = [view.hook_names(layer)[point] for layer in range(view.n_layers) for point in points]
    return view.capture(tokens, names, last=view.hook_names(view.n_layers - 1)["residual_after"])


@every_model
@torch.no_grad()
def test_heads_biases_and_mlp_sum_to_what_a_layer_adds(backend, name):
    view = attention_view(shared(backend, name))
    captured = captured_run(view, zoo.prompt())
    for layer in range(view.n_layers):
        writes = head_writes(view, layer, in_float64)
        require_sum_of_writes(view, layer, captured, writes)
        names = view.hook_names(layer)
        z = z_of(in_float64(captured[names["z"]]), writes.w_o)
        scale = writes.token_scale(z)
        added = writes.of(z, scale).sum(0) + writes.of_biases(scale) + in_float64(captured[names["mlp_out"]])
        expected = in_float64(captured[names["residual_after"]] - captured[names["residual"]])
        # Measured: 4e-7 of the largest value. A norm behind, a bias or a multiplier that is left out moves it by 1e-2.
        torch.testing.assert_close(added, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
        some = writes.of(z[:, :, [1, 0]], scale, [1, 0])
        torch.testing.assert_close(some, writes.of(z, scale)[[1, 0]], rtol=0, atol=1e-12)  # the same products


@every_model
@torch.no_grad()
def test_a_changed_residual_stream_changes_queries_keys_and_values_as_the_model_itself_has_it(backend, name):
    model = shared(backend, name)
    view, tokens, layer = attention_view(model), zoo.prompt(), 1
    intact = captured_run(view, tokens)
    names, raw = view.hook_names(layer), view.raw(layer)
    x = in_float64(intact[names["residual"]])
    removed = 0.7 * x.norm(dim=-1, keepdim=True) * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    removed = removed / x.shape[-1] ** 0.5
    removed[:, 3] = 0.0

    def edit(residual, hook):
        return (in_float64(residual) - removed).to(residual)

    points = [names[point] for point in INPUT_POINTS.values()]
    found = {}
    hooks = [(names["residual"], edit)]
    hooks += [(point, lambda value, hook, point=point: found.update({point: value})) for point in points]
    view.run(tokens, hooks, last=names["z"])
    for what, point in INPUT_POINTS.items():
        reads = layer_reads(raw, what, in_float64)
        change = reads.change(x, removed)
        expected = in_float64(found[names[point]] - intact[names[point]])
        expected = expected.reshape(*expected.shape[:2], -1, raw.w_q.shape[-1])
        change = change.repeat_interleave(expected.shape[2] // change.shape[2], dim=2)
        # Measured: 4e-7 of the largest change, by the model's own rounding. A frozen norm is off by a tenth.
        torch.testing.assert_close(change, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
        assert bool((change[:, 3] == 0).all()), "nothing removed is no change, to the bit"
        torch.testing.assert_close(reads.of(x - removed) - reads.of(x), change, rtol=0, atol=1e-10)  # float64 rounding


@torch.no_grad()
@pytest.mark.parametrize(("cast", "allowed"), [(widened, 5e-3), (in_float64, 1e-9)])
def test_the_change_of_a_stream_that_is_nearly_all_removed_is_kept(cast, allowed):
    # As at a token with a massive activation: what is left is a 1e-3 part of what was there.
    view = attention_view(shared("bridge", "llama"))
    raw = view.raw(1)
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(1, 4, view.d_model, generator=generator)
    removed = 1e3 * torch.randn(1, 4, view.d_model, generator=generator)
    exact, stream = layer_reads(raw, "k", in_float64), left + removed
    expected = exact.of(in_float64(stream) - in_float64(removed)) - exact.of(in_float64(stream))
    found = layer_reads(raw, "k", cast).change(cast(stream), cast(removed))
    # Values are up to 8. Measured: 2e-12, and 1e-3 in float32, where a difference of squares (1e6 against 1) is off by
    # 0.17.
    torch.testing.assert_close(in_float64(found), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_residual_stream_that_a_hook_edits_is_no_sum_of_writes(name):
    view = attention_view(shared("bridge", name))
    names = view.hook_names(1)

    def halve(attention, hook):
        return attention / 2

    with view.model.hooks(fwd_hooks=[(names["z"], halve)]):  # before the point that is read: seen, and right
        captured = captured_run(view, zoo.prompt())
        require_sum_of_writes(view, 1, captured, head_writes(view, 1, widened))
    captured = captured_run(view, zoo.prompt())
    captured[names["residual_after"]] = captured[names["residual_after"]] * 1.01
    with pytest.raises(UnsupportedArchitecture, match="layer 1: the residual stream is no sum"):
        require_sum_of_writes(view, 1, captured, head_writes(view, 1, widened))
    captured = captured_run(view, zoo.prompt())
    captured[names["z"]] = captured[names["z"]] * 1.01 + 0.01
    with pytest.raises(UnsupportedArchitecture, match="layer 1: the attention adds something else"):
        require_sum_of_writes(view, 1, captured, head_writes(view, 1, widened))
