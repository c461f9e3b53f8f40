"""One draw of a profile: scores of its prompts and the model's answers, as one frame for a part file."""

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import digest_of
from tlspectral.models.attention.replay import logits_at
from tlspectral.positional.binding import BindingDraw
from tlspectral.positional.experiment import BindingExperiment
from tlspectral.positional.measure import Mode, QueryScores, measure_queries
from tlspectral.positional.prompts import BlockPrompt
from tlspectral.tables import PartFolder, bundled, open_model_parts, stacked

_LOSS_OF = 16  # last tokens of a prompt: their loss reveals other hooks, and few logits are computed


@dataclass(frozen=True)
class DrawSettings:
    """How every draw is measured; see `positional_symbolic` for the names."""

    mode: Mode
    tau: float | None
    exclude_first_block: bool
    logit_scale: float | None
    per_frequency: bool


def draw_folder(
    path: str | os.PathLike[str], view: AttentionView, experiment: BindingExperiment, settings: DrawSettings, seed: int
) -> PartFolder:
    """Open the folder of a profile, which draws of both modes share. Raises IncompatibleCheckpoint."""
    prompts = experiment.prompts(experiment.task.draw(experiment.seeds[0]), view.model.tokenizer)
    tokens = prompts[0].tokenized(view.model).tokens()
    first = max(1, len(tokens) - _LOSS_OF)
    with torch.no_grad():
        logits = logits_at(view, tokens[None], slice(first - 1, len(tokens) - 1))[0]
    loss = torch.nn.functional.cross_entropy(logits.cpu().double(), tokens[first:].cpu())
    shared = {name: value for name, value in asdict(settings).items() if name != "mode"}
    return open_model_parts(
        path,
        {
            "what": "positional and symbolic scores",
            "weights": view.weights_digest(),
            "tokens": digest_of([tokens]),
            "task": asdict(experiment.task),
            "blocks": list(experiment.blocks),
            "queries": list(experiment.queries),
            "seed": seed,
            **shared,
        },
        float(loss),
    )


def measured_draw(
    view: AttentionView, experiment: BindingExperiment, draw_seed: int, settings: DrawSettings, show_progress: bool
) -> pd.DataFrame:
    """Measure one draw. Its tables `heads, frequencies, answers, correlation, tokens` come as one, see `bundled`."""
    tokenizer = view.model.tokenizer
    swaps = experiment.swaps(exclude_first_block=settings.exclude_first_block)
    draw = experiment.task.draw(draw_seed)
    prompts = experiment.prompts(draw, tokenizer)
    total = len(prompts) * (1 + len(swaps))
    with tqdm(total=total, desc="draw", unit="prompt", leave=False, disable=not show_progress) as bar:
        scores = measure_queries(
            view,
            prompts[0].prefix,
            prompts[0].blocks,
            [prompt.suffix for prompt in prompts],
            **asdict(settings),
            swaps=swaps,
            seed=draw_seed,
            advance=bar.update,
        )
    queries = experiment.queries
    logits = torch.stack([result.last_logits for result in scores])
    tables = {
        "heads": stacked(result.heads.assign(query=query) for result, query in zip(scores, queries, strict=True)),
        "answers": answers_table(tokenizer, draw, queries, prompts, logits),
        "correlation": _correlations(scores, queries),
        "tokens": stacked(
            pd.DataFrame({"query": query, "token": result.tokens.cpu().numpy()})
            for result, query in zip(scores, queries, strict=True)
        ),
    }
    if settings.per_frequency:
        tables["frequencies"] = stacked(
            result.frequencies.assign(query=query)
            for result, query in zip(scores, queries, strict=True)
            if result.frequencies is not None
        )
    return bundled(tables)


def _correlations(scores: list[QueryScores], queries: tuple[int, ...]) -> pd.DataFrame:
    table = pd.DataFrame([result.correlation for result in scores]).rename(columns={"draws": "null_draws"})
    for name in ("pearson", "null_mean", "null_sd", "null_pct"):
        table[name] = table[name].astype(np.float64)  # None becomes NaN
    table.insert(0, "query", queries)
    return table


def answers_table(
    tokenizer: Any,
    draw: BindingDraw,
    queries: tuple[int, ...],
    prompts: list[BlockPrompt],
    logits: Float64[Tensor, "queries d_vocab"],
) -> pd.DataFrame:
    """Probability and rank of the right colour after each prompt of a draw: whether the model can do the binding task.

    Args:
        tokenizer: the model's; where it makes several tokens of a colour, the first one counts.
        draw: the pairs.
        queries: which pair each prompt asks about.
        prompts: as text.
        logits: the model's output after each prompt.

    Returns:
        DataFrame `query, answer, probability, rank, relative_probability, chance`; see `PositionalSymbolicProfile`.

    Raises:
        ValueError: a tokenizer that joins the prompt's end with the answer.

    What it does not establish: that the model read the line of the name. Colours differ in how often a draw has them,
    which `chance` takes into account, and in how probable they are in any text, which it does not.
    """
    rows = []
    for query, prompt, prompt_logits in zip(queries, prompts, logits, strict=True):
        suffix = str(prompt.suffix)
        first_tokens = {colour: _first_token(tokenizer, suffix, f" {colour}") for colour in set(draw.colours)}
        answer = first_tokens[draw.colours[query]]
        probabilities = prompt_logits.softmax(0)
        pair_tokens = [first_tokens[colour] for colour in draw.colours]
        colour_mass = probabilities[sorted(set(pair_tokens))].sum()
        rows.append(
            {
                "query": query,
                "answer": draw.answer(query),
                "probability": float(probabilities[answer]),
                "rank": 1 + int((prompt_logits > prompt_logits[answer]).sum()),
                "relative_probability": float(probabilities[answer] / colour_mass),
                "chance": pair_tokens.count(answer) / len(pair_tokens),
            }
        )
    return pd.DataFrame(rows)


def _first_token(tokenizer: Any, text: str, answer: str) -> int:
    """First token of an answer where it follows the text."""
    before = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    both = tokenizer(text + answer, add_special_tokens=False, verbose=False).input_ids
    if len(both) <= len(before) or both[: len(before)] != before:
        raise ValueError(
            f"this tokenizer joins the end of the prompt with the answer {answer!r}: no first token to read"
        )
    return int(both[len(before)])
