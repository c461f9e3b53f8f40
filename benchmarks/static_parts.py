"""M_S and M_A of single heads in both forms: the tables named `_static` of docs/results/every_head.md.

Run `python benchmarks/static_parts.py smollm2-135m`, and the same for `gemma3-270m`. The default parts act at each
distance, the static ones are those of M at distance 0. The heads are the twelve whose M_S or M_A costs most in
`docs/results/sweeps` in its default form; the static parts are removed from them on the same sequences. What was
measured is not measured again.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import typer

import tlspectral as tls

HEADS = 12
PARTS = ("symmetric", "antisymmetric")
SWEEPS = Path("docs/results/sweeps")


def measured(file: Path, name: str, part: Any, heads: list[str], like: pd.DataFrame) -> pd.DataFrame:
    """Return a part's effects, from its file or measured and stored; on the model and sequences of `like`."""
    if not file.exists():
        tls.write_table(tls.ablation_sweep(tls.load_model(name), part, heads=heads), file)
    found = tls.read_table(file)
    for what in ("tokens_sha256", "weights_sha256"):
        if found.attrs[what] != like.attrs[what]:
            raise typer.BadParameter(f"{file}: {what} is not that of the default parts; measure both on one model")
    return found.set_index("name")


def main(name: str) -> None:
    """Measure the static parts of one model's heads, and print them beside the default ones."""
    folder, columns = SWEEPS / name, ["delta", "delta_se", "score_rms"]
    default = {part: tls.read_table(folder / f"{part}.parquet") for part in PARTS}
    effects = pd.DataFrame({part: table.set_index("name")["delta"] for part, table in default.items()})
    heads = list(effects.abs().max(axis=1).nlargest(HEADS).index)
    for part, table in default.items():
        static = measured(folder / f"{part}_static.parquet", name, f"{part}_static", heads, table)
        both = table.set_index("name")[columns].join(static[columns].add_suffix("_static"))
        typer.echo(f"{name}, {part}\n{both.loc[heads].round(2).to_string()}")


if __name__ == "__main__":
    typer.run(main)
