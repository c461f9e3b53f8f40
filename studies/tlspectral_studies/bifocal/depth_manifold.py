"""BA's Fig. 3: principal components of the heads' outputs by the depth of nested brackets."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral_studies.bifocal.formal_languages import Dyck3
from tlspectral_studies.bifocal.language_runs import trained_model, tune_and_train
from tlspectral_studies.bifocal.llama import ARMS, SpectralLlama
from tlspectral_studies.bifocal.schedule import LanguageSchedule, describe_tables
from tlspectral_studies.common.gradient_steps import to_device_of
from tlspectral_studies.common.run_folder import RunFolder

describe_tables(
    "manifold",
    {
        "manifold": """
            layer, head, name
            word      | index               | Number of the bracket word, from 0.
            depth     | index               | Nesting depth: the k-th opener, which is the k-th token too.
            pc1       | units of the output | First principal component of the head's output at the opener.
            pc2       | units of the output | Second principal component of the same.
            explained | share               | Share of the head's variance in both components together.
            between   | share               | Share of the variance, over all columns, that lies between depths.
            arm
        """
    },
)


@torch.no_grad()
def opener_outputs(
    model: SpectralLlama, depth: int, n_words: int, seed: int
) -> list[Float[Tensor, "words heads depth d_head"]]:
    """Outputs of each layer's heads at the openers of fresh Dyck-3 words of one depth, on the CPU."""
    words = Dyck3((depth, depth)).sample(n_words, torch.Generator().manual_seed(seed)).tokens
    with one_thread():
        outputs = model.head_outputs(*to_device_of(model, words))
    return [of_layer[:, :, 1 : depth + 1].cpu() for of_layer in outputs]  # position 0 is the begin token


def depth_manifold(model: SpectralLlama, *, depth: int = 16, n_words: int = 64, seed: int = 0) -> pd.DataFrame:
    """Compute two principal components of each head's output at the openers of Dyck-3 words, by nesting depth.

    Depth k is the k-th opener, and so also the k-th token of the word: depth and position are one here, as in BA's
    nested sequences.

    Args:
        model: trained on Dyck-3.
        depth: of the words.
        n_words: fresh words.
        seed: of the words.

    Returns:
        A row per head, word and depth, with the columns of the table `manifold` but for `arm`.

    What it does not establish: that the model uses the depth, or counts it other than by position.
    """
    word, opener = np.divmod(np.arange(n_words * depth), depth)
    tables = []
    for layer, of_layer in enumerate(opener_outputs(model, depth, n_words, seed)):
        for head, z in enumerate(of_layer.double().numpy().swapaxes(0, 1)):  # words depth d_head
            flat = z.reshape(n_words * depth, -1)
            centred = flat - flat.mean(0)
            _, scales, directions = np.linalg.svd(centred, full_matrices=False)
            # A singular vector's sign is arbitrary: the largest entry is made positive.
            signs = np.sign(directions[np.arange(2), np.abs(directions[:2]).argmax(1)])
            components = centred @ directions[:2].T * signs
            between = ((z.mean(0) - flat.mean(0)) ** 2).sum() * n_words
            tables.append(
                pd.DataFrame(
                    {
                        "layer": layer,
                        "head": head,
                        "word": word,
                        "depth": opener + 1,
                        "pc1": components[:, 0],
                        "pc2": components[:, 1],
                        "explained": (scales[:2] ** 2).sum() / (scales**2).sum(),
                        "between": between / (scales**2).sum(),
                    }
                )
            )
    return pd.concat(tables, ignore_index=True)


def manifold(folder: RunFolder, schedule: LanguageSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """BA's Fig. 3: `depth_manifold` of the first seed's Dyck-3 models, one per arm, trained again from their settings.

    Returns:
        `manifold`: `arm` and the columns of `depth_manifold`.
    """
    _, runs = tune_and_train(folder, schedule, list(ARMS), n_jobs=n_jobs)
    wanted = [run for run in runs if run.language == "dyck3" and run.seed == schedule.seeds[0]]
    tables = []
    for run in wanted:
        with one_thread():
            model, _ = trained_model(run, schedule, folder.device)
        tables.append(depth_manifold(model).assign(arm=run.arm))
    return {"manifold": pd.concat(tables, ignore_index=True)}
