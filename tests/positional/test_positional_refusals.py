"""What the positional room refuses: the call, the error, and the words that say what is wrong and what to do."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import NO_ROPE
from block_marks import Marks
from positional_measurements import SCORES, block_prompt, cut_prompt, ids, measured, modes, words
from tokenizers import Regex
from zoo import shared
from zoo_words import reader, split_tokenizer

from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.models.reading import bridge as bridge_reader
from tlspectral.positional import BindingTask, BlockDraw, PromptFile, Question, positional_symbolic, task_answers
from tlspectral.positional.answers import answers_table
from tlspectral.positional.ready_tasks import CopyingTask, KeyValueTask, ListIndexTask
from tlspectral.positional.swapped_prompts import averaged
from tlspectral.tasks.block_prompt import BlockPrompt, chosen_swaps

NAMES, COLOURS = ("Alice", "Bob", "Clara"), ("Red", "Blue", "Red")
TEXT = BlockPrompt("w3 ", ["w4 ", "w5 ", "w6 "], "w7")
LINE = {"blocks": ["a\n", "b\n", "c\n"], "questions": [[0, "a", " b"]]}


def prompt_of(*blocks, prefix=None, suffix=None):
    return BlockPrompt(ids(1) if prefix is None else prefix, blocks, ids(5) if suffix is None else suffix)


def tokenized(*pieces):
    return BlockPrompt(*pieces).tokenized(words())


def llama(prompt=None, **options):
    return positional_symbolic(shared("bridge", "llama"), prompt or block_prompt(), **options)


def marks(query=2):
    return Marks().prompt(Marks().draw(0), query)


def bound(swaps="kept", **settings):
    return positional_symbolic(reader(), BindingTask(**{"n_blocks": 9, **settings}), swaps=swaps)


class NegativeAnswer(Marks):
    """-1 would be read as the last id of the vocabulary."""

    def draw(self, seed):
        draw = super().draw(seed)
        questions = tuple(replace(question, answer=-1) for question in draw.questions)
        return replace(draw, questions=questions, choices=(-1,) * len(questions))


def joined_answer():
    """The answers to prompts whose last character and answer are one token."""
    tokenizer = split_tokenizer({"?": 0}, Regex(r"\n"))
    return answers_table(tokenizer, BindingTask(n_blocks=3).draw(0), (1,), torch.zeros(1, 1).double())


def read_file(text):
    file = zoo.temporary("prompts_") / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    return PromptFile(str(file))


def read_lines(*changes):
    return read_file("\n".join(json.dumps(LINE | change) for change in changes))


def score_rows():
    rows = {"layer": [0, 0, 1], "head": [0, 1, 0], "s_pos": [0.1, 0.2, 0.3]}
    return pd.DataFrame({**rows, **dict.fromkeys(SCORES[1:], 0.5)})


REFUSED = {
    # Pieces that make no prompt.
    "two blocks": (lambda: prompt_of(ids(2), ids(3)), "2 blocks were given: give three or more"),
    "text and ids": (lambda: prompt_of(ids(2), ids(3), ids(4), prefix="w3"), "mix text and token ids: give only text"),
    "an empty block": (lambda: prompt_of(ids(2), ids(), ids(4)), "block 1 is empty"),
    "an empty suffix": (lambda: prompt_of(ids(2), ids(3), ids(4), suffix=ids()), "suffix is empty"),
    "two axes": (lambda: prompt_of(ids(2)[None], ids(3), ids(4)), r"block 0 has shape \(1, 1\) .* whole token ids"),
    "no integers": (lambda: prompt_of(ids(2), ids(3), torch.tensor([0.5])), "block 2 has shape .* whole token ids"),
    # Prompts that the model or its tokenizer does not take.
    "text without tokenizer": (lambda: TEXT.tokenized(shared("bridge", "llama")), "no tokenizer"),
    "tokens of text": (TEXT.tokens, r"\.tokenized"),
    "merged blocks": (
        lambda: tokenized("w3 ", ["w4 ", "w5", "w6 "], "w7"),
        r"merges across block borders: block 1 and block 2.*\['w5'\] and \['w6'\] apart",
    ),
    "merged suffix": (lambda: tokenized("", ["w4 ", "w5 ", "w6"], "w7"), "block 2 and suffix"),
    "merged by a swap": (
        lambda: measured(words(), BlockPrompt("<s> ", ["w10 ", "w13 ", "w15 ", "w17"], " w20")),
        r"after blocks 0 and 3 swap",
    ),
    "beyond the context": (
        lambda: cut_prompt(ids(*129 * [0]), [2, 40, 40, 44, 3]).tokenized(words()),
        "129 tokens, and the model's context is 128",
    ),
    "beyond the scaling of frequencies": (
        lambda: measured(zoo.bridge("phi3_longrope"), block_prompt((10, 10, 10))),
        "frequencies or score scale change beyond 32",
    ),
    "an id too large": (lambda: llama(replace(marks(), suffix=ids(10**6))), "token ids are 0 to"),
    "no prompts": (lambda: positional_symbolic(shared("bridge", "llama"), []), "is empty"),
    "queries of two prompts": (lambda: llama([marks(), marks()], by="query"), "one prompt or a task, found 2"),
    # Swaps.
    "a block too far": (
        lambda: chosen_swaps(4, [(1, 4)]),
        r"blocks 1 and 4 cannot swap: this prompt has blocks 0 to 3",
    ),
    "a swap with itself": (lambda: chosen_swaps(4, [(2, 2)]), "cannot swap: give two different blocks"),
    "no swaps": (lambda: chosen_swaps(4, []), "names no pair of blocks"),
    "swaps of a query": (
        lambda: llama(marks(), swaps="per_query"),
        "swaps='per_query' is not known: .*for a task also 'per_query'",
    ),
    "unknown swaps": (lambda: bound("some"), "swaps='some' is not known: give 'kept', 'all', pairs of block"),
    # Settings.
    "tau of zero": (lambda: llama(tau=0.0), "tau must be positive"),
    "tau not a number": (lambda: llama(tau=math.nan), "tau must be positive"),
    "scale of zero": (lambda: llama(logit_scale=0.0), "logit_scale must be positive"),
    # Tasks.
    "unknown task": (
        lambda: llama("gemma"),
        "'gemma' is not a ready task: give 'binding', 'key-value'.* template.*'llama-3.2'",
    ),
    "no draws": (lambda: bound(draws=0), "draws= must be 1 or more, found 0"),
    "two blocks that swap": (lambda: bound(swapped=2), "three blocks that swap .two for swaps='all'"),
    "one block that swaps": (lambda: bound("all", swapped=1), "three blocks that swap .two for swaps='all'"),
    "no queries": (lambda: bound(queries=0), "1 or more, .*found 0"),
    "a query too far": (lambda: bound(queries=(3, 9)), r"from 0 to 8, found \[3, 9\]"),
    "no queries by index": (lambda: bound(queries=()), r"from 0 to 8, found \[\]"),
    "a swap too far": (lambda: bound([(3, 9)]), r"blocks 3 and 9 cannot swap: this prompt has blocks 0 to 8"),
    "text without a tokenizer": (lambda: llama("plain"), "no tokenizer"),
    "more blocks than the context holds": (
        lambda: bound(n_blocks=100, swapped=3, queries=1),
        "642 tokens, and the model's context is 192",
    ),
    "too few pairs": (lambda: KeyValueTask(2), "from 3 to"),
    "a distance between blocks": (lambda: CopyingTask(9, 40), "a multiple of n_blocks = 9"),
    "too many items": (lambda: ListIndexTask(10), "from 3 to 9"),
    "a question about no block": (
        lambda: BlockDraw("", ("a", "b"), (Question(2, "c", "d"),), ("d",)),
        "different blocks from 0 to 1",
    ),
    "a question that is not there": (
        lambda: BindingTask(n_blocks=3).prompt(BindingTask(n_blocks=3).lines(NAMES, COLOURS), 3),
        r"no question about block 3: .*\[0, 1, 2\]",
    ),
    "unknown template": (lambda: BindingTask("gemma"), "template='gemma' does not exist: give 'gemma-2', 'llama-3.2'"),
    "more names than there are": (lambda: BindingTask(n_blocks=1000), "found 1000"),
    "other names than pairs": (
        lambda: BindingTask(n_blocks=4).lines(NAMES, COLOURS),
        "n_blocks=4 names .*; found 3 names",
    ),
    "an answer joined with the prompt": (joined_answer, "joins the end of the prompt with the answer"),
    "a negative answer": (lambda: task_answers(shared("bridge", "llama"), NegativeAnswer()), "0 to 96; found -1"),
    # Files of prompts.
    "no lines": (lambda: read_file(""), r"prompts\.jsonl has no lines"),
    "another key": (lambda: read_lines({"prefx": "a"}), "line 1: found the key 'prefx'; did you mean 'prefix'.; exp"),
    "a misspelt key": (
        lambda: read_lines({"choises": ["a"]}),
        "line 1: found the key 'choises'; did you mean 'choices'",
    ),
    "no JSON": (lambda: read_file("nothing"), "line 1: found no JSON"),
    "too deep": (lambda: read_file("[" * 10**5), "line 1: found no JSON"),
    "a list": (lambda: read_file(f"{json.dumps(LINE)}\n[1]"), "line 2: found a list"),
    "a prefix": (lambda: read_lines({"prefix": 3}), "line 1: found the prefix 3"),
    "blocks": (lambda: read_lines({"blocks": "abc"}), "line 1: found blocks 'abc'"),
    "choices": (lambda: read_lines({"choices": [["a"]]}), r"line 1: found choices \[\['a'\]\]"),
    "questions": (lambda: read_lines({"questions": 3}), "line 1: found questions 3"),
    "half a question": (lambda: read_lines({"questions": [[0, "a"]]}), r"line 1: found the question \[0, 'a'\]"),
    "a block that is not there": (lambda: read_lines({"questions": [[3, "a", "b"]]}), "line 1: .*different blocks"),
    "a zero byte": (lambda: read_file("\0"), r"prompts\.jsonl is not a text file in UTF-8: found byte 0x00"),
    "lines of other lengths": (lambda: read_lines({}, {"blocks": ["a"] * 4}), r"\[3, 4\] blocks"),
    # Averages and tests.
    "draws of other heads": (
        lambda: averaged([{0: score_rows()}, {0: score_rows().iloc[:2]}], None),
        "do not have the same rows",
    ),
}


REFUSED_OTHERWISE = {
    "no prompt": (TypeError, lambda: llama(3), "BlockPrompt.*BlockTask .* found int"),
    "text among prompts": (TypeError, lambda: llama([marks(), "text"]), "found str"),
    # The annotation refuses these first while tests run.
    "unknown mode": ((ValueError, TypeError), lambda: llama(mode="keys"), "mode"),
    "unknown rows": ((ValueError, TypeError), lambda: llama(by="keys"), "by"),
}


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_OTHERWISE])
def test_what_cannot_be_is_refused(case):
    error, call, said = REFUSED_OTHERWISE[case] if case in REFUSED_OTHERWISE else (ValueError, *REFUSED[case])
    with pytest.raises(error, match=f"(?s){said}"):
        call()


# --- models ---


@modes
def test_a_layer_that_is_not_reproduced_gives_no_table(mode):
    model = shared("bridge", "llama")
    louder = [(attention_view(model).hook_names(1)["scores"], lambda scores, hook: 1.01 * scores)]
    with pytest.raises(ScoreMismatch, match=r"layer 1: .*attention of the run differs"), model.hooks(fwd_hooks=louder):
        measured(model, mode=mode)


def test_a_layer_read_with_another_scale_gives_no_table(monkeypatch):
    real = bridge_reader._score_scale
    monkeypatch.setattr(bridge_reader, "_score_scale", lambda *arguments: 1.01 * real(*arguments))
    with pytest.raises(ScoreMismatch, match="layer 0"):
        measured(shared("bridge", "gptj"), mode="key")


@pytest.mark.parametrize("name", NO_ROPE)
def test_without_rotary_positions_there_are_no_frequencies(name):
    with pytest.raises(UnsupportedArchitecture, match="no layer of these heads has rotary positions"):
        measured(shared("bridge", name), per_frequency=True)


@modes
def test_a_model_that_shows_no_pattern_is_refused(mode):
    model = zoo.bridge("opt")
    model.original_model.set_attn_implementation("sdpa")  # transformers computes no pattern then
    with pytest.raises(UnsupportedArchitecture, match=r'layer 0: .*attn_implementation="eager"'):
        measured(model, mode=mode)
