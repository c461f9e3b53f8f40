"""A previous-token head's rope phase, out of the keys of induction heads alone: the tables of docs/results/wiring.md.

Run `python benchmarks/mediated_phase.py smollm2-135m`, and the same for `gemma3-270m`. Im(M_t) of the sender is taken
away everywhere, in the queries, keys or values of the four heads with the largest `ind` behind it, in the keys of the
first one, two and three of them, and in 19 different random sets of as many key groups of later layers, none of them
theirs (fewer where there are no more). A set of the same layers alone would have few draws: SmolLM2 has three key
groups a layer, Gemma 3 270M one. The groups beside the found ones in their own layers are one more row. The change is
that of the induction loss on 8 sequences with segments of 64, on Gemma, whose vocabulary is large, on 4. What was
measured is not measured again.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer

import tlspectral as tls

SENDERS = {"smollm2-135m": ("L16H0",), "gemma3-270m": ("L10H1", "L4H1")}
TARGETS, DRAWS = 4, 19
SEQUENCES = {"smollm2-135m": 8, "gemma3-270m": 4}
HEADS = Path("docs/results/sweeps")


def receivers_of(model: Any, sender: str, heads: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Yield what the phase is taken out of, by name; None is everywhere."""
    layer = int(heads.set_index("name")["layer"][sender])
    targets = heads[heads["layer"] > layer].nlargest(TARGETS, "ind")
    names = list(targets["name"])
    yield "everywhere", None
    groups = [f"L{row.layer}KV{row.kv_head}.k" for row in targets.itertuples()]
    found = list(dict.fromkeys(groups))
    yield f"keys of {', '.join(names)}", found
    yield f"queries of {', '.join(names)}", tls.hooks.receivers(names, "q")
    yield f"values of {', '.join(names)}", [name.replace(".k", ".v") for name in found]
    for count in range(1, TARGETS):
        yield f"keys of {', '.join(names[:count])}", list(dict.fromkeys(groups[:count]))
    per_layer = model.cfg.n_key_value_heads or model.cfg.n_heads
    later = [f"L{one}KV{group}.k" for one in range(layer + 1, model.cfg.n_layers) for group in range(per_layer)]
    others = [name for name in later if name not in found]
    same_layers = {name.split("KV")[0] for name in found}
    beside = [name for name in others if name.split("KV")[0] in same_layers]
    if beside:
        yield f"keys beside them in their layers: {', '.join(beside)}", beside
    drawn, sets = np.random.default_rng(0), set()
    while len(sets) < min(DRAWS, math.comb(len(others), len(found))):
        chosen = tuple(sorted(drawn.choice(others, len(found), replace=False).tolist()))
        if chosen not in sets:
            yield f"random {len(sets)}", list(chosen)
            sets.add(chosen)


def main(name: str, folder: Path = Path("docs/results/mediated")) -> None:
    """Measure every row of one model, and print them with the rank of the found set among the random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.csv"
    if not file.exists():
        model, heads = tls.load_model(name), tls.read_table(HEADS / name / "heads.parquet")
        task = tls.tasks.induction(n_sequences=SEQUENCES[name])
        intact, rows = tls.evaluate(model, task), []
        for sender in SENDERS[name]:
            for label, into in receivers_of(model, sender, heads):
                with tls.ablate(model, sender, "rope_phase", into=into):
                    effect = tls.evaluate(model, task) - intact
                reached = "" if into is None else ", ".join(map(str, into))
                rows.append({"sender": sender, "taken out of": label, "receivers": reached,
                    "delta": float(effect), "delta_se": effect.se, "intact": intact.value})  # fmt: skip
                print(f"{sender} {label}: {effect}", flush=True)
        pd.DataFrame(rows).round(4).to_csv(file, index=False)
    for sender, rows in pd.read_csv(file).groupby("sender", sort=False):
        random = rows["taken out of"].str.startswith("random")
        typer.echo(rows.loc[~random, ["sender", "taken out of", "delta", "delta_se"]].round(2).to_string(index=False))
        keys = rows.loc[rows["taken out of"].str.startswith("keys of"), "delta"].iloc[0]
        sizes = rows.loc[random, "delta"].abs()
        control_p = (1 + (sizes >= abs(keys)).sum()) / (1 + len(sizes))
        typer.echo(f"{sender}: {len(sizes)} random sets, median {sizes.median():.2f}, largest {sizes.max():.2f}; "
            f"control_p of the keys {control_p:.2f}")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
