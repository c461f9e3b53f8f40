"""Tiny models of the zoo that read words: a tokenizer for all that the plain binding task can say."""

import functools

import transformers
import zoo
import zoo_shapes
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tlspectral.models.running.text import packaged_words
from tlspectral.positional.binding import BindingTask

__all__ = ["CONTEXT", "WORDS", "reader", "split_tokenizer", "word_tokenizer"]

CONTEXT = 192
WORDS = Regex(r" ?[A-Za-z]+|\s|[^A-Za-z\s]+")


def split_tokenizer(vocabulary, pattern, **special):
    """A tokenizer whose tokens are what a pattern matches, of a vocabulary."""
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    raw.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)


@functools.cache
def word_tokenizer():
    """One token per word with the space before it, for all words that the plain template can have."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(WORDS, "isolated")
    everyone = BindingTask(n_blocks=len(packaged_words("names")))
    draw = everyone.lines(
        tuple(packaged_words("names")), tuple(packaged_words("colours") * 20)[: len(packaged_words("names"))]
    )
    words = ["<unk>", "<s>"]
    for query in range(everyone.n_blocks):
        prompt = everyone.prompt(draw, query)
        for text in (prompt.prefix, prompt.blocks[query], prompt.suffix):
            words += [word for word, _ in raw.pre_tokenizer.pre_tokenize_str(text)]
    raw.model = models.WordLevel({word: index for index, word in enumerate(dict.fromkeys(words))}, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")


@functools.cache
def reader(name="llama"):
    """A tiny model of the zoo with room for the words, and the tokenizer that makes them."""

    def config():
        wider = zoo_shapes.SHAPES[name]()
        wider.vocab_size = len(word_tokenizer())
        setattr(wider, "n_positions" if name == "gpt2" else "max_position_embeddings", CONTEXT)
        return wider

    zoo_shapes.SHAPES["reader"] = config
    try:
        model = zoo.bridge("reader")
    finally:
        del zoo_shapes.SHAPES["reader"]
    model.tokenizer = word_tokenizer()
    return model
