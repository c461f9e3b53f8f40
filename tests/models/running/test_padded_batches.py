"""Padding: a batch with a mask is scored as its sequences are alone, one without is refused."""

import functools
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo
from conformance.scoring import PAD, padded, sequences
from zoo import shared

import tlspectral as tls
from tlspectral.history.checkpoint_tables import copy_losses
from tlspectral.hooks import ablation_sweep as sweep
from tlspectral.models.reading import attention_view
from tlspectral.models.running.prompts import right_packed
from tlspectral.models.running.text import text_tokens
from tlspectral.tasks import induction_loss, language, language_loss
from tlspectral.tasks.task_sequences import task_sequences


def with_tokenizer(**ids):
    """A model whose tokenizer pads with 0, begins with 1 and ends with 2, unless told otherwise."""
    model = zoo.bridge("llama")
    model.tokenizer = zoo._tokenizer.__wrapped__()
    for name, value in ids.items():
        setattr(model.tokenizer, name, value)
    return model


# --- rotary frequencies that depend on the longest prompt of a run ---


def lengths(*given):
    """Prompts of these lengths."""
    return [zoo.prompt(1, length, seed)[0] for seed, length in enumerate(given)]


def last_token(prompts):
    return tls.Task(prompts, lambda scores, tokens, mask: scores[:, -1].log_softmax(-1)[:, 7], predict=-1)


@pytest.mark.parametrize("given", [(20, 24), (45, 50)])
def test_prompts_on_one_side_of_a_switch_score_as_they_do_alone(given):
    model, prompts = shared("bridge", "phi3_longrope"), lengths(*given)
    found = tls.evaluate(model, last_token(prompts)).per_sequence
    alone = [float(tls.evaluate(model, last_token([prompt]))) for prompt in prompts]
    # Measured 1e-6. Frequencies of the other side move these scores by .1.
    np.testing.assert_allclose(found, alone, atol=1e-5)


LENGTHS = {
    "evaluate": lambda model, prompts: tls.evaluate(model, last_token(prompts)),
    "pairs": lambda model, prompts: tls.ablation_sweep(
        model, "output", task=replace(last_token(prompts), counterfactual=prompts)
    ),
    "edges": lambda model, prompts: tls.edge_effects(model, ["L1H0.q"], task=last_token(prompts), measure="task"),
    "detectors": lambda model, prompts: tls.detect_heads(model, prompts=prompts),
    "scores": lambda model, prompts: tls.verify_scores(model, prompts),
    "loss": lambda model, prompts: language_loss(
        model, **dict(zip(("prompts", "attention_mask"), padded([one[None] for one in prompts]), strict=True))
    ),
    "reference": lambda model, prompts: tls.ablation_hooks(model, "L0H1", tls.parts.Output("mean", prompts)),
}
SWITCH = r"prompt 1 has 24 tokens and prompt 2 has 50: past 32 tokens .*; give prompts of one length"


@pytest.mark.parametrize("function", LENGTHS)
def test_prompts_on_both_sides_of_a_switch_are_refused(function):
    with pytest.raises(ValueError, match=SWITCH):
        LENGTHS[function](shared("bridge", "phi3_longrope"), lengths(40, 24, 50))


def test_dynamic_frequencies_are_others_at_every_length_and_those_of_qwen_1_at_each_doubling():
    model = zoo.bridge("dynamic")
    model.original_model.config.max_position_embeddings = 64  # as a user does who wants a longer context
    with pytest.raises(ValueError, match=r"prompt 0 has 45 tokens and prompt 1 has 50: past 49 tokens"):
        tls.evaluate(model, last_token(lengths(45, 50)))
    tls.evaluate(model, last_token(lengths(30, 32)))
    if zoo.HAS_HOOKED:
        model = zoo.hooked("llama")
        model.cfg.use_dynamic_ntk_rope, model.cfg.train_seq_length = True, 8
        attention, view = model.blocks[0].attn, attention_view(model)
        for length in range(2, 70):
            last = [n for n in range(1, length) if attention._ntk_alpha(n, 8) != attention._ntk_alpha(length, 8)]
            assert view.reader.frequency_switch(view.model, length) == max(last, default=None)


# --- with a mask ---


def test_a_mask_of_ones_changes_nothing_to_the_bit():
    model, tokens = shared("bridge", "llama"), zoo.prompt(3, 11)
    expected = language_loss(model, tokens).per_sequence
    found = language_loss(model, tokens, attention_mask=torch.ones_like(tokens)).per_sequence
    np.testing.assert_array_equal(found, expected)
    # Nor does padding in front of rows of one length.
    wide, mask = padded(list(tokens.split(1)))
    np.testing.assert_array_equal(language_loss(model, wide, attention_mask=mask).per_sequence, expected)


def test_a_padded_batch_may_be_wider_than_the_context():
    model, tokens = shared("bridge", "llama"), zoo.prompt(2, 100)
    wide = torch.cat([torch.full((2, 60), PAD), tokens], 1)
    found = language_loss(model, wide, attention_mask=(torch.arange(160) >= 60).expand(2, 160))
    np.testing.assert_array_equal(found.per_sequence, language_loss(model, tokens).per_sequence)


def test_packing_moves_real_tokens_to_the_left():
    tokens = torch.tensor([[0, 0, 4, 5], [6, 7, 8, 0], [0, 9, 0, 0]])
    packed = right_packed(tokens, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 0]]))
    assert packed.tokens.tolist() == [[4, 5, 5], [6, 7, 8], [9, 9, 9]]
    assert packed.lengths.tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1, 1, 1], [1, 2, 0, 0]], r"found \[0, 1, 2\]"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "no real token in row 1"),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], "padding between the real tokens of row 0"),
        ([[1, 1, 1, 1], [0, 0, 0, 1]], "row 1 has 1 real token"),
    ],
)
def test_masks_that_make_no_sense_are_refused(mask, said):
    with pytest.raises(ValueError, match=said):
        language_loss(shared("bridge", "llama"), zoo.prompt(2, 4), attention_mask=torch.tensor(mask))


def test_a_mask_of_another_shape_or_without_tokens_is_refused():
    model, mask = with_tokenizer(), torch.ones(2, 5, dtype=torch.long)
    # Below the check of annotations, which finds it first while tests run.
    with pytest.raises(ValueError, match=r"shape \(1, 3\) and tokens \(2, 4\)"):
        inspect.unwrap(right_packed)(zoo.prompt(2, 4), torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="rows of text have no padding"):
        language_loss(model, "w3 w4 w5", attention_mask=mask)


# --- effects in a padded batch ---


def test_padding_on_either_side_is_the_same_sweep(tmp_path):
    model, rows = shared("bridge", "llama"), sequences()
    swept = functools.partial(sweep, model, "symmetric", heads=[(1, 2)])
    left, right = (padded(rows, (side,)) for side in ("left", "right"))
    one, other = (swept(task=language(tokens, attention_mask=mask), folder=tmp_path) for tokens, mask in (left, right))
    assert one.attrs["tokens_sha256"] == other.attrs["tokens_sha256"]
    assert one.equals(other)
    # The same rows taken whole are other sequences.
    assert swept(task=language(right_packed(*right).tokens)).attrs["tokens_sha256"] != one.attrs["tokens_sha256"]


@pytest.mark.slow
def test_estimates_of_a_padded_batch_are_the_mean_over_its_sequences():
    model, rows = shared("bridge", "llama"), sequences()
    tokens, mask = padded(rows)
    found = sweep(model, "symmetric", task=language(tokens, attention_mask=mask), screen="gradient")
    alone = [sweep(model, "symmetric", task=language(row), screen="gradient") for row in rows]
    expected = np.mean([one["estimate"] for one in alone], axis=0)
    # Measured: 1e-7, float32 gradients; estimates are 1e-3 and more.
    np.testing.assert_allclose(found["estimate"], expected, rtol=0, atol=1e-5)
    squares = np.mean([one["score_rms"] ** 2 for one in alone], axis=0)
    np.testing.assert_allclose(found["score_rms"] ** 2, squares, rtol=1e-5)


# --- without a mask ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([PAD, PAD, 5, 6, 7], "row 1 of the tokens begins with 2 of the padding id 0"),
        ([PAD, 4, 5, 6, 7], "row 1 of the tokens begins with 1 of the padding id 0"),
        ([4, 5, 6, 7, PAD], "row 1 of the tokens ends with 1 of the padding id 0"),
        ([PAD] * 5, "row 1 of the tokens begins with 5"),
    ],
)
def test_rows_that_look_padded_are_refused_without_a_mask(row, said):
    model, tokens = with_tokenizer(), torch.tensor([[3, 4, 5, 6, 7], row])
    way_out = r".*1 of 2 rows.*give attention_mask="
    with pytest.raises(ValueError, match=said + way_out):
        language_loss(model, tokens)
    without = "give a batch with input_ids and attention_mask"
    with pytest.raises(ValueError, match=f"{said}.*{without}"):
        tls.verify_scores(model, tokens)
    with pytest.raises(ValueError, match=f"{said}.*{without}"):
        tls.analyze_heads(model, prompts=tokens, null_draws=2, detectors=False)
    with pytest.raises(ValueError, match=f"{said}.*{without}"):
        tls.relative_position_kernel(model, [(0, 0)], tokens)


def test_repeated_sequences_that_look_padded_are_refused():
    model, tokens = with_tokenizer(), torch.tensor([[PAD, PAD, 1, 5, 6, 5, 6]] * 2)
    said = r"row 0 of the tokens begins with 2 of the padding id 0.*give sequences \[BOS, r, r\] without padding"
    with pytest.raises(ValueError, match=said):
        induction_loss(model, tokens)


@pytest.mark.parametrize("shared_with", ["bos_token_id", "eos_token_id"])
def test_one_padding_id_that_opens_sequences_is_no_padding(shared_with):
    model = with_tokenizer(**{shared_with: PAD})
    tokens = torch.tensor([[PAD, 4, 5, 4, 5], [PAD, 6, 7, 6, 7]])
    expected = language_loss(shared("bridge", "llama"), tokens)
    np.testing.assert_array_equal(language_loss(model, tokens).per_sequence, expected.per_sequence)
    tls.verify_scores(model, tokens)
    induction_loss(model, tokens)
    with pytest.raises(ValueError, match="begins with 2"):
        language_loss(model, torch.cat([torch.full((2, 1), PAD), tokens], 1))


def test_the_mask_decides_and_not_the_ids():
    model, reference = with_tokenizer(), shared("bridge", "llama")
    row, other = torch.tensor([[PAD, PAD, 5, 6, PAD, 7, PAD]]), zoo.prompt(1, 10)
    tokens, mask = padded([row, other])
    found = language_loss(model, tokens, attention_mask=mask)
    expected = [language_loss(reference, one).value for one in (row, other)]
    np.testing.assert_allclose(found.per_sequence, expected, rtol=0, atol=1e-5)  # float32 in another batch: 5e-7
    inside = torch.tensor([[3, PAD, PAD, 6, 7]])  # within a row the padding id is text
    assert language_loss(model, inside).value == language_loss(reference, inside).value


# --- text ---


def test_drawn_segments_that_end_with_the_padding_id_are_scored():
    model = with_tokenizer()
    task = tls.tasks.induction(n_sequences=40, segment_length=8)
    drawn = task_sequences(attention_view(model), task).tokens
    assert bool((drawn[:, -1] == PAD).any())
    scored_first, scored_second = copy_losses(model, task)
    assert scored_second.value == induction_loss(model, n_sequences=40, segment_length=8).value
    # The loss of the first copy as text, less that of its first token, which the score leaves out.
    first = drawn[:, :9]
    ends = language_loss(model, first, attention_mask=torch.ones_like(first)).per_sequence * 8
    with torch.no_grad():
        opening = -model(first, return_type="logits").double().log_softmax(-1)[:, 0]
    opening = opening.gather(-1, first[:, 1:2]).squeeze(-1).numpy()
    # Float32 sums in another order: measured 4e-8; with its first token the loss of a row moves by up to 0.13.
    assert scored_first.per_sequence == pytest.approx((ends - opening) / 7, abs=1e-5)


def test_documents_of_unequal_length_are_joined_and_never_padded():
    model = with_tokenizer()
    documents = ["w3 w4 w5 w6 w7", "w8", "w9 w10 w11"]
    tokens = text_tokens(attention_view(model), documents, n_sequences=9, sequence_length=5)
    assert tokens.tolist() == [[1, 3, 4, 5, 6], [1, 7, 2, 8, 2]]
    assert not bool((tokens == PAD).any())
    # A row may end with EOS where EOS pads too: it was cut there, and nothing says that it is padded.
    model.tokenizer.pad_token_id = 2
    found = language_loss(model, documents, sequence_length=5)
    expected = language_loss(shared("bridge", "llama"), tokens)
    np.testing.assert_array_equal(found.per_sequence, expected.per_sequence)


def test_what_a_tokenizer_returns_is_not_read_as_text():
    model = with_tokenizer()
    batch = model.tokenizer(["w3 w4 w5", "w6 w7"], padding=True, return_tensors="pt")
    for given in (batch, dict(batch), [[3, 4, 5], [6, 7]]):
        with pytest.raises(ValueError, match=r"as a tensor.*attention_mask="):
            inspect.unwrap(text_tokens)(attention_view(model), given, n_sequences=2, sequence_length=5)
    found = language_loss(model, batch.input_ids, attention_mask=batch.attention_mask)
    alone = [language_loss(model, row).value for row in (torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7]]))]
    np.testing.assert_allclose(found.per_sequence, alone, rtol=0, atol=1e-5)
