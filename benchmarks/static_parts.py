"""M_S and M_A of single heads in both forms: the tables of docs/results/every_head.md that have `_static` in their name.

Run `python benchmarks/static_parts.py smollm2-135m`, and the same for `gemma3-270m`. The default parts act at each
distance, the static ones are those of M at distance 0. The heads are the twelve whose M_S or M_A costs most in
`docs/results/sweeps` in its default form; the static parts are removed from them on the same sequences. `--control
L16H0,L8H1` instead removes the static M_S of these heads beside five random parts of equal size. What was measured is
not measured again.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import typer

import tlspectral as tls

HEADS = 12
PARTS = ("symmetric", "antisymmetric")
SWEEPS = Path("docs/results/sweeps")


def measured(file: Path, name: str, part: Any, like: pd.DataFrame, **given: Any) -> pd.DataFrame:
    """Return a part's effects, from its file or measured and stored; on the model and sequences of `like`."""
    if not file.exists():
        tls.write_table(tls.ablation_sweep(tls.load_model(name), part, **given), file)
    found = tls.read_table(file)
    for what in ("tokens_sha256", "weights_sha256"):
        if found.attrs[what] != like.attrs[what]:
            raise typer.BadParameter(f"{file}: {what} is not that of the default parts; measure both on one model")
    return found.set_index("name")


def main(name: str, control: str = "") -> None:
    """Measure the static parts of one model's heads, and print them beside the default ones."""
    folder, columns = SWEEPS / name, ["delta", "delta_se", "score_rms"]
    default = {part: tls.read_table(folder / f"{part}.parquet") for part in PARTS}
    if control:
        given = {"heads": control.split(","), "control": "random"}
        file, like = folder / "symmetric_static_control.parquet", default["symmetric"]
        beside = measured(file, name, "symmetric_static", like, **given)
        shown = [*columns, "control_delta", "control_delta_se"]
        typer.echo(f"{name}, symmetric_static\n{beside[shown].round(2).to_string()}")
        return
    effects = pd.DataFrame({part: table.set_index("name")["delta"] for part, table in default.items()})
    heads = list(effects.abs().max(axis=1).nlargest(HEADS).index)
    for part, table in default.items():
        static = measured(folder / f"{part}_static.parquet", name, f"{part}_static", table, heads=heads)
        both = table.set_index("name")[columns].join(static[columns].add_suffix("_static"))
        typer.echo(f"{name}, {part}\n{both.loc[heads].round(2).to_string()}")


if __name__ == "__main__":
    typer.run(main)
