"""Queries and keys of a head in its rotary plane while it learns the index task."""

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.positional_symbolic.canonical.behaviour import CANONICAL
from tlspectral_studies.positional_symbolic.canonical.model import CanonicalHeads, CanonicalRun, angle_unit
from tlspectral_studies.positional_symbolic.canonical.schedule import CanonicalSchedule, schedule_of
from tlspectral_studies.positional_symbolic.canonical.trainer import train_canonical
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask

QUERY_KEY_TRAJECTORIES = Schema(
    "query_key_trajectories",
    columns(
        """
        angle, seed, step
        kind  | label             | query for the index queries, key for the pairs of symbol and integer.
        token | index             | Id of the token.
        label | index             | Of a query the position that it asks for, of a key its symbol.
        x     | units of the head | First column of the token's q or k, before rotation.
        y     | units of the head | Second column of the same.
        """,
        CANONICAL,
    ),
    "`tlspectral_studies.positional_symbolic.canonical.query_key_trajectories`; `tlspectral study canonical -o FOLDER` "
    "writes it as trajectories.parquet",
)


def query_key_trajectories(
    angles: tuple[float, ...] = (0.5, 1.0, 2.0),
    *,
    preset: str | CanonicalSchedule = "quick",
    seed: int = 0,
    device: str = "cpu",
) -> pd.DataFrame:
    """Train heads of one frequency on the index task and follow their queries and keys (PS Figure 3B).

    Args:
        angles: frequencies in units of pi/33.
        preset: `"quick"`, `"paper"`, or a schedule; its `log_every` is the distance of the steps that are kept.
        seed: of weights and prompts.
        device: where the heads are trained.

    Returns:
        DataFrame, an angle, step and token a row. Columns: `angle, seed, step, kind, token, label, x, y`. The score at
        distance d is the scalar product of (x, y) of query and key after the query was rotated by d * angle * pi/33.

    Raises:
        ValueError: an unknown preset, or no angles.

    What it does not establish: that other seeds arrange their vectors at the same angles; a common rotation of
    all queries and keys changes no score.
    """
    task = CanonicalTask("index")
    runs = [CanonicalRun((angle * angle_unit(task),), seed) for angle in angles]
    rows = []

    def observe(step: int, model: CanonicalHeads) -> None:
        for kind, ids, weights in (("query", task.query_ids, model.W_Q), ("key", range(task.n_pairs), model.W_K)):
            tokens = torch.tensor(ids)
            labels = tokens - ids.start if kind == "query" else tokens // task.n_integers
            for angle, plane in zip(angles, _plane(model.W_E[:, tokens], weights), strict=True):
                x, y = plane.double().numpy().T
                where = {"angle": angle, "seed": seed, "step": step, "kind": kind}
                rows.append(pd.DataFrame({**where, "token": tokens.numpy(), "label": labels.numpy(), "x": x, "y": y}))

    train_canonical(task, runs, schedule_of(preset), observe=observe, device=device)
    table = pd.concat(rows).sort_values(["angle", "step", "kind", "token"], ignore_index=True)
    return QUERY_KEY_TRAJECTORIES.frame(table)


@torch.no_grad()
def _plane(
    embedded: Float[Tensor, "runs tokens d_model"], weights: Float[Tensor, "runs d_model 2"]
) -> Float[Tensor, "runs tokens 2"]:
    return (embedded @ weights).cpu()
