"""Block tasks: what the ready ones draw, one of the caller's own, prompts from a file, and their answers."""

import functools
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import zoo
from block_marks import Marks
from hypothesis import given, settings
from hypothesis import strategies as st
from positional_measurements import SCORES, differ
from zoo_words import reader

import tlspectral as tls
from tlspectral.positional import BindingTask, PromptFile, task_answers
from tlspectral.positional.ready_tasks import READY, CopyingTask, KeyValueTask, ListIndexTask, NeedleTask, block_task

few = settings(max_examples=15, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


MARKS = Marks(queries=3, draws=2)


@functools.cache
def scored(**options):
    return tls.positional_symbolic(zoo.shared("bridge", "llama"), MARKS, seed=4, **options)


# --- ready tasks ---


@pytest.mark.parametrize("name", READY)
def test_draws_are_those_of_their_seed_and_blocks_end_lines(name):
    task = READY[name]()
    assert task.draw(3) == task.draw(3)
    assert len({task.draw(seed).blocks for seed in range(5)}) == 5
    for seed in range(5):
        draw = task.draw(seed)
        assert len(draw.blocks) == task.n_blocks == len(set(draw.blocks))
        assert all(block.endswith("\n") and block.count("\n") == 1 for block in draw.blocks)
        for question in draw.questions:
            assert question.answer in draw.choices
            assert question.answer.strip() in draw.blocks[question.block]
            assert sum(question.answer.strip() in block for block in draw.blocks) >= 1


@few
@given(seeds, st.sampled_from([(3, 6), (9, 36), (4, 20)]))
def test_the_copied_word_is_always_as_far_away(seed, size):
    task = CopyingTask(*size)
    draw = task.draw(seed)
    for query in draw.asked:
        prompt = task.prompt(draw, query)
        words = ("".join(prompt.blocks) + prompt.suffix + draw.answer(query)).split()
        assert words[-1 - task.distance] == words[-1]
        assert words.count(words[-1]) == 2


@few
@given(seeds)
def test_each_task_asks_for_what_its_name_says(seed):
    pairs, needle, places = (task().draw(seed) for task in (KeyValueTask, NeedleTask, ListIndexTask))
    for query in pairs.asked:
        assert pairs.blocks[query] == pairs.question(query).suffix.removeprefix("---\n") + pairs.answer(query) + ".\n"
    (place,) = needle.asked
    assert needle.blocks[place] == f"The secret word is{needle.answer(place)}.\n"
    assert sum("secret word" in block for block in needle.blocks) == 1
    assert [f"- {places.answer(query).strip()}\n" for query in range(9)] == list(places.blocks)
    assert "The third item" in places.question(2).suffix


def test_tasks_by_name():
    assert block_task("binding") == block_task("plain") == BindingTask("plain", 64)
    assert block_task("key-value") == KeyValueTask(9)
    assert KeyValueTask(12, swapped=4, queries=(1, 2), draws=3).name == "KeyValueTask(n_blocks=12)"


# --- a file ---


@pytest.mark.slow
def test_a_file_gives_its_lines_one_after_the_other(tmp_path):
    task = BindingTask("plain", 4)
    lines = []
    for seed in (5, 6):
        draw = task.draw(seed)
        questions = [[q.block, q.suffix, q.answer] for q in draw.questions[seed - 5 : seed - 3]]
        lines.append({"prefix": draw.prefix, "blocks": draw.blocks, "questions": questions, "choices": draw.choices})
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    prompts = PromptFile(str(file), queries=(0, 1))  # of its five draws the file has two
    assert prompts.n_blocks == 4
    assert prompts.draw(0).blocks == task.draw(5).blocks
    assert prompts.draw(1).asked == (1, 2)
    found = tls.positional_symbolic(reader(), prompts, mode="key")
    assert task_answers(reader(), prompts)[["draw", "query"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 1]]
    assert found.attrs["draws"] == 2
    assert found.attrs["task"] == f"PromptFile(path={str(file)!r})"
    # Means over the questions that each line has, then over lines.
    own = [
        tls.positional_symbolic(
            reader(), [task.prompt(task.draw(seed), query, bos="<s>") for query in queries], mode="key"
        )
        for seed, queries in ((5, (0, 1)), (6, (1,)))
    ]
    for score in SCORES:
        np.testing.assert_allclose(found[score], (own[0][score] + own[1][score]) / 2, rtol=1e-6, atol=1e-6)


def test_lines_of_a_file_end_at_newlines_alone(tmp_path):
    """Text may hold what Python's splitlines takes for an end of line too."""
    blocks = [f"{word}\u2028{word}\x85 {word}\u2029\n" for word in ("a", "b", "c")]
    lines = [{"blocks": blocks, "questions": [[place, "a:", " 1"]]} for place in range(3)]
    for end in ("\n", "\r\n"):
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(end.join(json.dumps(line, ensure_ascii=False) for line in lines).encode())
        assert [draw.asked for draw in PromptFile(str(file)).lines] == [(0,), (1,), (2,)]
        assert PromptFile(str(file)).draw(2).blocks == tuple(blocks)


def test_a_prefix_with_the_start_token_gets_no_second_one():
    task = BindingTask("plain", 4)
    draw = task.draw(0)
    opened = replace(draw, prefix=f"<s>{draw.prefix}")
    assert task.prompt(opened, 1, bos="<s>").pieces == task.prompt(draw, 1, bos="<s>").pieces
    assert task.prompt(opened, 1, bos="<s>").prefix.count("<s>") == 1
    assert task.prompt(draw, 1).prefix == draw.prefix


# --- a task of one's own ---


def test_answers_are_those_of_the_task():
    model = zoo.shared("bridge", "llama")
    table = task_answers(model, MARKS, seed=4)
    assert table["answer"].str.isdigit().all()
    assert (table["chance"] == 1 / 5).all()
    found = tls.evaluate(model, MARKS.task(seed=4))
    # float32 logits, alone and in a batch: measured 1e-7; prompts differ by tenths of their probability.
    np.testing.assert_allclose(found.per_sequence, table["probability"], rtol=1e-4)
    assert list(found.labels.columns) == ["draw", "query", "answer"]


@pytest.mark.slow
def test_swaps_of_each_query_are_counted_for_it_alone():
    model, found = zoo.shared("bridge", "llama"), scored(mode="key", swaps="per_query", by="query")
    assert (found.attrs["task"], found.attrs["n_swaps"]) == ("Marks(n_blocks=5)", 4)
    for query in (0, 2, 4):
        pairs = [(query, block) for block in range(5) if block != query]
        by_draw = [
            tls.positional_symbolic(model, MARKS.prompt(MARKS.draw(seed), query), mode="key", swaps=pairs)
            for seed in found.attrs["draw_seeds"]
        ]
        own = found[found["query"] == query]
        for score in SCORES:
            np.testing.assert_allclose(own[score], (by_draw[0][score] + by_draw[1][score]) / 2, rtol=1e-5, atol=1e-6)
    whole = scored(mode="key", swaps="all", by="query")
    assert whole.attrs["n_swaps"] == 10
    assert differ(whole, found) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shown", [{"mode": "prompt"}, {"mode": "key", "per_frequency": True, "by": "query"}])
def test_chosen_heads_have_the_rows_they_have_among_all(shown):
    whole = scored(**shown)
    rows = whole[whole["name"].isin(["L1H0", "L1H2"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(scored(heads=((1, 2), (1, 0)), **shown), rows)


@pytest.mark.slow
def test_a_swap_on_the_head_scale_sums_over_frequencies():
    """`logit_std` of a head without still columns is that of the sum of its frequencies."""
    model, task = zoo.shared("bridge", "llama"), Marks()
    prompt = task.prompt(task.draw(0), 2)
    heads, pairs = (tls.positional_symbolic(model, prompt, mode="key", per_frequency=f) for f in (False, True))
    together = pairs.groupby(["layer", "head"])["logit_std"].sum().to_numpy()
    alone = pairs.groupby(["layer", "head"])["logit_std"].max().to_numpy()
    # The triangle inequality on one scale; with a scale of 1 per frequency the sum would be 2 sqrt(d_head) too large.
    assert (heads["logit_std"] <= together * (1 + 1e-9)).all()
    assert (heads["logit_std"] >= 2 * alone - together - 1e-9).all()
