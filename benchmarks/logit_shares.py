"""Which share of the logits does a task need: content, position, or their interaction? Beside controls of equal size.

Run `python benchmarks/logit_shares.py tiny-rope` (13 CPU seconds) or `smollm2-135m --n 16 --alone 0` (some minutes). A
prompt is a list of blocks of random tokens; the suffix ends in the beginning of one of them, and the answer is how it
goes on: 12 pairs, of which the first token is given (tiny-rope); 8 blocks of 4, of which 3 are given behind 3 others
that are repeated whole (other models). It prints

* the shares of `logit_shares` by layer, means over heads and prompts, and those of the heads that attend most to the
  answer;
* with --bands, what dropping a third of such a head's frequencies costs, by the place of the answer, beside random sets
  of frequencies of equal RMS;
* what removing a part costs in log-probability of the answer and in accuracy, from all heads at once and from each of
  these heads alone: mean over prompts with its standard error, beside the same numbers taken from other blocks (a
  random cycle through all of them, drawn for every head).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer

import tlspectral as tls
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.parts import Content, Interaction, Position
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import whole_logits
from tlspectral.positional import BlockPrompt
from tlspectral.tasks.block_places import block_places

PARTS = (Content, Position, Interaction)
SHARES = (*(part.name for part in PARTS), "table_std")
DRAWS = 3


@dataclass(frozen=True)
class Retrieval:
    """Prompts with blocks at the same places, the answers' ids, and the position of each answer in its prompt."""

    prompts: list[Any]
    answers: torch.Tensor
    places: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """All prompts, [prompts, pos]."""
        return torch.stack([prompt.tokens() for prompt in self.prompts])


def copied_blocks(view: AttentionView, n: int, rng: np.random.Generator) -> Retrieval:
    """Draw lists of blocks of random tokens without repeats, and ask how one of them goes on."""
    n_blocks, width, given, copied = (12, 2, 1, 0) if view.d_vocab < 100 else (8, 4, 3, 3)
    lowest, highest = (1, view.d_vocab) if view.d_vocab < 100 else (2000, 20_000)  # no control tokens, no rare ones
    prompts, answers, places = [], [], []
    for _ in range(n):
        drawn = rng.choice(np.arange(lowest, highest), n_blocks * width, replace=False)
        blocks = torch.from_numpy(drawn).view(n_blocks, width)
        asked, *others = rng.permutation(n_blocks)[: copied + 1].tolist()
        start = torch.tensor([0 if view.start_token is None else view.start_token])
        prompts.append(BlockPrompt(start, list(blocks), torch.cat([blocks[others].flatten(), blocks[asked, :given]])))
        answers.append(int(blocks[asked, given]))
        places.append(1 + width * asked + given)
    return Retrieval(prompts, torch.tensor(answers), torch.tensor(places))


def heads_on_the_answer(view: AttentionView, task: Retrieval, n: int) -> pd.DataFrame:
    """Heads whose last query attends most to the answer, mean over prompts."""
    rows = []
    points = {view.hook_names(layer)["pattern"]: layer for layer in range(view.n_layers)}
    with torch.no_grad():
        _, cache = view.model.run_with_cache(task.tokens, names_filter=lambda name: name in points)
    for name, layer in points.items():
        weights = cache[name][torch.arange(len(task.tokens)), :, -1, task.places].mean(0)
        rows += [(layer, head, float(weight)) for head, weight in enumerate(weights)]
    table = pd.DataFrame(rows, columns=["layer", "head", "attention"])
    return table.nlargest(n, "attention").reset_index(drop=True)


def answered(view: AttentionView, task: Retrieval, hooks: Iterable[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of the answer and whether it is the most probable token, by prompt."""
    with torch.no_grad(), view.model.hooks(fwd_hooks=list(hooks)):
        logits = torch.cat([whole_logits(view, tokens)[:, -1] for tokens in task.tokens.split(8)]).double()
    right = logits.argmax(-1) == task.answers
    return logits.log_softmax(-1)[torch.arange(len(logits)), task.answers].numpy(), right.double().numpy()


def hooks_without(view: AttentionView, task: Retrieval, heads: Any, part: Any, draw: int | None) -> list[Any]:
    """Hooks that remove a part of the heads, or (with a draw) the same numbers from other blocks."""
    by_layer, hooks = heads_by_layer(view, heads), []
    for index, bound in part(task.prompts[0]).on(view, by_layer).items():
        chosen, places = by_layer[index], bound.prompt
        ablation = LayerAblation(view, view.layer(index), chosen, bound)
        if draw is not None:
            seeds = [[draw, index, head] for head in chosen]
            ablation.alter = lambda removal, seeds=seeds, places=places: places.shuffled(removal.difference, seeds)
        hooks += ablation.hooks()
    return hooks


def effects(view: AttentionView, task: Retrieval, name: str, heads: Any, intact: Any) -> list[dict[str, Any]]:
    """What removing each part costs, and the mean over draws of its control."""
    rows = []
    for part in PARTS:
        values = [answered(view, task, hooks_without(view, task, heads, part, draw)) for draw in (None, *range(DRAWS))]
        logp = np.stack([value[0] - intact[0] for value in values])
        control = logp[1:].mean(0)
        n = np.sqrt(len(control))
        rows.append(
            {
                "heads": name,
                "part": part.name,
                "logp": logp[0].mean(),
                "logp_se": logp[0].std(ddof=1) / n,
                "control_logp": control.mean(),
                "control_logp_se": control.std(ddof=1) / n,
                "accuracy": values[0][1].mean(),
                "control_accuracy": np.mean([value[1].mean() for value in values[1:]]),
            }
        )
    return rows


def bands_by_place(view: AttentionView, task: Retrieval, heads: pd.DataFrame) -> pd.DataFrame:
    """What dropping a third of a head's frequencies costs where the block asked for is a first, middle or last one."""
    starts = block_places(view.model, task.prompts[0]).starts
    third = (np.searchsorted(starts, task.places.numpy(), side="right") - 1) * 3 // len(starts)
    tables = []
    for place, name in enumerate(("first", "middle", "last")):
        answers = task.answers[third == place]

        def log_probability(
            logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, answers: torch.Tensor = answers
        ) -> torch.Tensor:
            return logits[:, -1].log_softmax(-1).gather(-1, answers.to(logits.device)[:, None])[:, 0]

        scored = tls.Task(task.tokens[third == place], log_probability, predict=-1, higher_is_better=True, name="copy")
        table = tls.hooks.band_effects(view.model, heads, task=scored)
        table.insert(4, "label", name)
        table.insert(5, "n_sequences", len(answers))
        table["control_draws"] = table["control_draws"].map(len)
        tables.append(table.drop(columns=["first", "last", "control_delta_min", "control_delta_max"]))
    return pd.concat(tables, ignore_index=True)


def main(
    name: str = typer.Argument("tiny-rope", help="tiny-rope or smollm2-135m."),
    n: int = typer.Option(64, help="Prompts."),
    shown: int = typer.Option(4, help="Heads that attend most to the answer, whose shares are printed."),
    alone: int = typer.Option(4, help="How many of them lose each part alone."),
    bands: int = typer.Option(0, help="How many of them lose each third of their frequencies, by place of the answer."),
    output: str = typer.Option("", "-o", help="Folder for the tables as CSV."),
) -> None:
    """Print shares and effects."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(name))
    rng = np.random.default_rng(0)
    task = copied_blocks(view, n, rng)
    intact = answered(view, task)
    typer.echo(f"{name}: {n} prompts, log-probability {intact[0].mean():.3f}, accuracy {intact[1].mean():.3f}")
    shares = pd.concat([tls.positional.logit_shares(view.model, prompt) for prompt in task.prompts[:16]])
    means = dict.fromkeys(SHARES, "mean")
    by_head = shares.groupby(["layer", "head", "name"], as_index=False).agg(means)
    typer.echo(by_head.groupby("layer", as_index=False).agg(means).round(3).to_string(index=False))
    on_answer = heads_on_the_answer(view, task, shown)
    typer.echo(on_answer.merge(by_head, on=["layer", "head"]).round(3).to_string(index=False))
    rows = effects(view, task, "all", None, intact)
    for row in on_answer.head(alone).itertuples():
        rows += effects(view, task, f"L{row.layer}H{row.head}", [(row.layer, row.head)], intact)
    table = pd.DataFrame(rows)
    typer.echo(table.round(3).to_string(index=False))
    tables = {"shares": by_head, "effects": table}
    if bands:
        tables["bands"] = bands_by_place(view, task, on_answer.head(bands))
        typer.echo(tables["bands"].round(3).to_string(index=False))
    if output:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        for kind, written in tables.items():
            written.round(6).to_csv(folder / f"{name}-{kind}.csv", index=False)


if __name__ == "__main__":
    typer.run(main)
