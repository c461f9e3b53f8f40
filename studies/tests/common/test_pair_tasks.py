"""Pairs of prompts: as many tokens on both sides, answers that differ, and what they begin with."""

from typing import Any, get_args

import pytest
from tlspectral_studies.common.pair_tasks import IOI_TEMPLATES, PairTask, Start, pair_task

import tlspectral as tls


class Words:
    """A tokenizer in which every word and every mark is one token."""

    bos_token_id, eos_token = 1, "<eos>"

    def __init__(self) -> None:
        self.known = {"<pad>": 0, "<bos>": 1, "<eos>": 2}

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        words = text.replace(",", " ,").replace(".", " .").split()
        ids = [self.known.setdefault(word, len(self.known)) for word in words]
        return type("Encoded", (), {"input_ids": [1] * add_special_tokens + ids})

    def get_vocab(self) -> dict[str, int]:
        return self.known

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.known[token]


class Model:
    """What a pair task needs of a model."""

    def __init__(self) -> None:
        self.tokenizer = Words()


@pytest.mark.parametrize("name", get_args(PairTask))
def test_both_sides_have_as_many_tokens_and_the_start_that_was_asked_for(name: PairTask) -> None:
    model = Model()
    for start in get_args(Start):
        task = pair_task(model, name, n=20, start=start)
        for clean, other in zip(task.prompts, task.counterfactual, strict=True):
            first, second = (model.tokenizer(one).input_ids if start == "own" else one for one in (clean, other))
            assert len(first) == len(second)
            assert list(first) != list(second)
            assert [one[0] for one in (first, second)] == [{"own": 1, "end of text": 2}.get(start, first[0])] * 2
            assert (first[0] in (1, 2)) == (start != "none")


def test_templates_and_draws_are_those_asked_for() -> None:
    model = Model()
    one = pair_task(model, "ioi swapped", n=6, templates=IOI_TEMPLATES[1:2])
    assert all(prompt.startswith("Then, ") for prompt in one.prompts)
    again = pair_task(model, "ioi swapped", n=6, templates=IOI_TEMPLATES[1:2])
    other = pair_task(model, "ioi swapped", n=6, seed=1, templates=IOI_TEMPLATES[1:2])
    assert list(one.prompts) == list(again.prompts) != list(other.prompts)
    for clean, swapped in zip(one.prompts, one.counterfactual, strict=True):
        assert sum(a != b for a, b in zip(clean.split(), swapped.split(), strict=True)) == 1


@pytest.mark.parametrize("name", get_args(PairTask))
def test_halves_of_a_task_have_no_pair_in_common_even_with_its_sides_exchanged(name: PairTask) -> None:
    task = pair_task(Model(), name, n=64)
    assert len({frozenset(pair) for pair in zip(task.prompts, task.counterfactual, strict=True)}) == 64


@pytest.mark.slow
def test_more_pairs_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match=r"capitals: 67 different pairs were asked for, and 66 were found"):
        pair_task(Model(), "capitals", n=67)


@pytest.mark.slow
def test_a_real_model_solves_the_tasks() -> None:
    model = tls.load_model("smollm2-135m")
    for name in get_args(PairTask):
        right = (tls.evaluate(model, pair_task(model, name, n=12, start="none")).per_sequence > 0).mean()
        assert right >= 0.8, name  # .95 to 1.00 of 64 pairs; answers or sides exchanged give .05
