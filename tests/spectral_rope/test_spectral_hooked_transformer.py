"""The HookedTransformer with spectral RoPE of its own: parity, names, training, caches, and the error on line 4."""

import copy

import pytest
import torch
import zoo
from spectral_zoo import assert_on_its_own, config, greedy, logits, move

from tlspectral.models.reading import attention_view
from tlspectral.spectral_rope import SpectralHookedTransformer, load_spectral, merge, save_spectral, to_spectral


def ordinary(**changes):
    from transformer_lens import HookedTransformer

    return HookedTransformer(config(**changes))


def spectral_of(model, **options):
    spectral = SpectralHookedTransformer(model.cfg, **options)
    missing = spectral.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert all(name.startswith("spectral.") for name in missing)
    return spectral


@pytest.mark.skipif(zoo.HAS_HOOKED, reason="TransformerLens 3 has it")
def test_on_transformer_lens_4_the_error_says_what_to_use():
    with pytest.raises(ImportError, match="to_spectral"):
        SpectralHookedTransformer(config())


@pytest.mark.fast(2)
@zoo.needs_hooked
@pytest.mark.parametrize(
    "changes",
    [{}, {"rotary_dim": 4}, {"rotary_adjacent_pairs": True}, {"use_qk_norm": True}, {"n_key_value_heads": None}],
    ids=["grouped", "partial", "adjacent", "query-key-norm", "ungrouped"],
)
def test_start_is_the_ordinary_model_to_the_bit(changes):
    model = ordinary(**changes)
    spectral = spectral_of(model)
    assert torch.equal(logits(spectral), logits(model))
    # And when moved, it is what to_spectral makes of the ordinary one.
    other = to_spectral(model, log_omega=False)
    other.spectral.load_state_dict(move(spectral).spectral.state_dict())
    assert torch.equal(logits(spectral), logits(other))
    assert torch.equal(spectral.spectral_geometry(1).phase, spectral.spectral["1"].phase_by_head())
    # atan2 of float32 tables.
    expected = spectral.spectral["1"].omega_by_head()
    torch.testing.assert_close(spectral.spectral_geometry(1).theta, expected, rtol=1e-6, atol=0)
    assert float((logits(spectral) - logits(model)).abs().max()) > 0.05
    tokens = zoo.prompt(batch=1, length=6)
    options = {"do_sample": False, "stop_at_eos": False, "use_past_kv_cache": True, "verbose": False}
    assert torch.equal(spectral.generate(tokens, max_new_tokens=4, **options), greedy(spectral, tokens, 4))


@zoo.needs_hooked
def test_it_trains_from_scratch():
    from transformer_lens import HookedTransformer

    spectral = SpectralHookedTransformer(config(initializer_range=0.1), scope="layer", log_omega=True)
    assert isinstance(spectral, HookedTransformer)
    assert attention_view(spectral).backend == "hooked"
    own = {f"spectral.{index}.{part}" for index in range(2) for part in ("log_omega_shift", "phase", "gain")}
    assert own == {name for name, _ in spectral.named_parameters() if name.startswith("spectral.")}
    compared = {f"spectral.{at}.{part}" for at in range(2) for part in ("theta", "query_mask", "shared_phase", "tied")}
    assert own | compared == {name for name in spectral.state_dict() if name.startswith("spectral.")}
    assert len(list(spectral.spectral_parameters())) == 6
    optimizer = torch.optim.AdamW(spectral.parameters(), lr=1e-2)
    start, tokens, losses = copy.deepcopy(spectral.state_dict()), zoo.prompt(), []
    for _ in range(8):
        loss = spectral(tokens, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    for name in ("spectral.0.log_omega_shift", "spectral.1.phase", "spectral.1.gain", "blocks.0.attn.W_Q"):
        assert not torch.equal(spectral.state_dict()[name], start[name])


@zoo.needs_hooked
def test_copies_merge_and_files_take_it_too(tmp_path):
    from transformer_lens import HookedTransformer

    model = ordinary()
    spectral = move(spectral_of(model), only=("phase", "gain"))
    merged = merge(spectral)
    assert type(merged) is HookedTransformer
    assert sorted(merged.state_dict()) == sorted(model.state_dict())
    torch.testing.assert_close(logits(merged), logits(spectral), rtol=0, atol=5e-5)  # rounding of W_Q, 2e-6
    assert float((logits(merged) - logits(model)).abs().max()) > 0.05
    save_spectral(spectral, tmp_path / "spectral.safetensors")
    assert torch.equal(logits(load_spectral(model, tmp_path / "spectral.safetensors")), logits(spectral))
    assert_on_its_own(copy.deepcopy(spectral), spectral)


@zoo.needs_hooked
def test_weights_that_are_yet_to_come_are_not_read():
    """Without init_weights TransformerLens leaves weights as they were in memory, for a state dict to fill."""
    model = ordinary()
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        spectral = SpectralHookedTransformer(config(init_weights=False), heads=[(1, 0), (1, 1)])
    finally:
        torch.use_deterministic_algorithms(False)
    spectral.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(logits(spectral), logits(model))
