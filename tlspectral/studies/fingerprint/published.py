"""The tables published with "Fingerprint, Not Blueprint" (FP), which this package ships.

Data by Li Hengyu (2026), CC-BY-4.0: `tlspectral/data/published/NOTICE.md` says what was changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pandas as pd

from tlspectral.studies.fingerprint import published_columns as columns
from tlspectral.tables.column import named

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


@dataclass(frozen=True, eq=False)
class ConstrainedTables:
    """The published two-layer runs that were trained with a penalty on a part of their heads.

    Attributes:
        evaluations: `arm, strength, seed, step, ce_pred, ce_unpred, prev_best, ind_best, penalty`, losses in nats.
        heads: `arm, strength, seed, step, layer, head, prev, ind, dir_frac_raw, D_head_raw, rope_imag_frac_raw`.
        kernels: `arm, strength, seed, step, layer, head, offset, score` at the last evaluation; offset = key - query.
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
        `analyze_heads`, and for some models effects of ablations in nats: `dCE_sym`, `dICL_sym` (M_A removed, corpus
        and induction loss), `dCE_anti` (M_S removed), `dInd_rope`, `dCE_rope` (rope phase removed). `attrs` hold
        source and licence.

    Raises:
        ValueError: there is no such table.

    What it does not establish: how the numbers were computed. Weights, prompts and versions are not in the release's
    tables.
    """
    _require_published(name, PUBLISHED_HEADS, "table of heads")
    return named(_read(f"{name}_head_full", model=name), columns.PUBLISHED_HEADS)


def published_checkpoints(name: str) -> pd.DataFrame:
    """Return the published history of a model's eventual previous-token head over training, one row per checkpoint.

    Args:
        name: one of `PUBLISHED_CHECKPOINTS`.

    Returns:
        DataFrame with the names of `tlspectral.history`: `step, tokens`; of the eventual previous-token head `prev,
        ind, dir_frac, D_head, rope_imag_frac` and its percentiles `D_head_pct, rope_imag_frac_pct` (rank / n); of all
        heads `D_head_median, rope_imag_frac_median` and `n_heads`; `icl_score` in nats; `kcomp_L_H`, composition with
        induction head L.H; for pythia-410m `ind_of_8_6`, the induction score of head 8.6.

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
    return named(_marked(history, model=name), columns.PUBLISHED_CHECKPOINTS)


def published_kernels() -> pd.DataFrame:
    """Return the published scores by relative position of four heads of Pythia-410m (FP Fig. 3).

    Returns:
        DataFrame `layer, head, offset, score, ablated`: mean score before softmax at offset = key - query, -20 to 0;
        `ablated` where the rope phase of that head is removed, which is there for head 5.2 alone.
    """
    table = _read("pythia-410m_kernel_curves")
    # The ablation's panel repeats the intact curve of head 5.2 and names curves, not heads.
    rows = table.loc[(table["fig"] == "relpos") | (table["head"] == "killed")].reset_index(drop=True)
    ablated = rows["head"] == "killed"
    index = rows["head"].where(~ablated, "5.2").str.split(".", expand=True).astype("int64")
    curves = pd.DataFrame(
        {"layer": index[0], "head": index[1], "offset": rows["offset"], "score": rows["score"], "ablated": ablated}
    )
    return named(_marked(curves, model="pythia-410m"), columns.PUBLISHED_KERNELS)


def published_constrained() -> ConstrainedTables:
    """Return the published constrained runs (FP section 10): free arms, and arms with a penalty.

    Returns:
        `ConstrainedTables` of the free arms (strength 0) and of the arms with the strength that FP reports, 10.

    What it does not establish: spectra with the norm's gain: `_raw` columns are of the weights as they were stored.
    """
    selected = {}
    for name, documented in columns.PUBLISHED_CONSTRAINED.items():
        table = _read(f"constrained_{name}", strength=_STRENGTH)
        rows = table.loc[table["strength"].isin((0.0, _STRENGTH))].reset_index(drop=True)
        rows.attrs = table.attrs
        selected[name] = named(rows, documented)
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
    return Path(str(files("tlspectral") / "data" / "published"))
