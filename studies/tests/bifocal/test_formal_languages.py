"""The formal languages against parsers that share nothing with the generators: a stack, a complement table, a sum."""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tlspectral_studies.bifocal.formal_languages import UNSCORED, BioRotation, Dyck3, Modulo7, answers_of
from zoo import generator

LANGUAGES = (Dyck3((2, 6)), BioRotation((5, 12), motif=3), Modulo7())
SMALL = (Dyck3((1, 3)), BioRotation((1, 2), motif=2), Modulo7())
PARTNER = {"(": ")", "[": "]", "{": "}"}
COMPLEMENT = {"A": "T", "T": "A", "C": "G", "G": "C"}


def rows(language, batch):
    """Each row as symbols without padding, the places of its scored targets, its size."""
    assert len(set(language.vocabulary)) == len(language.vocabulary)
    for tokens, scored, size in zip(*batch, strict=True):
        symbols = [language.vocabulary[token] for token in tokens.tolist()]
        length = len(symbols) - symbols[::-1].index(next(s for s in reversed(symbols) if s != "<pad>"))
        assert "<pad>" not in symbols[:length]
        assert symbols[0] == "<begin>"
        yield symbols[:length], [t + 1 for t in scored.nonzero().flatten().tolist()], int(size)


@given(low=st.integers(1, 9), more=st.integers(0, 9), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_dyck_words_are_accepted_by_a_stack_machine(low, more, seed):
    language = Dyck3((low, low + more))
    for symbols, scored, depth in rows(language, language.sample(8, generator(seed))):
        assert symbols[-1] == "<end>"
        stack, deepest, closed = [], 0, []
        for place, symbol in enumerate(symbols[1:-1], 1):
            if symbol in PARTNER:
                assert not closed  # fully nested: no opener after a closer
                stack.append(symbol)
                deepest = max(deepest, len(stack))
            else:
                assert symbol == PARTNER[stack.pop()]
                closed.append(place)
        assert not stack
        assert deepest == depth
        assert low <= depth <= low + more
        assert scored == [*closed, len(symbols) - 1]


@given(low=st.integers(1, 30), more=st.integers(0, 20), motif=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_bio_sequences_end_in_the_reverse_complement(low, more, motif, seed):
    language = BioRotation((low, low + more), motif=motif)
    for symbols, scored, noise in rows(language, language.sample(8, generator(seed))):
        before, after = "".join(symbols[1:]).split("|")
        assert after == "".join(COMPLEMENT[letter] for letter in reversed(before[:motif]))
        assert len(before) == motif + noise
        assert low <= noise <= low + more
        assert scored == list(range(len(symbols) - motif, len(symbols)))


def test_modulo_answers_are_sums():
    seen = set()
    for symbols, scored, size in rows(Modulo7(), Modulo7().sample(3000, generator())):
        question, answer = "".join(symbols[1:]).split("=")
        assert int(answer) == sum(map(int, question.split("+"))) % 7
        assert (scored, size) == ([7], 0)
        seen.add(question)
    assert len(seen) == 343


@pytest.mark.slow
@pytest.mark.parametrize("language", SMALL, ids=lambda one: one.name)
def test_floors_are_entropies_of_a_large_sample(language):
    """The prefix decides every scored token, whose floor is 0; over all tokens whole sequences are counted."""
    draws = 40_000
    batch = language.sample(draws, generator(3))
    _, counts = batch.tokens.unique(dim=0, return_counts=True)
    share = counts.double() / draws
    entropy = -(share * share.log()).sum().item()
    targets = (batch.tokens[:, 1:] != 0).sum().item() / draws
    # Sampling: (number of sequences) / (2 draws), at most 0.005 nats here over about 8 targets; a factor ln 3 that is
    # missing for one opener is 0.2.
    assert language.sequence_floor == pytest.approx(entropy / targets, abs=0.004)
    following = defaultdict(set)
    for row, t in batch.scored.nonzero().tolist():
        following[tuple(batch.tokens[row, : t + 1].tolist())].add(int(batch.tokens[row, t + 1]))
    assert all(len(tokens) == 1 for tokens in following.values())
    assert language.entropy_floor == 0.0


@pytest.mark.parametrize("language", [Dyck3((4, 8)), *LANGUAGES], ids=lambda one: f"{one.name}{one.sizes}")
def test_chance_is_the_best_answer_without_a_sequence(language):
    batch = language.sample(20_000, generator(1))
    counts = torch.bincount(batch.tokens[:, 1:][batch.scored]).double()
    share = counts[counts > 0] / counts.sum()
    # 20,000 answers or more: shares are off by 0.004 at most.
    assert language.chance_loss == pytest.approx(-(share * share.log()).sum().item(), abs=0.01)
    assert language.chance_accuracy == pytest.approx(share.max().item(), abs=0.01)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.name)
def test_answers_are_the_scored_targets_in_order(language):
    batch = language.sample(20, generator(2))
    answers = answers_of(batch)
    for row in range(20):
        places = batch.scored[row].nonzero().flatten().tolist()
        n = len(places)
        assert answers.position[row, :n].tolist() == places
        assert answers.token[row, :n].tolist() == [int(batch.tokens[row, place + 1]) for place in places]
        assert set(answers.token[row, n:].tolist()) <= {UNSCORED}
        assert set(answers.position[row, n:].tolist()) <= {0}
    assert answers.token.shape[1] == int(batch.scored.sum(1).max())


def test_distances_lead_to_what_decides_the_answer():
    """From where an answer is predicted, a token at a listed distance is its opener, or the letter it complements."""
    for language in (Dyck3((3, 5)), BioRotation((4, 6), motif=3)):
        found = set()
        for symbols, scored, size in rows(language, language.sample(200, generator())):
            scored = [place for place in scored if symbols[place] != "<end>"]
            for number, place in enumerate(scored):
                source = (size if isinstance(language, Dyck3) else language.motif) - number
                assert {**PARTNER, **COMPLEMENT}[symbols[source]] == symbols[place]
                found.add(place - 1 - source)
        assert found == set(language.distances)
    assert Modulo7().distances == (5, 3, 1)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.name)
def test_the_draw_is_decided_by_its_generator_alone(language):
    state = torch.get_rng_state()
    first, again, other = (language.sample(6, generator(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_are_uniform():
    """Depths and openers; noise lengths and letters; chi-square within four standard deviations of its mean."""
    draws = 12_000
    dyck, bio, modulo = (
        language.sample(draws, generator()) for language in (Dyck3((4, 8)), BioRotation((100, 109)), Modulo7())
    )
    for values, kinds in (
        (dyck.size - 4, 5),
        (dyck.tokens[:, 1] - 3, 3),
        (dyck.tokens[:, 4] - 3, 3),
        (bio.size - 100, 10),
        (bio.tokens[:, 1] - 3, 4),
        (bio.tokens[:, 100] - 3, 4),
        (modulo.tokens[:, 1] - 4, 7),
        (modulo.tokens[:, 7] - 4, 7),
    ):
        counts = values.bincount(minlength=kinds).double()
        assert len(counts) == kinds
        chi_square = float(((counts - draws / kinds) ** 2).sum() / (draws / kinds))
        assert chi_square < kinds - 1 + 4 * math.sqrt(2 * (kinds - 1))
