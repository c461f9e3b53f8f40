"""Published tables, changed: so that every sentence of FP is true by its own words, and in four blind ways."""

import numpy as np
import pandas as pd
from tlspectral_studies.fingerprint.published import ConstrainedTables
from tlspectral_studies.fingerprint.replication import POSITIONS, PublishedTables

ROTARY = [name for name, positions in POSITIONS.items() if positions == "RoPE"]
FORMED = 11  # row of step 1000


def claimed_heads(name: str, heads: pd.DataFrame) -> pd.DataFrame:
    """Half of the heads attend to the previous token, and every spectral column says which half."""
    rng = np.random.default_rng(list(name.encode()))
    n, rotary = len(heads), name in ROTARY
    place = rng.permutation(n)  # 0 has the largest prev
    half = np.where(place < n // 2, 1.0, 0.0)
    prev = np.where(half == 1, 0.25 + 0.2 * rng.random(n), 0.1 * rng.random(n))
    prev[place == 0], prev[place == 1] = 0.95, 0.9
    prev[(place >= 2) & (place < 5)] = [0.49, 0.48, 0.47]

    def follows(sign: float, noise: float = 0.4) -> np.ndarray:
        return sign * half + noise * rng.standard_normal(n)

    blurred = 0.8 if name == "llama-3-8b" else 0.4  # attenuated on Llama
    top = place < 5
    columns = {
        "prev": prev,
        "dir_frac": 0.5 + 0.05 * np.tanh(follows(1)),
        "D_head": follows(1 if rotary else -1),
        "imag_mass": follows(1),
        "henrici": follows(-1),
        "content_pos_frac": follows(-1, blurred),
        "dup": 0.1 * follows(-1, blurred),
        "ind": 0.1 * follows(-1, blurred),
        "spectral_radius": rng.standard_normal(n),
        "copying": rng.standard_normal(n),
    }
    columns["D_head"][top] = (1.0 if rotary else -5.0) + 0.1 * rng.random(5)
    if POSITIONS[name] == "absolute":
        columns["content_pos_frac"][top] = 3.0 + rng.random(5)
    if name == "gpt2":
        columns["ind"][np.argsort(columns["content_pos_frac"])[-12:-5]] = 0.9
        circuit = [(5, 1), (5, 5), (6, 9), (4, 11)]
        inside = pd.MultiIndex.from_frame(heads[["layer", "head"]]).isin(circuit)
        # Small effects in an order that no column has; the circuit's above them all.
        columns["dICL_sym"] = np.where(inside, 1.0, 1e-4 * rng.random(n))
        columns["dCE_sym"] = 0.01 * rng.random(n)
        columns |= {metric: rng.standard_normal(n) for metric in ("cond_eig",)}
    if rotary:
        llama = name == "llama-3-8b"
        columns["rope_imag_frac"] = rng.standard_normal(n) if llama else columns["D_head"] + 0.01 * rng.random(n)
        columns["freq_centroid"] = columns["D_head"] + 0.001 * rng.random(n) if llama else rng.standard_normal(n)
        columns["rope_imag_frac"][place < 2] = 9.0
        columns["hi_freq_dir"] = follows(1)
        columns["hi_freq_dir"][top] = 5.0 + rng.random(5)
        columns["dInd_rope"] = np.where(place < 2, 12.5 - 0.1 * place, 1e-4 * rng.random(n))
    columns["self_match"] = columns["content_pos_frac"]
    return heads.assign(**columns)


def claimed_track(track: pd.DataFrame) -> pd.DataFrame:
    """Behaviour at step 1000, everything else at step 2000, a median that falls evenly in log steps until the end."""
    row = np.arange(len(track))
    formed, wired = row >= FORMED, row > FORMED
    late = np.clip((row - FORMED) / (row[-1] - FORMED), 0, 1)
    columns = {
        "prev": np.where(formed, 0.95, 0.01),
        "rope_imag_frac_pct": np.where(formed, 0.95, 0.5),
        "D_head_pct": np.where(formed, 0.95, 0.5),
        "D_head": 0.61,
        "D_head_median": 0.61 - 0.2 * late,
        "icl_score": np.where(wired, -12.5, 0.0),
    }
    columns |= {name: np.where(wired, 0.9, 0.03) for name in track if str(name).startswith(("kcomp_", "ind_of_"))}
    return track.assign(**columns)


def claimed_runs(runs: ConstrainedTables) -> ConstrainedTables:
    """Constrained arms are their free arm a thousand steps later, ape_sym 1500; their kernels are its kernels."""
    late = {"ape_sym": "ape_free", "rope_sym": "rope_free", "rope_imag": "rope_free"}
    evaluations, kernels = runs.evaluations, runs.kernels
    parts = [evaluations[evaluations["arm"].str.endswith("_free")]]
    for arm, free in late.items():
        own = evaluations[evaluations["arm"] == free].sort_values(["seed", "step"]).assign(arm=arm, penalty=0.0)
        scores = ["ce_pred", "prev_best", "ind_best"]
        moved = (
            own.groupby("seed")[scores]
            .shift(15 if arm == "ape_sym" else 10)
            .fillna(own.groupby("seed")[scores].transform("first"))
        )
        moved[own["step"] == own["step"].max()] = own[scores]
        parts.append(own.assign(**moved))
    heads = runs.heads.assign(D_head_raw=np.where(runs.heads["step"] < 2000, 0.6, 0.4))
    heads.loc[heads["arm"] == "ape_free", "dir_frac_raw"] = 0.8
    heads.loc[heads["arm"] == "rope_free", "dir_frac_raw"] = 0.5
    heads.loc[heads["arm"] == "ape_sym", "prev"] *= 0.1
    free = [table[table["arm"] == "rope_free"].assign(arm="rope_sym") for table in (heads, kernels)]
    heads, kernels = (
        pd.concat([table[table["arm"] != "rope_sym"], copy], ignore_index=True)
        for table, copy in zip((heads, kernels), free, strict=True)
    )
    heads.loc[heads["arm"] == "rope_sym", "prev"] *= 1.01
    joined = pd.concat(parts, ignore_index=True)
    return ConstrainedTables(joined.assign(prev_best=np.where(joined["step"] >= 100, 0.95, 0.01)), heads, kernels)


def claimed_tables() -> PublishedTables:
    """All tables as the sentences say; kernels fall with distance."""
    tables = PublishedTables()
    runs = claimed_runs(tables.constrained)
    return PublishedTables(
        {name: claimed_heads(name, heads) for name, heads in tables.heads.items()},
        {name: claimed_track(track) for name, track in tables.checkpoints.items()},
        tables.kernels.assign(score=tables.kernels["offset"].astype(float)),
        runs,
        runs,
    )


# --- blind changes ---

PLACES = {"layer", "head", "name", "step", "tokens", "n_heads", "offset", "ablated", "arm", "seed", "strength"}


def values_of(table):
    return [name for name in table if name not in PLACES]


def shuffled(table):
    """Every column but those of PLACES in an order of its own."""
    generator = np.random.default_rng(0)
    return table.assign(**{name: generator.permutation(table[name].to_numpy()) for name in values_of(table)})


def aligned(table):
    """Every column but those of PLACES rising in one common order."""
    place = np.random.default_rng(1).permutation(len(table)).argsort()
    return table.assign(**{name: np.sort(table[name].to_numpy())[place] for name in values_of(table)})


def doubled(table):
    """All rows twice, the copies further up in a deeper model."""
    copy = table.copy()
    if "layer" in table:
        copy["layer"] += table["layer"].max() + 1
    return pd.concat([table, copy], ignore_index=True)


def stretched(table):
    """Ten times each number and a little more; scores of one constrained arm apart from the others."""
    wider = table.assign(**{name: 10 * table[name] + 0.05 for name in values_of(table)})
    if "arm" in table and "score" in table:
        wider["score"] += 1000.0 * (table["arm"] == "rope_sym")
    return wider


def longer(track):
    """One checkpoint more."""
    return pd.concat([track, track.tail(1).assign(step=10**6)])


def shrunk(track):
    """A tenth of each number: nothing forms."""
    return track.assign(**{name: 0.1 * track[name] for name in values_of(track)})


def changed(change):
    """All tables after a change; histories and runs, which have no heads to double, after one like it."""
    tables = PublishedTables()
    of_track = {doubled: longer, stretched: shrunk}.get(change, change)
    of_runs = (lambda table: table) if change is doubled else change
    return PublishedTables(
        {name: change(heads) for name, heads in tables.heads.items()},
        {name: of_track(track) for name, track in tables.checkpoints.items()},
        of_runs(tables.kernels),
        ConstrainedTables(*(of_runs(one) for one in vars(tables.constrained).values())),
        tables.weak,
    )


CHANGES = (shuffled, aligned, doubled, stretched)
