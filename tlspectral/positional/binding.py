"""The binding task: a list of names and the colours that they like, then a question about one of the names.

It is the prompt on which "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3 and appendix B.4)
measures language models, after Feng & Steinhardt (2023). Every pair of a name and a colour is one line and one block.
"""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from tlspectral.positional.prompts import BlockPrompt

_INSTRUCTION = "You are a helpful assistant that can answer questions about entities and their associated"
_QUESTION = "---\nQuestion: What color does {name} like the most?"
_ANSWER = "Answer: {name} likes the color"

TEMPLATES: dict[str, tuple[str, str]] = {
    "gemma-2": (
        f"<bos><start_of_turn>user\n{_INSTRUCTION}\nattribute.\n---\nContext:\n",
        f"{_QUESTION}<end_of_turn>\n<start_of_turn>model\n{_ANSWER}",
    ),
    "llama-3.2": (
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n{_INSTRUCTION}\nattribute.<|eot_id|>\n"
        "<|start_header_id|>user<|eot_id|>\nContext:\n",
        f"{_QUESTION}<|eot_id|>\n<|start_header_id|>assistant<|eot_id|>\n{_ANSWER}",
    ),
    "qwen2": (
        f"<|im_start|>system\n{_INSTRUCTION}\nattribute.<|im_end|>\n<|im_start|>user\nContext:\n",
        f"{_QUESTION}<|im_end|>\n<|im_start|>assistant\n{_ANSWER}",
    ),
    "plain": (f"{_INSTRUCTION} attribute.\n---\nContext:\n", f"{_QUESTION}\n{_ANSWER}"),
}
"""Text before and after the pairs, per template; `{name}` is the name that is asked about."""


@dataclass(frozen=True)
class BindingDraw:
    """The pairs of one binding prompt.

    Attributes:
        names: all different; colours: the colour that each name likes.
    """

    names: tuple[str, ...]
    colours: tuple[str, ...]

    def answer(self, query: int) -> str:
        """The text that should follow a prompt that asks about pair `query`, with its space: `" Red"`."""
        return f" {self.colours[query]}"


@dataclass(frozen=True)
class BindingTask:
    """The binding task in one wording: lines "NAME likes the color COLOUR", then a question about one name.

    The chat templates are those of PS appendix B.4 to the letter, special tokens written out as text. What
    looks odd in B.4 is kept:

    * `"llama-3.2"` closes the headers `user` and `assistant` with `<|eot_id|>` where Llama's own format has
      `<|end_header_id|>`, and has one line break after a header, not two.
    * in all three the word "attribute." stands on a line of its own; perhaps only because of the paper's page width.
    * only `"gemma-2"` has `---` before "Context:" as well as after the pairs.
    * the answer begins in the assistant's turn, with "Answer:", and stops before the colour, without a space.

    `"plain"` has the same wording without chat markup, for models that were not trained to chat, and the first sentence
    on one line; it opens with the tokenizer's BOS token where the model has one.

    Attributes:
        template: `"plain"`, `"gemma-2"`, `"llama-3.2"` or `"qwen2"`. That the model's tokenizer knows the markup is not
            checked: other models read it as ordinary text.
        n_pairs: lines, from 3 to the number of packaged names (`binding_names`); PS has 256.

    Raises:
        ValueError: no such template, or too few or too many pairs.

    What it does not establish: that a model which names the right colour has bound it to the name. A colour that is
    frequent in the draw is right by chance more often.
    """

    template: str = "plain"
    n_pairs: int = 64

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"{self.template!r} is no template; there are {', '.join(map(repr, TEMPLATES))}")
        most = len(binding_names())
        if not 3 <= self.n_pairs <= most:
            raise ValueError(f"n_pairs must be from 3 to {most}, the number of packaged names; found {self.n_pairs}")

    def draw(self, seed: int) -> BindingDraw:
        """Draw names without and colours with repetition, uniformly; fewer pairs are the first of more pairs.

        PS does not say which names and colours it uses, nor how it draws them.
        """
        generator = np.random.default_rng(seed)
        names = generator.permutation(binding_names())[: self.n_pairs]
        colours = generator.choice(binding_colours(), self.n_pairs)
        return BindingDraw(tuple(map(str, names)), tuple(map(str, colours)))

    def prompt(self, draw: BindingDraw, query: int, *, bos: str = "") -> BlockPrompt:
        """The prompt that asks about pair `query` of a draw, as text.

        Prompts of one draw differ in their suffix alone. Every block ends with its line break, so that blocks can be
        exchanged without changing how the text around them is split into tokens.

        Args:
            draw: the pairs, as many as the task has.
            query: index of the asked pair, from 0.
            bos: what `"plain"` opens with, the tokenizer's `bos_token`; the other templates have their own.

        Raises:
            ValueError: the draw has another number of pairs, or not this one.
        """
        if len(draw.names) != self.n_pairs:
            raise ValueError(f"this task has {self.n_pairs} pairs and the draw {len(draw.names)}")
        if not 0 <= query < self.n_pairs:
            raise ValueError(f"pair {query} does not exist: there are pairs 0 to {self.n_pairs - 1}")
        prefix, suffix = TEMPLATES[self.template]
        blocks = [f"{name} likes the color {colour}\n" for name, colour in zip(draw.names, draw.colours, strict=True)]
        opening = bos if self.template == "plain" else ""
        return BlockPrompt(opening + prefix, blocks, suffix.format(name=draw.names[query]))


def binding_names() -> list[str]:
    """The packaged first names, one word each; see `data/binding/NOTICE.md`."""
    return _words("names.txt")


def binding_colours() -> list[str]:
    """The packaged colours, one word each; see `data/binding/NOTICE.md`."""
    return _words("colours.txt")


def _words(file: str) -> list[str]:
    return (files("tlspectral") / "data" / "binding" / file).read_text(encoding="ascii").split()
