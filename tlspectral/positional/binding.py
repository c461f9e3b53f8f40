"""The binding task: a list of names and the colours that they like, then a question about one of the names.

It is the prompt on which "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3 and appendix B.4)
measures language models, after Feng & Steinhardt (2023). Every pair of a name and a colour is one line and one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlspectral.models.running.text import packaged_words
from tlspectral.positional.block_task import BlockDraw, BlockTask, Question, require_size
from tlspectral.tasks.block_prompt import BlockPrompt

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
class BindingTask(BlockTask):
    """The binding task in one wording: lines "NAME likes the color COLOUR", then a question about one name.

    The chat templates follow PS appendix B.4 to the letter, special tokens written out as text. What
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
        n_blocks: lines, from 3 to the number of packaged names (`packaged_words`); PS has 256.

    Raises:
        ValueError: no such template, or too few or too many lines.

    The experiment of PS appendix B.5 is `BindingTask("gemma-2", 256)` with `swaps="all"` of `positional_symbolic`: "for
    all i, j = 1 .. 9" is read as all 36 pairs of the 9 blocks. `swaps="per_query"` reads "nine permutations per query",
    the next sentence, as the queried block with each other one; the ninth, the identity, moves nothing. PS gives
    neither tau nor the number of lists.

    What it does not establish: that a model which names the right colour has bound it to the name. A colour that is
    frequent in the draw is right by chance more often.
    """

    template: str = "plain"
    n_blocks: int = 64

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"{self.template!r} is no template; there are {', '.join(map(repr, TEMPLATES))}")
        require_size(self.n_blocks, len(packaged_words("names")))

    def draw(self, seed: int) -> BlockDraw:
        """Draw names without and colours with repetition, uniformly; fewer pairs are the first of more pairs.

        PS does not say which names and colours it uses, nor how it draws them.
        """
        generator = np.random.default_rng(seed)
        names = generator.permutation(packaged_words("names"))[: self.n_blocks]
        colours = generator.choice(packaged_words("colours"), self.n_blocks)
        return self.lines(tuple(map(str, names)), tuple(map(str, colours)))

    def lines(self, names: tuple[str, ...], colours: tuple[str, ...]) -> BlockDraw:
        """Return the draw with these names, all different, and the colour that each likes.

        Every block ends with its line break, so that blocks can be exchanged without changing how the text around them
        is split into tokens. Raises ValueError for another number of pairs than the task's.
        """
        if not len(names) == len(colours) == self.n_blocks:
            raise ValueError(f"this task has {self.n_blocks} pairs; found {len(names)} names, {len(colours)} colours")
        prefix, suffix = TEMPLATES[self.template]
        return BlockDraw(
            prefix,
            tuple(f"{name} likes the color {colour}\n" for name, colour in zip(names, colours, strict=True)),
            tuple(
                Question(block, suffix.format(name=name), f" {colour}")
                for block, (name, colour) in enumerate(zip(names, colours, strict=True))
            ),
        )

    def prompt(self, draw: BlockDraw, query: int, *, bos: str = "") -> BlockPrompt:
        """Return a prompt as `BlockTask.prompt`; only `"plain"` opens with `bos`, other templates have their own."""
        return super().prompt(draw, query, bos=bos if self.template == "plain" else "")
