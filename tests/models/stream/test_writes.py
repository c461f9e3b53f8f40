"""What heads write to the residual stream, and what a layer's keys read from it."""

import pytest
import torch
from ablation_runs import logits, recording
from zoo import bridge, shared

from tlspectral.algebra.rotary import in_float64, widened
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.probe import require_writes
from tlspectral.models.reading import attention_view
from tlspectral.models.stream.writes import checked_writes, layer_reads


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(("cast", "allowed"), [(widened, 5e-3), (in_float64, 1e-9)])
def test_the_change_of_a_stream_that_is_nearly_all_removed_is_kept(name, cast, allowed):
    # As at a token with a massive activation: what is left is a 1e-3 part of what was there.
    view = attention_view(shared("bridge", name))
    raw = view.raw(1)
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(1, 4, view.d_model, generator=generator)
    removed = 1e3 * torch.randn(1, 4, view.d_model, generator=generator)
    stream = left + removed
    for exact, reads in zip(layer_reads(raw, "k", in_float64), layer_reads(raw, "k", cast), strict=True):
        expected = exact.from_stream(in_float64(stream) - in_float64(removed)) - exact.from_stream(in_float64(stream))
        found = reads.change(cast(stream), cast(removed))
        # Values are up to 8. Measured: 2e-12, and 1e-3 in float32, where a difference of squares (1e6 against 1) is off
        # by 0.17; with a latent half of that.
        torch.testing.assert_close(in_float64(found), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_residual_stream_that_a_hook_edits_is_no_sum_of_writes(name):
    model, view = shared("bridge", name), attention_view(shared("bridge", name))
    names = view.hook_names(1)
    points = [names[point] for point in ("residual", "residual_after", "attention_out", "mlp_out", "z")]
    halve = (names["z"], lambda z, hook: z / 2)  # before the point that is read: seen, and right
    with model.hooks(fwd_hooks=[halve]), recording(model, points) as seen:
        logits(model)
    checked_writes(view, 1, seen, widened)
    told = {"residual_after": "the residual stream is not the sum", "z": "the attention's output is not the sum"}
    for point, said in told.items():
        edited = {**seen, names[point]: seen[names[point]] * 1.01 + 0.01}
        with pytest.raises(UnsupportedArchitecture, match=f"layer 1: {said}"):
            checked_writes(view, 1, edited, widened)


def test_a_residual_stream_that_changes_between_two_layers_is_refused():
    model = bridge("llama")
    model.blocks[1].register_forward_pre_hook(lambda block, given: (2 * given[0], *given[1:]))
    require_writes(attention_view(model), [1])
    with pytest.raises(UnsupportedArchitecture, match="layer 1: its input is not the residual stream after layer 0"):
        require_writes(attention_view(model), [0])
