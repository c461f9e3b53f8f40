"""What is read of a checkpoint, what its digest covers, and what is kept in memory."""

import pandas as pd
import torch
import zoo
from safetensors.torch import load, save_file
from streamed_checkpoints import analyze, opened


def test_nothing_but_queries_keys_and_norms_is_read(copied):
    """The rest of the file may be missing or broken."""
    path = copied("llama")
    expected = analyze(path)
    tensors = load((path / "model.safetensors").read_bytes())
    kept = {
        name: value for name, value in tensors.items() if any(part in name for part in ("q_proj", "k_proj", "norm"))
    }
    kept["model.layers.1.mlp.up_proj.weight"] = torch.full_like(tensors["model.layers.1.mlp.up_proj.weight"], torch.nan)
    assert len(kept) < len(tensors) / 2
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    pd.testing.assert_frame_equal(analyze(path), expected, check_exact=True)


def test_the_digest_is_that_of_what_is_read(copied):
    path = copied("llama")
    tensors = load((path / "model.safetensors").read_bytes())

    def digest_with(name):
        changed = {key: value + 1e-3 if key == name else value for key, value in tensors.items()}
        save_file(changed, path / "model.safetensors", {"format": "pt"})
        return analyze(path).attrs["weights_sha256"]

    before = digest_with("none")
    assert digest_with("model.layers.1.self_attn.k_proj.weight") != before
    assert digest_with("model.layers.0.input_layernorm.weight") != before
    assert digest_with("model.layers.1.self_attn.v_proj.weight") == before


def test_layers_do_not_pile_up(folder):
    """A layer's weights are let go when its context ends, even where the view lives on."""
    layers = opened(folder("gemma2"))
    with layers.layer(0) as view:
        assert view.raw(0).w_q.shape == (4, zoo.WIDTH, 16)
    assert sum(parameter.numel() for parameter in view.model.parameters()) == 0


def test_what_is_not_read_takes_no_memory(folder):
    with opened(folder("llama")).layer(0) as view:
        sizes = {
            name: parameter.untyped_storage().nbytes()
            for name, parameter in view.model.original_model.named_parameters()
            if parameter.ndim > 1 and not any(part in name for part in ("q_proj", "k_proj", "embed_tokens"))
        }
    assert len(sizes) == 6  # values, output, three of the MLP, unembedding
    assert max(sizes.values()) == 4, sizes


def test_the_streamed_files_are_left_alone(folder):
    path = folder("llama")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    analyze(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
