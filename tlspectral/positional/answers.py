"""Measure how a model answers a block task: probability and rank of the right answer's first token."""

from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.errors import not_a
from tlspectral.errors.settings import checked_settings
from tlspectral.models.reading import measured
from tlspectral.models.running.partial_runs import logits_at
from tlspectral.models.running.prompts import require_vocabulary
from tlspectral.positional.block_task import BlockTask, first_token
from tlspectral.tables.measurement import Measurement, stacked
from tlspectral.tables.schema import Schema, columns

if TYPE_CHECKING:
    from tlspectral.positional.block_task import BlockDraw

BLOCK_ANSWERS = Schema(
    "block_answers",
    columns("""
        draw                 | index       | Number of the list of blocks, from 0.
        query                | index       | Index of the block that the question is about, from 0.
        answer               | text        | The right answer.
        probability          | probability | Probability of the right answer's first token after the prompt.
        rank                 | index       | Rank of that token among all tokens by probability; 1 is the most probable.
        relative_probability | share       | probability over the sum of the probabilities of the first tokens of all
                             |             | choices of the draw.
        chance               | share       | Share of the draw's choices that have the right answer's first token.
    """),
    "`tlspectral.positional.task_answers`",
)


@checked_settings
def task_answers(model: Any, task: "BlockTask", *, seed: int = 0) -> pd.DataFrame:
    """Measure how a model answers a block task: probability and rank of the right answer's first token.

    Run it before `positional_symbolic`: scores of heads on a task that the model does not solve say little.

    >>> import tlspectral as tls, torch
    >>> from tlspectral.positional import BlockDraw, BlockTask, Question, task_answers
    >>> class Pairs(BlockTask):
    ...     n_blocks = 3
    ...     def draw(self, seed):
    ...         blocks = tuple(torch.tensor([key, key + 10]) for key in (3, 4, 5))
    ...         question = Question(1, torch.tensor([4]), 14)
    ...         return BlockDraw(torch.tensor([1]), blocks, (question,), (13, 14, 15))
    >>> table = task_answers(tls.load_model("tiny-rope"), Pairs(draws=1))
    >>> table[["query", "answer", "rank"]].values.tolist()
    [[1, '14', 1]]

    Args:
        model: TransformerBridge or HookedTransformer; hooks on it act as usual.
        task: a `BlockTask`, for example `tls.positional.KeyValueTask()`. Its `draws` and `queries` choose the prompts.
        seed: seed of the draws; the same seed gives the prompts of `positional_symbolic`. Default: 0.

    Returns:
        DataFrame, the table `block_answers`, a row per question of each draw. Columns of `block_answers`: `draw, query,
            answer, probability, rank, relative_probability, chance`. `probability` (0 to 1) and `rank` (1 is the most
            probable token) belong to the first token of the answer. `relative_probability` is `probability` over the
            summed probability of the first tokens of all possible answers. `chance` is the share of the possible
            answers that begin with the right token. The model's accuracy is `(table["rank"] == 1).mean()`.

    Raises:
        ValueError: a model without tokenizer for text; a tokenizer that merges text across blocks, or the end of the
            prompt with the answer; a prompt longer than the context; an answer id outside the vocabulary.
        UnsupportedArchitecture: the model is an encoder.

    Not established: that the model read the answer from the block. Some answers are more probable in any text, and
    `chance` does not account for this.
    """
    with measured(model) as view:
        if not isinstance(task, BlockTask):
            raise TypeError(f"{not_a(task, 'a task of blocks')}: give one such as tls.positional.NeedleTask()")
        scored = task.task(seed=seed)
        packed, prompts = scored.prompts.packed(view), scored.prompts.prompts
        tables = []
        with torch.no_grad():
            for number, (_, draw, query) in enumerate(prompts):
                tokens = packed.tokens[number, : packed.lengths[number]]
                logits = logits_at(view, tokens[None], slice(len(tokens) - 1, len(tokens)))[0]
                tables.append(
                    answers_table(getattr(view.model, "tokenizer", None), draw, (query,), logits.cpu().double())
                )
        settings = {"task": task.name, "draws": len(task.seeds(seed)), "seed": seed}
        table = stacked(tables).assign(draw=pd.DataFrame(scored.labels)["draw"])
        return Measurement(BLOCK_ANSWERS, settings, view.origin()).table(table)


def answers_table(
    tokenizer: Any, draw: "BlockDraw", queries: tuple[int, ...], logits: Float64[Tensor, "queries d_vocab"]
) -> pd.DataFrame:
    """Return a DataFrame with the columns of `task_answers` except `draw`, a row per queried block of one draw.

    The columns are query (index of the block), answer (text), and four numbers about the right answer's first token:
    probability, rank (1 is the most probable token), relative_probability (its share among the first tokens of
    `draw.choices`) and chance (its share of the choices). `queries`: indices of the queried blocks. `logits`: the
    model's logits after the prompt of each query. `tokenizer`: the model's; None if the answers are token ids. Raises
    ValueError for an answer that the tokenizer merges with the prompt, or an id outside the vocabulary.
    """
    rows = []
    for query, prompt_logits in zip(queries, logits, strict=True):
        question = draw.question(query)
        texts = {*draw.choices, question.answer}
        first_tokens = {text: first_token(tokenizer, question.suffix, text) for text in texts}
        require_vocabulary(prompt_logits.shape[0], torch.tensor(list(first_tokens.values())))
        answer = first_tokens[question.answer]
        probabilities = prompt_logits.softmax(0)
        chosen = [first_tokens[choice] for choice in draw.choices]
        rows.append(
            {
                "query": query,
                "answer": str(question.answer),
                "probability": float(probabilities[answer]),
                "rank": 1 + int((prompt_logits > prompt_logits[answer]).sum()),
                "relative_probability": float(probabilities[answer] / probabilities[sorted(set(chosen))].sum()),
                "chance": chosen.count(answer) / len(chosen),
            }
        )
    return pd.DataFrame(rows)
