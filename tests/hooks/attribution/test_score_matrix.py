"""`scores`: equal to what the model exposes, parts that sum, what is refused."""

import numpy as np
import pytest
import torch
from score_terms import KEY, PROMPT, QUERY, captured_of
from zoo import shared

import tlspectral as tls
from tlspectral.errors import BadHead, ScoreMismatch
from tlspectral.models.reading import attention_view

CAUSAL = np.tril(np.ones(2 * [PROMPT.shape[1]], dtype=bool))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("bridge", name) for name in ("llama", "gpt2", "bloom", "qwen3", "olmo2", "gemma3")),
        *(pytest.param("hooked", name, marks=pytest.mark.slow) for name in ("llama", "gpt2", "bloom")),
    ],
)
def test_scores_are_the_models_own(backend, name):
    model = shared(backend, name)
    view = attention_view(model)
    exposed = captured_of(view, 1)[view.hook_names(1)["scores"]][0, 2].double().numpy()
    frame = tls.scores(model, PROMPT, "L1H2")
    seen = CAUSAL & (exposed > -1e4)
    difference = np.abs(frame.to_numpy() - exposed)[seen]
    if name == "bloom":  # ALiBi is known but for a constant of each row
        difference = np.abs(
            (frame.to_numpy() - exposed)
            - np.where(seen, frame.to_numpy() - exposed, 0).sum(1, keepdims=True) / seen.sum(1, keepdims=True)
        )[seen]
    assert difference.max() < 1e-5  # float32 of the model: measured 1.3e-6 at scores of 12


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_parts_sum_to_the_scores_and_to_the_terms_of_one(name):
    model = shared("bridge", name)
    table = tls.qk_attribution(model, PROMPT, "L1H1", QUERY, KEY)
    names = ["symmetric", "antisymmetric", *([] if name == "gpt2" else ["rope_phase"])]
    parts = {part: tls.scores(model, PROMPT, "L1H1", part) for part in names}
    for part, frame in parts.items():
        # The rows are of float32 writes: measured 4e-7. Another offset is off by tenths.
        assert frame.iloc[QUERY, KEY] == pytest.approx(table[part.replace("rope_", "")].sum(), abs=1e-5)
        assert frame.attrs["part"] is not None
    whole = tls.scores(model, PROMPT, "L1H1")
    if name != "gpt2":  # no biases
        np.testing.assert_allclose(sum(parts.values()), whole, rtol=0, atol=1e-10)


def test_both_axes_have_positions_and_tokens():
    frame = tls.scores(shared("bridge", "llama"), PROMPT[0], (1, 2))
    assert (frame.index.names, frame.columns.names) == (["query", "token"], ["key", "token"])
    assert frame.index.get_level_values(0).tolist() == list(range(PROMPT.shape[1]))
    assert frame.index.get_level_values(1).tolist() == [str(token) for token in PROMPT[0].tolist()]
    assert (frame.attrs["head"], frame.attrs["softcap"]) == ("L1H2", None)
    assert tls.scores(shared("bridge", "gemma2"), PROMPT, "L1H2").attrs["softcap"] is not None


def test_an_edit_of_the_attention_is_a_mismatch():
    model = shared("bridge", "llama")
    with tls.ablate(model, "L1H2", "rope_phase"), pytest.raises(ScoreMismatch, match="layer 1"):
        tls.scores(model, PROMPT, "L1H2")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"part": "output"}, ValueError, "is not a part of the scores"),
        ({"part": tls.parts.Symmetric(at=3)}, ValueError, "without at"),
        ({"prompt": torch.cat([PROMPT, PROMPT])}, ValueError, "scores are of one prompt; found 2"),
        ({"head": "L9H0"}, BadHead, "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        tls.scores(shared("bridge", "llama"), **{"prompt": PROMPT, "head": "L1H1", **arguments})
