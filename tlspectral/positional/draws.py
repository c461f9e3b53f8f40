"""One draw of a profile: its prompts measured, as one table that a folder can keep."""

import os
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import digest_of
from tlspectral.models.attention.replay import logits_at
from tlspectral.positional.answers import answers_table
from tlspectral.positional.experiment import BindingExperiment
from tlspectral.positional.measure import Mode, QueryScores, measure_queries
from tlspectral.tables import PartFolder, bundled, open_model_parts, stacked

_LOSS_OF = 16  # tokens at the end of a prompt: enough to notice hooks, and few to unembed


@dataclass(frozen=True)
class DrawSettings:
    """What is done with every draw; see `positional_symbolic` for the names."""

    mode: Mode
    tau: float | None
    exclude_first_block: bool
    logit_scale: float | None
    per_frequency: bool


def draw_folder(
    path: str | os.PathLike[str], view: AttentionView, experiment: BindingExperiment, settings: DrawSettings, seed: int
) -> PartFolder:
    """The folder of a profile, which holds draws of both modes. Raises IncompatibleCheckpoint."""
    prompts = experiment.prompts(experiment.task.draw(experiment.seeds[0]), view.model.tokenizer)
    tokens = prompts[0].tokenized(view.model).tokens()
    first = max(1, len(tokens) - _LOSS_OF)
    with torch.no_grad():
        logits = logits_at(view, tokens[None], slice(first - 1, len(tokens) - 1))[0]
    loss = torch.nn.functional.cross_entropy(logits.double(), tokens[first:].to(logits.device))
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
    """The tables of one draw as one, see `bundled`: `heads, frequencies, answers, correlation, tokens`."""
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
    logits = torch.stack([one.last_logits for one in scores])
    tables = {
        "heads": stacked(one.heads.assign(query=query) for one, query in zip(scores, queries, strict=True)),
        "answers": answers_table(tokenizer, draw, queries, prompts, logits),
        "correlation": _correlations(scores, queries),
        "tokens": stacked(
            pd.DataFrame({"query": query, "token": one.tokens.cpu().numpy()})
            for one, query in zip(scores, queries, strict=True)
        ),
    }
    if settings.per_frequency:
        tables["frequencies"] = stacked(
            one.frequencies.assign(query=query)
            for one, query in zip(scores, queries, strict=True)
            if one.frequencies is not None
        )
    return bundled(tables)


def _correlations(scores: list[QueryScores], queries: tuple[int, ...]) -> pd.DataFrame:
    table = pd.DataFrame([one.correlation for one in scores]).rename(columns={"draws": "null_draws"})
    for name in ("pearson", "null_mean", "null_sd", "null_pct"):
        table[name] = table[name].astype(np.float64)  # None becomes NaN
    table.insert(0, "query", queries)
    return table
