"""The binding task: a list of names with the colours that they like, then a question about one of the names.

"Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3 and appendix B.4) measures language models on
this prompt, after Feng & Steinhardt (2023). Each name with its colour is one line and one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
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


@checked_settings
@dataclass(frozen=True)
class BindingTask(BlockTask):
    """Make a block task with lines "NAME likes the color COLOUR" and a question about one name's colour.

    It is the task of "Decoupling Positional and Symbolic Attention Behavior" (PS), appendix B.4. Give it to
    `positional_symbolic` or `task_answers`.

    >>> import tlspectral as tls
    >>> task = tls.positional.BindingTask(n_blocks=3)
    >>> task.lines(("Ann", "Bob", "Cy"), ("red", "blue", "green")).blocks[1]
    'Bob likes the color blue\\n'

    Attributes:
        template: wording of the prompt. "plain" (default) suits models that were not trained to chat, and begins with
            the tokenizer's BOS token. "gemma-2", "llama-3.2" and "qwen2" are the chat prompts of PS with their special
            tokens. Nothing checks that the template fits the model: another model reads the markup as ordinary text.
        n_blocks: number of lines, 3 to 443 (the packaged names). Default: 64; PS has 256.
        swapped, queries, draws: how many blocks swap (9), how many have a question (9), and how many lists of lines are
            drawn (10); defaults in brackets.

    The experiment of PS, appendix B.5, is `tls.positional_symbolic(model, tls.positional.BindingTask("gemma-2", 256),
    swaps="all")`.

    Raises:
        ValueError: an unknown template, or too few or too many lines. Later, when a model reads the prompts: a model
            without tokenizer, or prompts longer than its context.

    Not established: that a model which answers with the right colour has bound it to the name. A frequent colour of the
    draw is right by chance more often. More: docs/positional.md.
    """

    template: str = "plain"
    n_blocks: int = 64

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"template={shown(self.template)} does not exist: give {', '.join(map(repr, TEMPLATES))}")
        require_size(self.n_blocks, len(packaged_words("names")))

    def draw(self, seed: int) -> BlockDraw:
        """Return a `BlockDraw` (blocks of text and a question about each): different names, and colours drawn uniformly
        with repetition.

        `seed`: with the same seed, a smaller task has the first lines of a larger task. The paper (PS) does not say
        which names and colours it uses, nor how it draws them.
        """
        generator = np.random.default_rng(seed)
        names = generator.permutation(packaged_words("names"))[: self.n_blocks]
        colours = generator.choice(packaged_words("colours"), self.n_blocks)
        return self.lines(tuple(map(str, names)), tuple(map(str, colours)))

    def lines(self, names: tuple[str, ...], colours: tuple[str, ...]) -> BlockDraw:
        """Return a `BlockDraw` made from your own names and colours, where `names[i]` likes `colours[i]`. Names must be
        different.

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
        """Return the `BlockPrompt` (text: prefix, blocks, suffix) that asks about the block with index `query`.

        `draw`: a draw of this task. Raises ValueError if it has no question about this block. `bos`: text put in front,
        used only by the template "plain"; the other templates contain their own start token.
        """
        return super().prompt(draw, query, bos=bos if self.template == "plain" else "")
