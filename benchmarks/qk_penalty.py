"""`qk_penalty` on SmolLM2-135M: what it costs beside a forward pass, and what it does to one head during training.

Run `python benchmarks/qk_penalty.py`; some ten minutes of one core. The queries of one head (its rows of W_Q, nothing
else: SmolLM2's keys are shared by three heads) are trained on the packaged book twice from the same start, with the
same rows in the same order, once with the language loss alone and once with the penalty added. Held-out rows are the
last of the book, which the model may have met in its pretraining. Costs are CPU seconds (process_time), medians.
"""

import statistics
from typing import Any

import pandas as pd
import torch
import typer
from measuring import seconds

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.text import text_tokens
from tlspectral.selection.heads_as_written import head_pair
from tlspectral.selection.node_names import head_name
from tlspectral.tables.progress import bar

SHOWN = ["dir_frac", "D_head", "rope_imag_frac", "prev", "dup", "ind"]
BEHAVIOUR = ["prev", "dup", "ind", "copying", "positivity", "outside_m"]
HELD_OUT = 40
ROW = 128


def cost(model: Any, head: str, turns: int) -> None:
    """Print the cost of the penalty and its gradient, of one head and of all, in shares of a forward pass."""
    tokens = torch.randint(0, model.cfg.d_vocab, (1, ROW), generator=torch.Generator().manual_seed(0))

    def forward() -> None:
        with torch.no_grad():
            model(tokens, return_type="loss")

    jobs = {"forward": forward}
    for part in ("antisymmetric", "rope_phase"):
        for name, heads in (("one head", head), ("all heads", None)):
            jobs[f"{part}, {name}"] = lambda part=part, heads=heads: tls.heads.qk_penalty(model, part, heads).backward()
    times = {name: [seconds(job) for _ in range(turns + 1)][1:] for name, job in jobs.items()}  # the first warms up
    model.zero_grad()
    whole = statistics.median(times.pop("forward"))
    typer.echo(f"forward pass of {ROW} tokens: {whole:.3f} s of one core, medians of {turns} turns")
    for name, values in times.items():
        spent = statistics.median(values)
        typer.echo(f"  penalty and gradient, {name}: {1000 * spent:.1f} ms, {spent / whole:.3f} of a forward pass")


def train(model: Any, weight: torch.nn.Parameter, rows: slice, train_rows: torch.Tensor, arm: dict[str, Any]) -> None:
    """Train some rows of the query weight, in place."""
    mask = torch.zeros_like(weight)
    mask[rows] = 1
    optimizer = torch.optim.AdamW([weight], lr=arm["rate"], weight_decay=0.0)
    with bar(arm["steps"], arm["name"], "step") as shown:
        for step in range(arm["steps"]):
            row = train_rows[step % len(train_rows)][None]
            loss = model(row, return_type="loss")
            if arm["penalty"]:
                loss = loss + arm["penalty"] * tls.heads.qk_penalty(model, arm["part"], arm["head"])
            optimizer.zero_grad()
            loss.backward()
            weight.grad.mul_(mask)
            optimizer.step()
            shown.update()


def main(
    head: str = typer.Option("L16H0", help="The head; this one is SmolLM2's strongest previous-token head."),
    part: str = typer.Option("antisymmetric", help="The part that is penalised."),
    penalty: float = typer.Option(10.0, help="Weight of the penalty."),
    steps: int = typer.Option(200, help="Steps of one row of 128 tokens."),
    rate: float = typer.Option(1e-3, help="Learning rate of AdamW."),
    turns: int = typer.Option(5, help="Measurements of the cost."),
) -> None:
    """Print the cost, then the head and the rest of the table intact, after plain training and under the penalty."""
    torch.set_num_threads(1)
    model = tls.load_model("smollm2-135m")
    cost(model, head, turns)
    layer, index = head_pair(head)
    tokens = text_tokens(attention_view(model), None, n_sequences=10_000, sequence_length=ROW)
    train_rows, held_out = tokens[:-HELD_OUT], tokens[-HELD_OUT:]
    model.requires_grad_(False)
    weight = model.blocks[layer].attn.q.original_component.weight.requires_grad_()
    width = model.cfg.d_head
    start = weight.detach().clone()
    tables, losses = {}, {}
    for name, strength in (("intact", None), ("loss alone", 0.0), ("with penalty", penalty)):
        with torch.no_grad():
            weight.copy_(start)
        if strength is not None:
            arm = {"name": name, "part": part, "head": head, "penalty": strength, "steps": steps, "rate": rate}
            train(model, weight, slice(index * width, (index + 1) * width), train_rows, arm)
        tables[name] = tls.analyze_heads(model, null_draws=20, max_se=None)
        losses[name] = tls.tasks.language_loss(model, held_out)
    report(tables, losses, head_name(layer, index))


def report(tables: dict[str, pd.DataFrame], losses: dict[str, Any], head: str) -> None:
    """Print the head's row in each arm, held-out losses, and how far the other heads' columns moved."""
    rows = pd.DataFrame({name: table.set_index("name").loc[head, SHOWN] for name, table in tables.items()}).T
    typer.echo(
        f"\n{head}, {len(next(iter(tables.values())))} heads in the table\n{rows.astype(float).round(3).to_string()}"
    )
    for name, loss in losses.items():
        less = f", less intact {loss - losses['intact']}" if name != "intact" else ""
        typer.echo(f"held-out loss, {name}: {loss}{less}")
    typer.echo(f"with penalty less loss alone: {losses['with penalty'] - losses['loss alone']}")
    intact = tables["intact"]
    others = intact["name"] != head
    behaviour = [name for name in intact if name.removesuffix("_se") in BEHAVIOUR]
    weights_only = [name for name in intact if name not in [*behaviour, "D_head_pct"]]
    for name in ("loss alone", "with penalty"):
        same = intact.loc[others, weights_only].equals(tables[name].loc[others, weights_only])
        moved = (tables[name].loc[others, BEHAVIOUR] - intact.loc[others, BEHAVIOUR]).abs()
        largest = ", ".join(f"{column} {value:.3f}" for column, value in moved.max().items())
        typer.echo(
            f"the other heads, {name}: {len(weights_only)} columns of weights "
            f"{'identical' if same else 'CHANGED'}; largest change of {largest}"
        )


if __name__ == "__main__":
    typer.run(main)
