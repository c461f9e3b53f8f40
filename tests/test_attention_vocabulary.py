"""Tokens, embeddings and learned positions in the view of a model."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from zoo import shared

from tlspectral.models.attention import AttentionView, attention_view, vocabulary_chunks


def view_with(tokenizer, d_vocab=10):
    model = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(model_name="fake"))
    return AttentionView(model, "bridge", n_layers=1, d_model=4, d_vocab=d_vocab, n_ctx=8)


def test_start_token_is_bos_else_eos_else_zero():
    assert view_with(SimpleNamespace(bos_token_id=5, eos_token_id=7)).start_token == 5
    assert view_with(SimpleNamespace(bos_token_id=0, eos_token_id=7)).start_token == 0
    assert view_with(SimpleNamespace(bos_token_id=None, eos_token_id=7)).start_token == 7
    assert view_with(SimpleNamespace(bos_token_id=None, eos_token_id=None)).start_token == 0
    assert view_with(None).start_token == 0


def test_special_tokens_are_sorted_and_within_the_vocabulary():
    assert view_with(SimpleNamespace(all_special_ids=[9, 2, 10, 0, 57])).special_tokens == (0, 2, 9)
    assert view_with(SimpleNamespace(all_special_ids=None)).special_tokens == ()
    assert view_with(None).special_tokens == ()


def test_a_real_tokenizer_serves_as_well():
    view = view_with(zoo._tokenizer(), d_vocab=zoo.VOCABULARY)
    assert view.start_token == 1
    assert view.special_tokens == (0, 1, 2)


def test_sizes_and_source():
    view = attention_view(shared("bridge", "gpt2"))
    assert (view.n_layers, view.d_model, view.d_vocab, view.n_ctx) == (2, zoo.WIDTH, zoo.VOCABULARY, zoo.CONTEXT)
    assert view.source["backend"] == view.backend == "bridge"
    assert view.device == torch.device("cpu")


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "LN"), ("llama", "RMS")])
def test_embeddings(name, kind):
    hf = zoo.hf_model(name)
    view = attention_view(shared("bridge", name))
    assert torch.equal(view.embedding(), hf.get_input_embeddings().weight)
    unembedding, norm = view.unembedding()
    assert torch.equal(unembedding, hf.get_output_embeddings().weight.T)
    assert norm.kind == kind
    assert torch.equal(norm.gain, hf.base_model.ln_f.weight if name == "gpt2" else hf.base_model.norm.weight)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("name", ["gpt2", "opt", "gptneo", "llama", "bloom"])
def test_learned_positions(backend, name):
    positions = attention_view(shared(backend, name)).position_embedding()
    if name in ("llama", "bloom"):
        assert positions is None
        return
    decoder = zoo.hf_model(name).base_model
    # OPT's table has two rows of padding before the position 0.
    expected = decoder.decoder.embed_positions.weight[2:] if name == "opt" else decoder.wpe.weight
    # HookedTransformer centres what writes to the stream: rounding of the mean.
    found = positions.detach() - positions.detach().mean(1, keepdim=True)
    torch.testing.assert_close(found, (expected - expected.mean(1, keepdim=True)).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_vocabulary_chunks_cover_the_embedding_once(axis):
    weight = torch.randn(11, 7, generator=torch.Generator().manual_seed(0))
    chunks = list(vocabulary_chunks(weight, axis=axis, size=4))
    assert max(chunk.shape[axis] for chunk in chunks) <= 4
    assert {chunk.dtype for chunk in chunks} == {torch.float64}
    assert torch.equal(torch.cat(chunks, dim=axis), weight.double())
