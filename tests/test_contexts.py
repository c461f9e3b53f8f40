"""The longest prompt of a model is what its config says, not what TransformerLens assumes."""

import pytest
import zoo
from zoo import shared

from tlspectral.detectors import detect_heads
from tlspectral.models.attention import attention_view, stated_context
from tlspectral.models.loading import load_model
from tlspectral.operators import verify_scores


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "opt", "qwen3", "gemma3_with_eyes", "mpt", "neox"])
def test_a_bridge_has_the_context_of_the_config(name):
    if name == "gemma3_with_eyes":
        assert stated_context(zoo.hf_model(name).config) == zoo.CONTEXT
    else:
        assert attention_view(shared("bridge", name)).n_ctx == zoo.CONTEXT


def test_a_config_without_a_length_leaves_that_of_transformer_lens():
    model = shared("bridge", "bloom")
    assert stated_context(model.original_model.config) is None
    assert attention_view(model).n_ctx == model.cfg.n_ctx


def test_the_shorter_of_two_stated_lengths_is_the_context(tmp_path):
    """MPT has positions for `max_seq_len` tokens, whatever `max_position_embeddings` its config holds beside it."""
    model = zoo.hf_model("mpt")
    model.config.max_seq_len, model.config.max_position_embeddings = 64, 2048
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert attention_view(loaded).n_ctx == 64
    found = detect_heads(loaded, n_sequences=4)
    assert found.attrs["segment_length"] == 31  # [BOS, r, r] of 63 tokens


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "phi"])
def test_a_hooked_transformer_has_the_context_of_the_config(folder, name):
    assert attention_view(load_model(folder(name), backend="hooked")).n_ctx == zoo.CONTEXT


@zoo.needs_hooked
def test_detectors_stay_within_the_context(folder):
    """Segments of the default length, 128, would make sequences of 257 tokens."""
    found = detect_heads(load_model(folder("qwen3"), backend="hooked"), show_progress=False)
    assert found.attrs["segment_length"] == (zoo.CONTEXT - 1) // 2
    on_bridge = detect_heads(load_model(folder("qwen3")), show_progress=False)
    # Noise of two implementations in float32; beyond the context they were .01 apart.
    assert (found["prev"] - on_bridge["prev"]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "mpt", "opt"])
def test_a_prompt_longer_than_the_positions_is_refused_in_words(name):
    """Before, a tensor of another size or an index out of range was what one saw."""
    model = zoo.shared("bridge", name)
    tokens = zoo.prompt(length=zoo.CONTEXT + 1)
    with pytest.raises(ValueError, match=f"prompt 0 has {zoo.CONTEXT + 1} tokens, and the model's context is"):
        verify_scores(model, tokens)
    with pytest.raises(ValueError, match=rf"the prompt has {zoo.CONTEXT + 1} tokens, and the model has positions for"):
        attention_view(model).logits(tokens)
