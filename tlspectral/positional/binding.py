"""The binding task: a list of names with the colours that they like, then a question about one of the names.

"Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3 and appendix B.4) measures language models on
this prompt, after Feng & Steinhardt (2023). Each name with its colour is one line and one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlspectral.errors import shown
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
"""Text before and after the lines of names, for each template; `{name}` stands for the queried name."""


@dataclass(frozen=True)
class BindingTask(BlockTask):
    """Block task with lines "NAME likes the color COLOUR" and a question about one name's colour (PS, appendix B.4).

    >>> from tlspectral.positional import BindingTask
    >>> BindingTask(n_blocks=3).lines(("Ann", "Bob", "Cy"), ("red", "blue", "green")).blocks[1]
    'Bob likes the color blue\\n'

    Attributes:
        template: wording of the prompt. "plain" (default) is for models that were not trained to chat, and opens with
            the tokenizer's BOS token. "gemma-2", "llama-3.2" and "qwen2" are the chat prompts of PS, special tokens
            included. The template is not checked against the model: other models read the markup as ordinary text.
        n_blocks: number of lines, from 3 to the number of packaged names. Default: 64; PS has 256.

    PS is "Decoupling Positional and Symbolic Attention Behavior". The experiment of its appendix B.5 is
    `BindingTask("gemma-2", 256)` with `swaps="all"` in `positional_symbolic`.

    Raises:
        ValueError: an unknown template, or too few or too many lines.

    Not established: that a model which answers with the right colour has bound it to the name. A colour that is
    frequent in the draw is right by chance more often. More: docs/positional.md.
    """

    template: str = "plain"
    n_blocks: int = 64

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"template={shown(self.template)} does not exist: give {', '.join(map(repr, TEMPLATES))}")
        require_size(self.n_blocks, len(packaged_words("names")))

    def draw(self, seed: int) -> BlockDraw:
        """Draw different names, and colours with repetition, uniformly.

        A smaller task has the first lines of a larger task. PS does not say which names and colours it uses, nor how it
        draws them.
        """
        generator = np.random.default_rng(seed)
        names = generator.permutation(packaged_words("names"))[: self.n_blocks]
        colours = generator.choice(packaged_words("colours"), self.n_blocks)
        return self.lines(tuple(map(str, names)), tuple(map(str, colours)))

    def lines(self, names: tuple[str, ...], colours: tuple[str, ...]) -> BlockDraw:
        """Return a draw from your own names and colours: `names[i]` likes `colours[i]`; names must be different.

        Each block ends with a line break, so swapping blocks does not change how the text around them is tokenised.
        Raises ValueError if the number of names or colours is not `n_blocks`.
        """
        if not len(names) == len(colours) == self.n_blocks:
            raise ValueError(
                f"lines() needs n_blocks={self.n_blocks} names and as many colours; found {len(names)} names, "
                f"{len(colours)} colours"
            )
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
        """Return the prompt that asks about block `query`; only the template "plain" opens with `bos`.

        The other templates have their own start token.
        """
        return super().prompt(draw, query, bos=bos if self.template == "plain" else "")
