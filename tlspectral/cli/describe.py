"""The command that makes all tables about a model: `describe`."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import Backend, Device, DType, Model, Quiet, Revision, app, load_model, require_writable

if TYPE_CHECKING:
    import pandas as pd

STRONGEST = 2
"""Heads of each detector whose directions are read."""
PASSES = {"heads": 45, "kernels": 6, "kernel_prediction": 6, "directions": 16, "positional": 30}
"""About what each table costs on SmolLM2-135M, in passes of 1,024 tokens: a pass took 2.5 CPU seconds."""


@app.command(short_help="all tables about a model that need no sweep, and a page")
def describe(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for tables and page.")],
    backend: Backend = "auto",
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    seed: Annotated[int, typer.Option(help="Of nulls, prompts and texts.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Make all tables about a model that need no sweep, and one page about it.

    FOLDER gets heads, kernels, kernel_prediction, directions (of the two strongest heads of each detector) and,
    for a model with a tokenizer, positional, each as .parquet when it is finished; then report.html. The same command
    continues there, and refuses a folder of another model or seed. Without a head table the command stops. Any other
    table that cannot be made of this model is named at the end, and the exit status is then 1.

    Example: tlspectral describe smollm2-135m -o smollm2
    """
    require_writable(output / "report.html")
    from tlspectral.models.attention import attention_view
    from tlspectral.report import report
    from tlspectral.tables.parts import open_parts
    from tlspectral.tables.work import PartFailure, WorkPart, finished_parts

    loaded = load_model(model, quiet, backend=backend, revision=revision, device=device, dtype=dtype)
    view = attention_view(loaded)
    origin = view.origin()
    weights = {name: origin.get(name) for name in ("weights_sha256", "backend")}
    folder = open_parts(output, {"work": "describe", **weights, "seed": seed})
    makers = _makers(loaded, seed, show_progress=not quiet)
    if not quiet:
        wanted = [name for name in PASSES if name in makers or name == "directions"]
        typer.echo(_estimate(view, [name for name in wanted if not (output / f"{name}.parquet").exists()]))
    failures: dict[str, PartFailure] = {}
    made = partial(finished_parts, folder=folder, description="describe", unit="table", show_progress=not quiet)
    heads = made([WorkPart("heads", makers.pop("heads"))])["heads"]
    others = [WorkPart(name, make) for name, make in makers.items()]
    tables = made(
        [*others, WorkPart("directions", partial(_directions, loaded, heads, seed))], failed=failures.__setitem__
    )
    if "kernel_prediction" in tables:
        tables["prediction"] = tables.pop("kernel_prediction")
    report(heads, output / "report.html", **tables)
    if not quiet:
        typer.echo(str(output / "report.html"))
    for name, failure in failures.items():
        typer.echo(f"no {name}: {failure.error}: {' '.join(failure.message.split())}", err=True)
    if failures:
        raise typer.Exit(1)


def _makers(model: Any, seed: int, *, show_progress: bool) -> "dict[str, Callable[[], pd.DataFrame]]":
    """Return what makes each table of a model alone."""
    import tlspectral
    from tlspectral.detectors import kernel_prediction
    from tlspectral.positional import BindingTask

    shown: Any = {"seed": seed, "show_progress": show_progress}
    makers: dict[str, Callable[[], pd.DataFrame]] = {
        "heads": partial(tlspectral.analyze_heads, model, **shown),
        "kernels": partial(tlspectral.relative_position_kernel, model),
        "kernel_prediction": partial(kernel_prediction, model),
    }
    if getattr(model, "tokenizer", None) is not None:
        profile = partial(tlspectral.positional_symbolic_profile, model, BindingTask("plain", 16), queries=3, draws=2)
        makers["positional"] = lambda: profile(**shown).heads
    return makers


def _directions(model: Any, heads: "pd.DataFrame", seed: int) -> "pd.DataFrame":
    """Return the directions of the strongest heads of each detector, of queries with keys and of values."""
    import tlspectral
    from tlspectral.models.attention import attention_view
    from tlspectral.tables.stacking import stacked

    strongest = stacked(heads.nlargest(STRONGEST, detector) for detector in ("prev", "dup", "ind"))
    names = strongest.drop_duplicates("name").sort_values(["layer", "head"])["name"]
    found = [tlspectral.head_directions(model, name, kind, seed=seed) for name in names for kind in ("qk", "ov")]
    table = stacked(found)
    table.attrs = {**found[0].attrs, **attention_view(model).origin()}
    return table


def _estimate(view: Any, missing: list[str]) -> str:
    """Return about how long the missing tables will take, from one pass and their cost on another model."""
    import torch

    from tlspectral.models.attention.replay import last_logits
    from tlspectral.tables.work import duration

    if not missing:
        return "all tables are there"
    width = min(64, view.n_ctx)
    tokens = torch.arange(1024 // width * width).remainder(view.d_vocab).view(-1, width)
    began = time.perf_counter()
    last_logits(view, tokens)
    each = time.perf_counter() - began
    parts = ", ".join(f"{name} {duration(PASSES[name] * each)}" for name in missing)
    return f"about {duration(each * sum(PASSES[name] for name in missing))}: {parts}"
