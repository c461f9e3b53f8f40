"""Self-match against the whole vocabulary x vocabulary matrix, and the vocabulary taken in pieces."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from reference_circuits import bridge, dense_model, dense_self_match, edited, edited_hf

import tlspectral as tls
from tlspectral.heads import copying as copying_room
from tlspectral.heads.copying import EmbeddingMoments
from tlspectral.models.attention import attention_view


def self_match(model):
    view = attention_view(model)
    moments = EmbeddingMoments(view)
    return [moments.self_match(*view.layer(index).operator_factors()) for index in range(view.n_layers)]


def test_a_head_that_matches_each_token_with_itself():
    """W_Q = W_K makes the diagonal a sum of squares. Other heads: test_head_columns."""

    def plant(model):
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight[:12] = attention.k_proj.weight[:12]
        attention.q_proj.weight[12:24] = -attention.k_proj.weight[:12]
        attention.q_proj.weight[24:36] = 0

    dense = dense_model("llama", edited_hf("llama", plant))
    with np.errstate(invalid="ignore"):
        expected = dense_self_match(dense.layers[0], dense)
    found = self_match(edited("llama", plant))[0]
    assert found[0] > 1
    assert found[1] == -found[0]
    assert np.isnan(found).tolist() == [False, False, True, False]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


# --- the vocabulary in pieces ---


@pytest.mark.parametrize(("name", "size"), [("gpt2", 10), ("llama", 1), ("llama", 96)])
def test_the_size_of_vocabulary_pieces_does_not_matter(monkeypatch, name, size):
    model = bridge(name)
    copying, matching = tls.heads.copying_scores(model), self_match(model)
    seen = []

    def pieces(weight, *, axis):
        for piece in whole(weight, axis=axis, size=size):
            seen.append(piece.shape[axis])
            yield piece

    whole = copying_room.vocabulary_chunks
    monkeypatch.setattr(copying_room, "vocabulary_chunks", pieces)
    # Measured: 1e-14, the order of sums in float64; a lost piece moves both by 1e-3 and more.
    pd.testing.assert_frame_equal(tls.heads.copying_scores(model), copying, rtol=0, atol=1e-11)
    np.testing.assert_allclose(self_match(model), matching, rtol=0, atol=1e-11)
    assert max(seen) == size
    assert sum(seen) == 3 * zoo.VOCABULARY  # W_U and W_E for copying, W_E for self-match


def test_a_vocabulary_of_several_pieces_by_default():
    weight = torch.arange(2 * 10_000, dtype=torch.float32).reshape(2, 10_000)
    pieces = list(copying_room.vocabulary_chunks(weight, axis=1))
    assert [piece.shape[1] for piece in pieces] == [4096, 4096, 1808]
    assert {piece.dtype for piece in pieces} == {torch.float64}
    assert torch.equal(torch.cat(pieces, dim=1), weight.double())
