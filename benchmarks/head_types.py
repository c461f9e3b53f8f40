"""What every head of a model does, the causal check of each type, and what both cost in CPU seconds.

Run `python benchmarks/head_types.py`; some ten minutes of a core on SmolLM2-135M. `--no-check` leaves the check out,
`--candidates` takes the types that were dropped too.
"""

import time
from typing import Any

import torch
import typer

import tlspectral as tls
from tlspectral.ablation import check_head_types
from tlspectral.heads.types.kinds import CANDIDATES, TYPES
from tlspectral.heads.types.retrieval import planted_facts
from tlspectral.heads.types.sequences import two_texts
from tlspectral.heads.types.table import measured_types
from tlspectral.models.attention import attention_view
from tlspectral.models.attention.replay import logits_at


def answered(model: Any) -> float:
    """Share of the planted facts of the first text that the model gives as its likeliest next token."""
    view = attention_view(model)
    texts = two_texts(view, None, 0).texts
    facts = planted_facts(view, texts and texts[0], 24, seed=0)
    if facts is None:
        return float("nan")
    with torch.no_grad():
        logits = logits_at(view, facts.tokens, slice(-1, None))[:, 0]
    return float((logits.argmax(1).cpu() == facts.answer).double().mean())


def main(
    model: str = typer.Option("smollm2-135m", help="Name or folder."),
    draws: int = typer.Option(1000, help="Draws of each null."),
    check: bool = typer.Option(True, help="Remove the heads of each type."),
    candidates: bool = typer.Option(False, help="Also the types whose check failed."),
    folder: str = typer.Option("", help="Where to write both tables."),
) -> None:
    """Print claims by type, reliability, the check and CPU seconds."""
    torch.set_num_threads(1)
    loaded = tls.load_model(model)
    start = time.process_time()
    types = measured_types(loaded, CANDIDATES if candidates else TYPES, null_draws=draws, show_progress=False)
    typer.echo(f"head_types: {time.process_time() - start:.0f} CPU seconds, one thread")
    types["effect"] = types["score"] - types["chance"]
    for name, rows in types.groupby("type", sort=False):
        floor, reliability = types.attrs["floors"][name], types.attrs["reliability"][name]
        best = rows.loc[rows["score"].idxmax()] if rows["score"].notna().any() else None
        typer.echo(
            f"{name:<18} claimed {rows['claimed'].sum():>3}, q < .05 {(rows['qvalue'] < 0.05).sum():>3}, effect of "
            f"{floor}: {(rows['effect'] >= floor).sum():>3}, reliability {reliability or float('nan'):.3f}, chance "
            f"{rows['chance'].mean():.3f}"
            + (f", highest {best['name']} {best['score']:.3f} ± {best['stderr']:.3f}" if best is not None else "")
        )
    apart = types["claimed"] & ~types["type"].isin(["first_token", "local"])
    typer.echo(
        f"heads with a type: {types.loc[types['claimed'], 'name'].nunique()} of {types['name'].nunique()}, without "
        f"first_token and local {types.loc[apart, 'name'].nunique()}"
    )
    typer.echo(f"planted facts that the model answers: {answered(loaded):.2f}")
    types = types.drop(columns="effect")
    if folder:
        tls.write_table(types, f"{folder}/head_types.parquet")
    if check:
        start = time.process_time()
        found = check_head_types(loaded, types, show_progress=False)
        typer.echo(f"check_head_types: {time.process_time() - start:.0f} CPU seconds, one thread")
        typer.echo(found.round(4).to_string(index=False))
        typer.echo(f"intact: { {name: round(value, 3) for name, value in found.attrs['intact'].items()} }")
        if folder:
            tls.write_table(found, f"{folder}/check_head_types.parquet")


if __name__ == "__main__":
    typer.run(main)
