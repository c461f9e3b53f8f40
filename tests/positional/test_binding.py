"""The binding task: its words, its draws, the wording of each template, and blocks that keep their tokens."""

import itertools

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from zoo_words import split_tokenizer

from tlspectral.models.running.text import packaged_words
from tlspectral.positional.binding import TEMPLATES, BindingTask

few = settings(max_examples=20, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
templates = st.sampled_from(sorted(TEMPLATES))

PAIR = ("Alice", "Bob", "Clara"), ("Red", "Blue", "Red")

# Written out here a second time, from PS appendix B.4.
LINES = "Alice likes the color Red\nBob likes the color Blue\nClara likes the color Red\n"
HELPFUL = "You are a helpful assistant that can answer questions about entities and their associated\nattribute."
PRINTED = {
    "gemma-2": f"""<bos><start_of_turn>user
{HELPFUL}
---
Context:
{LINES}---
Question: What color does Bob like the most?<end_of_turn>
<start_of_turn>model
Answer: Bob likes the color""",
    "llama-3.2": f"""<|begin_of_text|><|start_header_id|>system<|end_header_id|>
{HELPFUL}<|eot_id|>
<|start_header_id|>user<|eot_id|>
Context:
{LINES}---
Question: What color does Bob like the most?<|eot_id|>
<|start_header_id|>assistant<|eot_id|>
Answer: Bob likes the color""",
    "qwen2": f"""<|im_start|>system
{HELPFUL}<|im_end|>
<|im_start|>user
Context:
{LINES}---
Question: What color does Bob like the most?<|im_end|>
<|im_start|>assistant
Answer: Bob likes the color""",
    "plain": f"""<s>You are a helpful assistant that can answer questions about entities and their associated attribute.
---
Context:
{LINES}---
Question: What color does Bob like the most?
Answer: Bob likes the color""",
}


def names_of(draw):
    return [block.split()[0] for block in draw.blocks]


def text_of(prompt):
    return prompt.prefix + "".join(prompt.blocks) + prompt.suffix


# --- words ---


def test_names_and_colours_are_many_single_words_without_repetition():
    names, colours = packaged_words("names"), packaged_words("colours")
    assert len(set(names)) == len(names) >= 300
    assert len(set(colours)) == len(colours) >= 24
    for word in names + colours:
        assert word.isascii()
        assert word.isalpha()
        assert word == word.capitalize()
    assert not set(names) & set(colours)


# --- draws ---


@few
@given(seeds, st.integers(3, 256))
def test_a_draw_has_every_name_once_and_is_the_start_of_a_longer_one(seed, n_blocks):
    draw = BindingTask(n_blocks=n_blocks).draw(seed)
    assert draw.blocks == BindingTask("gemma-2", n_blocks).draw(seed).blocks
    assert len(draw.blocks) == len(draw.choices) == len(set(names_of(draw))) == n_blocks
    assert draw.asked == tuple(range(n_blocks))
    longer = BindingTask(n_blocks=n_blocks + 7).draw(seed)
    assert longer.blocks[:n_blocks] == draw.blocks
    assert longer.choices[:n_blocks] == draw.choices


def test_every_name_and_colour_is_drawn_and_colours_come_again():
    task = BindingTask(n_blocks=256)
    draws = [task.draw(seed) for seed in range(20)]
    assert {name for draw in draws for name in names_of(draw)} == set(packaged_words("names"))
    colours = {f" {colour}" for colour in packaged_words("colours")}
    assert all(set(draw.choices) == colours for draw in draws)
    assert len({draw.blocks for draw in draws}) == 20
    # Uniform: 20 * 256 / 26 = 197 of each, standard deviation 14; the bound is 5 of them.
    counts = [sum(draw.choices.count(colour) for draw in draws) for colour in colours]
    assert min(counts) > 127
    assert max(counts) < 267


# --- prompts ---


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_the_text_is_that_of_the_paper(template):
    task = BindingTask(template, 3)
    assert text_of(task.prompt(task.lines(*PAIR), 1, bos="<s>")) == PRINTED[template]
    assert text_of(task.prompt(task.lines(*PAIR), 1)) == PRINTED[template].removeprefix("<s>")


@few
@given(templates, seeds)
def test_prompts_of_a_draw_share_all_but_the_question(template, seed):
    task = BindingTask(template, 5)
    draw = task.draw(seed)
    prompts = [task.prompt(draw, query) for query in range(5)]
    for query, prompt in enumerate(prompts):
        assert prompt.prefix == prompts[0].prefix
        assert list(prompt.blocks) == list(prompts[0].blocks)
        assert len(prompt.blocks) == 5
        assert all(block.endswith("\n") and block.count("\n") == 1 for block in prompt.blocks)
        assert prompt.suffix.startswith("---\n")
        assert prompt.suffix.count(names_of(draw)[query]) == 2
        # The prompt and its answer end as the asked block does.
        asked = prompt.blocks[query]
        assert (prompt.suffix + draw.answer(query) + "\n").endswith(asked)
        assert draw.answer(query) == draw.choices[query]


# --- tokens ---


def byte_level():
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have it, trained on a few prompts."""
    texts = [text_of(BindingTask(name, 64).prompt(BindingTask(n_blocks=64).draw(1), 3)) for name in sorted(TEMPLATES)]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def keeps_borders(tokenizer, prompt):
    """Whether the tokens of prefix, blocks and suffix, one after the other, are those of the whole text."""
    pieces = [ids(tokenizer, piece) for piece in (prompt.prefix, *prompt.blocks, prompt.suffix)]
    return list(itertools.chain.from_iterable(pieces)) == ids(tokenizer, text_of(prompt))


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_blocks_have_the_same_tokens_alone_joined_and_swapped(template):
    tokenizer = byte_level()
    task = BindingTask(template, 16)
    for seed in range(4):
        prompt = task.prompt(task.draw(seed), 2, bos="<s>")
        assert len(ids(tokenizer, text_of(prompt))) < len(text_of(prompt)) / 2  # merges are at work
        assert keeps_borders(tokenizer, prompt)
        assert keeps_borders(tokenizer, prompt.swapped(1, 14))
    merging = split_tokenizer({"?": 0}, Regex(r"\n?[^\n]"))  # a line break and the character after it are one token
    assert not keeps_borders(merging, prompt)
