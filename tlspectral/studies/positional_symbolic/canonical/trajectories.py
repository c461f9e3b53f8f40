"""Queries and keys of a head in its rotary plane while it learns the index task."""

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.studies.positional_symbolic.canonical.model import CanonicalHeads, CanonicalRun, angle_unit
from tlspectral.studies.positional_symbolic.canonical.schedule import CanonicalSchedule, schedule_of
from tlspectral.studies.positional_symbolic.canonical.trainer import train_canonical
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral.studies.positional_symbolic.columns import QUERY_KEY_TRAJECTORIES
from tlspectral.tables import named


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
        DataFrame, one row per angle, step and token: `angle, seed, step, kind, token, label, x, y`. `kind` is `"query"`
        for the index queries, whose `label` is the position they ask for, and `"key"` for the pairs, whose `label` is
        their symbol. `x, y` are the token's two columns of q or k before rotation, in the units of the head: the score
        at distance d is their scalar product after the query was rotated by d * angle * pi/33.

    Raises:
        ValueError: an unknown preset, or no angles.

    What it does not establish: that other seeds arrange their vectors at the same angles; a common rotation of
    all queries and keys changes no score.
    """
    task = CanonicalTask("index")
    runs = [CanonicalRun((angle * angle_unit(task),), seed) for angle in angles]
    rows = []

    def observe(step: int, model: CanonicalHeads) -> None:
        for kind, ids, weights in (
            ("query", task.query_ids, model.W_Q),
            ("key", range(task.n_pairs), model.W_K),
        ):
            tokens = torch.tensor(ids)
            labels = tokens - ids.start if kind == "query" else tokens // task.n_integers
            for angle, plane in zip(angles, _plane(model.W_E[:, tokens], weights), strict=True):
                x, y = plane.double().numpy().T
                where = {"angle": angle, "seed": seed, "step": step, "kind": kind}
                rows.append(pd.DataFrame({**where, "token": tokens.numpy(), "label": labels.numpy(), "x": x, "y": y}))

    train_canonical(task, runs, schedule_of(preset), observe=observe, device=device)
    table = pd.concat(rows, ignore_index=True)
    table = table.sort_values(["angle", "step", "kind", "token"], ignore_index=True)
    return named(table, QUERY_KEY_TRAJECTORIES)


@torch.no_grad()
def _plane(
    embedded: Float[Tensor, "runs tokens d_model"], weights: Float[Tensor, "runs d_model 2"]
) -> Float[Tensor, "runs tokens 2"]:
    return (embedded @ weights).cpu()
