"""Losses: which positions count, their errors, what ablations and hooks do to them, text, paired effects."""

import gc
import itertools

import numpy as np
import pytest
import torch
import zoo
from positional_measurements import words
from zoo import shared

import tlspectral.tasks.task_sequences as scoring
from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import packaged_text, text_tokens
from tlspectral.tasks import MetricValue, induction, induction_loss, language_loss, paired_effect
from tlspectral.tasks.metric_value import sign_flip_floor, sign_flip_p

SMALL = {"n_sequences": 7, "segment_length": 10}


# --- the induction loss ---


def test_targets_are_the_last_tokens_of_the_copy():
    """L-1 targets, the second to the last token of the copy: a model that knows them alone has no loss."""
    tokens = torch.tensor([[0, 5, 6, 7, 8, 5, 6, 7, 8]])
    view = attention_view(shared("bridge", "llama"))
    task = scoring.task_sequences(view, induction(tokens))
    assert tokens[0, task.predicted].tolist() == [5, 6, 7]
    logits = torch.full((1, 3, 10), -100.0)
    logits[0, range(3), [6, 7, 8]] = 100.0
    assert float(task.measured(logits)) == 0


def test_an_active_ablation_and_a_users_hook_act():
    model = shared("bridge", "opt")
    intact = induction_loss(model, **SMALL)
    with ablate(model, [(1, 2)], "output"):
        ablated = induction_loss(model, **SMALL)
    silent = [("blocks.1.attn.hook_z", lambda z, hook: z * (torch.arange(z.shape[2]) != 2)[:, None])]
    with model.hooks(fwd_hooks=silent):
        by_hand = induction_loss(model, **SMALL)
    assert np.abs(ablated.per_sequence - intact.per_sequence).mean() > 1e-3
    np.testing.assert_allclose(ablated.per_sequence, by_hand.per_sequence, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(induction_loss(model, **SMALL).per_sequence, intact.per_sequence)


def test_logits_do_not_pile_up(batch_size):
    """Scored positions alone are unembedded, and a batch's logits are gone when the next batch's come."""
    batch_size(tokens=3 * 21)
    model, seen = shared("bridge", "llama"), []

    def count(logits, hook):
        size = logits.untyped_storage().nbytes()
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        seen.append(
            (tuple(logits.shape), len({one.data_ptr() for one in alive if one.untyped_storage().nbytes() == size}))
        )

    with model.hooks(fwd_hooks=[("unembed.hook_out", count)]):
        induction_loss(model, n_sequences=9, segment_length=10)
    assert [shape for shape, _ in seen] == [(3, 9, zoo.VOCABULARY)] * 3
    assert {alive for _, alive in seen} == {seen[0][1]}


def test_half_precision_is_scored_in_single():
    model = zoo.bridge("llama")
    expected = induction_loss(model, **SMALL).value
    half = zoo.bridge("llama").to(torch.bfloat16)
    # Measured: 1e-3, the rounding of bf16 logits of size 1.
    assert induction_loss(half, **SMALL).value == pytest.approx(expected, abs=2e-2)


# --- the language loss ---


def test_text_becomes_rows_with_a_start_token():
    view = attention_view(words())
    tokens = text_tokens(view, ["w3 w4 w5 w6", "w7 w8 w9"], n_sequences=9, sequence_length=4)
    # Documents joined by EOS (2), cut into threes; what is left over, two tokens, is dropped.
    assert tokens.tolist() == [[1, 3, 4, 5], [1, 6, 2, 7]]
    assert text_tokens(view, "w3 w4 w5 w6", n_sequences=1, sequence_length=4).tolist() == [[1, 3, 4, 5]]
    assert text_tokens(view, "w3 w4", n_sequences=9, sequence_length=100).tolist() == [[1, 3, 4]]
    found = language_loss(words(), ["w3 w4 w5 w6", "w7 w8 w9"], sequence_length=4)
    np.testing.assert_array_equal(found.per_sequence, language_loss(words(), tokens).per_sequence)


def test_the_packaged_book_is_english_and_whole():
    text = packaged_text()
    assert 60_000 < len(text.encode()) < 200_000
    assert text.startswith("CHAPTER I\n")
    assert text.count("CHAPTER") == 12
    assert "curiouser and curiouser" in text.lower()
    with pytest.warns(UserWarning, match="of 3 prompts 1 are distinct"):  # these words know none of the book's
        found = language_loss(words(), n_sequences=3, sequence_length=16)
    assert len(found.per_sequence) == 3


def test_a_single_word_names_a_data_set(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return iter([{"text": "w3 w4 w5 w6"}, {"text": "w7 w8 w9"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = language_loss(words(), "NeelNanda/pile-10k", sequence_length=4)
    assert asked == [("NeelNanda/pile-10k", "train", True)]
    assert len(found.per_sequence) == 2


@pytest.mark.parametrize(
    ("loss", "given", "said"),
    [
        (language_loss, None, "no tokenizer"),
        (language_loss, "some text", "no tokenizer"),
        (language_loss, torch.zeros(2, 1, dtype=torch.long), "row 0 has 1 real token, so it predicts none"),
        (induction_loss, zoo.prompt(2, 21), r"shape \(2, 21\) are not repeated sequences: .*\[BOS, r, r\]"),
    ],
)
def test_what_cannot_be_scored_is_refused(loss, given, said):
    with pytest.raises(ValueError, match=said):
        loss(shared("bridge", "llama"), given)


# --- paired effects ---


def test_a_paired_effect_is_of_the_same_sequences():
    rng = np.random.default_rng(0)
    before = rng.normal(4, 1, 8)
    effect = paired_effect(MetricValue(before + 0.3), MetricValue(before))
    assert effect.value == pytest.approx(0.3)
    assert effect.se == pytest.approx(0, abs=1e-12)
    assert effect.pvalue == 2 / 2**8  # all signs or none: exact
    assert paired_effect(MetricValue(before), MetricValue(before)).pvalue == 1
    flips = np.array([1.0, 2.0, 3.0, -4.0])
    sums = [float(flips @ signs) for signs in itertools.product([1, -1], repeat=4)]
    expected = np.mean([abs(total) >= 2 for total in sums])
    assert paired_effect(MetricValue(flips), MetricValue(np.zeros(4))).pvalue == expected


@pytest.mark.parametrize(("count", "zeros"), [(2, 0), (5, 0), (6, 3), (4, 4), (15, 12), (14, 14)])
def test_the_floor_of_sign_flips_is_the_smallest_p_of_any_signs(count, zeros):
    """Up to 13 differences all flips are listed, above they are drawn; flips of differences that are 0 are ties."""
    sizes = np.random.default_rng(count).uniform(1, 2, count)
    sizes[:zeros] = 0.0
    every = []
    for signs in itertools.product([1, -1], repeat=count - zeros):
        sizes[zeros:] = np.abs(sizes[zeros:]) * signs
        effect = paired_effect(MetricValue(sizes.copy()), MetricValue(np.zeros(count)), seed=5)
        every.append(effect.pvalue)
        assert effect.floor == sign_flip_floor(sizes, 5)
    assert effect.floor == min(every)
    if count <= 13:
        assert effect.floor == min(1.0, 2 / 2 ** (count - zeros))


def test_the_floor_of_many_flips_is_that_of_the_draws():
    difference = np.random.default_rng(0).normal(size=40)
    assert sign_flip_floor(difference, 0) == sign_flip_p(np.abs(difference), 0) == 2 / 10_000
    # Rounding is no difference: 3 that count among 15.
    tiny = np.where(np.arange(15) < 3, 1.0, 1e-17)
    assert sign_flip_floor(tiny, 0) == sign_flip_p(tiny, 0) > 0.2


def test_equal_sequences_are_flipped_together_in_the_floor():
    difference, distinct = np.array([1.0, 1.0, 2.0, 3.0, 3.0]), np.array([0, 0, 1, 2, 2])
    assert sign_flip_floor(difference, 0, distinct) == sign_flip_p(difference, 0, distinct) == 2 / 2**3
    for few in (np.ones(1), np.array([1.0, np.nan, 2.0]), np.array([1.0, np.inf, 2.0])):
        assert np.isnan([sign_flip_floor(few, 0), sign_flip_p(few, 0)]).all()


def test_sampled_flips_are_seeded():
    rng = np.random.default_rng(1)
    before, after = MetricValue(rng.normal(0, 1, 40)), MetricValue(rng.normal(0.3, 1, 40))
    assert paired_effect(after, before, seed=3) == paired_effect(after, before, seed=3)
    # The t test asks nearly the same: its p here is 0.24.
    import scipy.stats

    expected = scipy.stats.ttest_rel(after.per_sequence, before.per_sequence).pvalue
    assert paired_effect(after, before).pvalue == pytest.approx(expected, abs=0.03)


def test_losses_of_other_sequences_are_refused():
    with pytest.raises(ValueError, match="same two or more sequences, found 3 and 4"):
        paired_effect(MetricValue(np.zeros(3)), MetricValue(np.zeros(4)))
    assert np.isnan(MetricValue(np.zeros(1)).se)
