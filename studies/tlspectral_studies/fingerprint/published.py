"""The tables published with "Fingerprint, Not Blueprint" (FP), which this package ships.

Data by Li Hengyu (2026), CC-BY-4.0: `data/published/NOTICE.md` says what was changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pandas as pd

from tlspectral.tables.head_columns import COLUMNS, HEAD
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS

SOURCE = "Li Hengyu, Fingerprint, Not Blueprint (2026), HengyuLi-Ozaki-lab/qk-spectral-fingerprint"
LICENCE = "CC-BY-4.0"

PUBLISHED_HEADS = ("gpt2", "opt-1.3b", "gpt-neo-1.3b", "bloom-1b1", "pythia-410m", "pythia-1.4b", "llama-3-8b")
"""Models with a table of heads, in the order of FP's Table 2."""

PUBLISHED_CHECKPOINTS = ("pythia-410m", "pythia-160m")
"""Models with a history over training checkpoints."""

_TOKENS_PER_STEP = 1024 * 2048
# The two models' files name the same columns differently; these are the names of `tlspectral.history`.
_CHECKPOINT_NAMES = {
    "prev_beh": "prev",
    "ind_beh_86": "ind_of_8_6",
    "rif_pct": "rope_imag_frac_pct",
    "rif_pct_52": "rope_imag_frac_pct",
    "D_pct": "D_head_pct",
    "D_pct_52": "D_head_pct",
    "pop_med_rif": "rope_imag_frac_median",
    "pop_med_D": "D_head_median",
    "prev_dir_frac": "dir_frac",
    "prev_D_head": "D_head",
    "prev_rope_imag_frac": "rope_imag_frac",
    "prev_ind": "ind",
}
_TWICE = ["prev_prev", "rif_52", "D_52"]
_HEADS_OF_CHECKPOINTS = {"pythia-410m": 384, "pythia-160m": 144}
_STRENGTH = 10.0  # of the penalty in the grid that FP reports; its side runs have 1

CONSTRAINED = columns("""
    arm                | label                 | rope or ape (learned absolute positions), then free (no constraint),
                       |                       | sym (symmetric M) or imag (no Im M_t).
    ce_pred            | nat                   | Cross-entropy over the targets that the map decides.
    ce_unpred          | nat                   | Cross-entropy over the noise targets.
    prev_best          | attention probability | prev of the head where it is largest.
    ind_best           | attention probability | ind of the head where it is largest.
    penalty            | of the penalty        | Value of the arm's penalty, without its weight; NaN in a free arm.
    prev               | attention probability | Attention to the previous token, mean over queries from a quarter on.
    ind                | attention probability | The same to all keys behind an earlier copy of the query's token.
    dir_frac_raw       | share                 | dir_frac of the weights as they are stored, without the norm's gain.
    D_head_raw         | share                 | D_head of the same.
    rope_imag_frac_raw | share                 | rope_imag_frac of the same; NaN without rotary positions.
    offset             | token                 | Position of the key less that of the query; -1 is the previous token.
    score              | logit                 | Mean score before the softmax, over queries from a quarter on.
""")
"""What the tables of constrained runs share, published or not; `RUN_COLUMNS` come behind them."""

_HEADS = Schema(
    "published_heads",
    columns(
        """
        layer, head, name, rank, dir_frac, D_head, imag_mass, henrici, cond_eig?, spectral_radius,
        content_pos_frac, prin_angle_mean?, prin_angle_max?, dir_frac_null_mean?, dir_frac_null_std?,
        dir_frac_z?, D_head_null_mean?, D_head_null_std?, D_head_z?, imag_mass_null_mean?,
        imag_mass_null_std?, imag_mass_z?, henrici_null_mean?, henrici_null_std?, henrici_z?, prev, dup,
        ind, copying, self_match, score_asym?, rope_imag_frac?, freq_centroid?, hi_freq_dir?
        dCE_sym?     | nat   | Change of the corpus loss when M_A is removed. GPT-2 only.
        dCE_anti?    | nat   | Change of the corpus loss when M_S is removed. GPT-2 only.
        dICL_sym?    | nat   | Change of the induction loss when M_A is removed. GPT-2 only.
        dInd_rope?   | nat   | Change of the induction loss when the rope phase is removed. Models with RoPE only.
        dCE_rope?    | nat   | Change of the corpus loss when the rope phase is removed. Pythia only.
        pos_frac_M?  | share | ||P^T M P|| / ||M||, P the 64 leading right singular vectors of W_pos. GPT-2 only.
        pos_frac_MA? | share | The same of M_A.
        """,
        COLUMNS.values(),
    ),
    "`tlspectral_studies.fingerprint.published.published_heads`; models have some of them",
)
_CHECKPOINTS = Schema(
    "published_checkpoints",
    columns("""
        step                  | step                  | Training step of the checkpoint.
        tokens                | token                 | Tokens read in training: step x 1024 x 2048.
        icl_score             | nat per token         | Loss on the second copy of random segments less that on the
                              |                       | first.
        kcomp_8_6?            | ratio                 | K-composition of the eventual previous-token head with head 8.6.
        kcomp_10_9?           | ratio                 | The same with 10.9.
        kcomp_11_14?          | ratio                 | The same with 11.14.
        kcomp_4_6?            | ratio                 | The same with 4.6.
        kcomp_8_2?            | ratio                 | The same with 8.2.
        kcomp_4_10?           | ratio                 | The same with 4.10.
        dir_frac              | share                 | dir_frac of the eventual previous-token head.
        D_head                | share                 | D_head of the same.
        rope_imag_frac        | share                 | rope_imag_frac of the same.
        ind                   | attention probability | ind of the same.
        prev                  | attention probability | prev of the same.
        ind_of_8_6?           | attention probability | ind of head 8.6. pythia-410m only.
        rope_imag_frac_pct    | share                 | Percentile of its rope_imag_frac within the model of that step.
        D_head_pct            | share                 | The same of D_head.
        rope_imag_frac_median | share                 | Median of rope_imag_frac over the heads of the model.
        D_head_median         | share                 | Median of D_head over the heads of the model.
        n_heads               | count                 | Heads of the model.
    """),
)
_KERNELS = Schema(
    "published_kernels",
    columns(
        """
        layer, head, name
        offset  | token | Position of the key less that of the query, from -20 to 0.
        score   | logit | Mean attention score before the softmax at the offset, on text.
        ablated | flag  | Whether the rope phase of the head is removed; there for head 5.2 alone.
        """,
        HEAD,
    ),
)
_STRENGTHS = columns("strength | ratio | Weight of the arm's penalty; 0 for a free arm.")
_CONSTRAINED = {
    name: Schema(f"published_constrained.{name}", columns(names, (*_STRENGTHS, *CONSTRAINED, *RUN_COLUMNS)))
    for name, names in {
        "evaluations": "arm, strength, seed, step, ce_pred, ce_unpred, prev_best, ind_best, penalty",
        "heads": "arm, strength, seed, step, layer, head, name, prev, ind, "
        "dir_frac_raw, D_head_raw, rope_imag_frac_raw",
        "kernels": "arm, strength, seed, step, layer, head, name, offset, score",
    }.items()
}


@dataclass(frozen=True, eq=False)
class ConstrainedTables:
    """The published two-layer runs that were trained with a penalty on a part of their heads.

    Attributes:
        evaluations: a row per run and step.
        heads: a row per run, step and head.
        kernels: a row per run, head and offset, at the last evaluation.
    """

    evaluations: pd.DataFrame
    heads: pd.DataFrame
    kernels: pd.DataFrame


def published_heads(name: str) -> pd.DataFrame:
    """Return the published table of a model's heads, one row per head.

    Args:
        name: one of `PUBLISHED_HEADS`.

    Returns:
        DataFrame with `layer, head`, the spectral columns and detector scores of the release under the names of
        `analyze_heads`, and for some models effects of ablations. `attrs` hold source and licence.

    Raises:
        ValueError: there is no such table.

    What it does not establish: how the numbers were computed. Weights, prompts and versions are not in the release's
    tables.
    """
    _require_published(name, PUBLISHED_HEADS, "table of heads")
    return _HEADS.frame(_read(f"{name}_head_full", model=name))


def published_checkpoints(name: str) -> pd.DataFrame:
    """Return the published history of a model's eventual previous-token head over training, one row per checkpoint.

    Args:
        name: one of `PUBLISHED_CHECKPOINTS`.

    Returns:
        DataFrame with the names of `tlspectral.history`. Columns: `step, tokens, icl_score, kcomp_8_6?, kcomp_10_9?,
        kcomp_11_14?, kcomp_4_6?, kcomp_8_2?, kcomp_4_10?, dir_frac, D_head, rope_imag_frac, ind, prev, ind_of_8_6?,
        rope_imag_frac_pct, D_head_pct, rope_imag_frac_median, D_head_median, n_heads`.

    Raises:
        ValueError: there is no such history.

    What it does not establish: which head it is in pythia-160m: the release does not say.
    """
    _require_published(name, PUBLISHED_CHECKPOINTS, "history of checkpoints")
    summary, analysis = (_read(f"{name}_ckpt_{kind}") for kind in ("summary", "analysis"))
    joined = summary.astype({"step": "int64"}).merge(analysis, on="step", validate="one_to_one")
    history = joined.drop(columns=[column for column in _TWICE if column in joined]).rename(columns=_CHECKPOINT_NAMES)
    history.insert(1, "tokens", history["step"] * _TOKENS_PER_STEP)
    history["n_heads"] = _HEADS_OF_CHECKPOINTS[name]
    return _CHECKPOINTS.frame(_marked(history, model=name))


def published_kernels() -> pd.DataFrame:
    """Return the published scores by relative position of four heads of Pythia-410m (FP Fig. 3).

    Returns:
        DataFrame, a head and offset a row. Columns: `layer, head, name, offset, score, ablated`.
    """
    table = _read("pythia-410m_kernel_curves")
    # The ablation's panel repeats the intact curve of head 5.2 and names curves, not heads.
    rows = table.loc[(table["fig"] == "relpos") | (table["head"] == "killed")].reset_index(drop=True)
    ablated = rows["head"] == "killed"
    index = rows["head"].where(~ablated, "5.2").str.split(".", expand=True).astype("int64")
    curves = pd.DataFrame(
        {"layer": index[0], "head": index[1], "offset": rows["offset"], "score": rows["score"], "ablated": ablated}
    )
    return _KERNELS.frame(_marked(curves, model="pythia-410m"))


def published_constrained(strength: float = _STRENGTH) -> ConstrainedTables:
    """Return the published constrained runs (FP section 10): free arms, and arms with a penalty.

    Args:
        strength: weight of the penalty: 10, which FP reports, or 1, of which there are five runs.

    Returns:
        `ConstrainedTables` of the free arms (strength 0) and of the arms with this strength.

    Raises:
        ValueError: there are no runs of this strength.

    What it does not establish: spectra with the norm's gain: `_raw` columns are of the weights as they were stored.
    """
    selected = {}
    for name, schema in _CONSTRAINED.items():
        table = _read(f"constrained_{name}", strength=strength)
        if strength not in (known := sorted(table["strength"].unique())):
            raise ValueError(f"no runs of strength {strength} were published: there are {known}")
        rows = table.loc[table["strength"].isin((0.0, strength))].reset_index(drop=True)
        selected[name] = schema.frame(rows, table.attrs)
    return ConstrainedTables(**selected)


def _require_published(name: str, names: Sequence[str], kind: str) -> None:
    if name not in names:
        raise ValueError(f"no {kind} was published for {name!r}: there are {', '.join(names)}")


def _read(stem: str, **attrs: object) -> pd.DataFrame:
    return _marked(pd.read_parquet(published_folder() / f"{stem}.parquet"), **attrs)


def _marked(table: pd.DataFrame, **attrs: object) -> pd.DataFrame:
    """Add source and licence to the table's `attrs`. Those of the release stay."""
    table.attrs = {**table.attrs, "source": SOURCE, "licence": LICENCE, **attrs}
    return table


def published_folder() -> Path:
    """Return the folder of the tables in the installed package."""
    return Path(str(files("tlspectral_studies") / "data" / "published"))
