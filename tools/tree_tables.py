"""Items of `compare_trees.py`: statistics of fixed tables, and calls that are refused."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import zoo
from tree_inputs import fixed_table, tokens_for


class Item(NamedTuple):
    """One call: its name in the folder, a method of `Calls`, and settings."""

    name: str
    call: str
    settings: dict[str, Any]


# --- statistics ---


def statistic_items() -> Iterator[Item]:
    """All public statistics, on tables drawn once and for all."""
    table, other = fixed_table(), fixed_table(seed=1, missing=False)
    x, y, controls = (table[name].to_numpy() for name in ("D_head", "prev", "dir_frac"))
    layers = table["layer"].to_numpy()
    tables = {f"m{index}": fixed_table(seed=index, missing=False) for index in range(6)}
    groups = dict(zip(tables, "aaabbb", strict=True))
    values = {name: float(one["prev"].corr(one["D_head"])) for name, one in tables.items()}
    few = np.array([0.3, -1.2, 0.8, 2.0, 0.1, -0.4]), np.array([1.3, 0.2, 2.2, 0.9, 1.7, 1.1])
    calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
    for method in ("hybrid", "rank"):
        calls.append((f"partial-{method}", "partial_spearman", (x, y, controls), {"method": method}))
        within = {"method": method, "layers": layers}
        calls.append((f"partial-{method}-layers", "partial_spearman", (x, y, controls), within))
        calls.append((f"bootstrap-{method}", "layer_bootstrap", (table,), {"draws": 60, "method": method, "seed": 2}))
        calls.append((f"attenuation-{method}", "attenuation", (table,), {"draws": 40, "method": method}))
    percentage = (0.01, 0.04, 0.2, 0.9, 0.03)
    calls += [
        ("bootstrap-controls", "layer_bootstrap", (other, "rope_imag_frac", "prev", ()), {"draws": 50, "level": 0.9}),
        ("attenuation", "attenuation", (other,), {"base": ()}),
        ("top", "top_head_percentile", (table,), {}),
        ("top-3", "top_head_percentile", (other,), {"column": "dir_frac", "k": 3}),
        ("permutation", "model_permutation_test", few, {}),
        ("permutation-greater", "model_permutation_test", few, {"alternative": "greater"}),
        ("intraclass", "intraclass_correlation", (table, "D_head"), {}),
        ("false-discovery", "benjamini_hochberg", (percentage,), {}),
        ("spearman-table", "spearman_table", (table, ["D_head", "dir_frac"], ["prev"]), {}),
        ("leave-one-out", "leave_one_model_out", (values, groups), {}),
        ("top-k", "top_k_sensitivity", (tables, groups), {"ks": (1, 3, 5)}),
        ("mann-whitney", "mann_whitney", few, {}),
        ("class", "class_test", (table,), {"threshold": 0.7}),
        ("nested", "nested_r_squared", (table, "prev", ["dir_frac"], ["D_head"]), {}),
        ("overlap", "hypergeometric_overlap", (30, 6, 5, 3), {}),
        ("triage", "triage", (table,), {"threshold": 0.7, "ks": (3, 5)}),
    ]
    for name, function, given, settings in calls:
        yield Item(name, "statistic", {"function": function, "make": _made(given, settings)})


def _made(given: tuple[Any, ...], settings: dict[str, Any]) -> Callable[[], Any]:
    return lambda: (copy.deepcopy(given), dict(settings))


# --- refusals ---


def refusal_items() -> Iterator[Item]:
    """Calls that are refused, of a model with two layers of four heads; the class of the error is compared."""
    tokens = tokens_for(None, 2, 20)
    zeros = torch.zeros(2, 20, dtype=torch.long)
    bad_heads = ["L2H0", "L0H9", "nothing", 3, [(0, 1, 2)], -1, pd.DataFrame({"head": [1]})]
    rows: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    rows += [("ablate", (head, "symmetric"), {}) for head in bad_heads]
    rows += [("ablate", ("L0H1", part), {}) for part in ("phase", "", None, 3, "rotary_band", "long_range", "content")]
    for heads, into in (("L1H1", "L0H1"), ("L0H1", "L1H9")):
        rows.append(("ablate", (heads, "output"), {"into": into, "input": "k"}))
    rows += [("ablation_hooks", (head, "symmetric"), {}) for head in bad_heads[:3]]
    rows += [("ablation_sweep", ("phase",), {}), ("ablation_sweep", ("symmetric",), {"heads": "L7H0"})]
    rows += [("ablation_sweep", ("symmetric",), {option: "wrong"}) for option in ("task", "control", "screen")]
    wrong = ({"null_draws": 1}, {"null_blocks": "own"}, {"null_dtype": "int8"}, {"extras": ("colour",)}, {"heads": []})
    rows += [("analyze_heads", (), more) for more in (*wrong, {"heads": "L9H0"})]
    rows += [("detect_heads", (), more) for more in ({"n_sequences": 1}, {"segment_length": 500}, {"pattern": "up"})]
    rows += [("detect_heads", (), {"prompts": bad}) for bad in (["text"], [], tokens * 1000, 3)]
    rows += [("detect_heads", (), {"pattern": lambda row: torch.ones(len(row), len(row))})]
    rows += [("k_composition", (head,), {}) for head in bad_heads[:3]]
    rows += [("verify_scores", (bad,), {}) for bad in (tokens * 1000, ["text"], 3, zeros[:, :0])]
    rows += [("qk_penalty", (part,), {}) for part in ("phase", "output")] + [("qk_penalty", ("symmetric", "L5H0"), {})]
    rows += [("relative_position_kernel", ("L5H0",), {}), ("relative_position_kernel", (None, tokens, [4]), {})]
    rows += [("head_directions", ("L1H0", "kk"), {}), ("head_directions", ("L9H0",), {})]
    rows += [("head_directions", ("L1H0",), {"draws": 0}), ("qk_operators", (), {"wrong": 1})]
    places = ((99, 0), (3, 5), (-99, 0), (3, 99))
    rows += [("qk_attribution", (tokens[0], "L1H0", query, key), {}) for query, key in places]
    rows += [("qk_attribution", (tokens, "L1H0", 5, 2), {}), ("qk_attribution", (tokens[0], "L8H0", 5, 2), {})]
    rows += [("qk_attribution", (tokens[0], "L1H0", 5, 2), {"remove": 5, "top": 2})]
    rows += [
        ("edge_effects", ("L0H0",), {}),
        ("edge_effects", ("L9H0",), {}),
        ("edge_effects", ("L1H0",), {"replace": 3}),
    ]
    rows += [("positional_symbolic", (prompt,), {}) for prompt in (3, tokens, [], None)]
    rows += [("evaluate", (task,), {}) for task in (3, "unknown", None)]
    rows += [("band_effects", ("L9H0",), {}), ("copying_scores", (), {"wrong": 1})]
    rows += [("to_spectral", (), more) for more in ({"scope": "all"}, {"heads": "L9H0"}, {"frequencies": [99]})]
    rows += [("to_spectral", (), {"heads": "L0H1", "scope": "model"}), ("to_spectral", (), {"phase_noise": -1.0})]
    for index, (function, given, settings) in enumerate(rows):
        settings = {"function": function, "given": given, "settings": settings}
        yield Item(f"{index:03}-{function}", "refused", settings)
    table = fixed_table()
    alone: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("load_model", ("no-such-model",), {}),
        ("load_model", ("tiny-rope",), {"backend": "other"}),
        ("load_model", (3,), {}),
        ("compare_heads", (table, table), {}),
        ("partial_spearman", ([1, 2], [1, 2, 3], [1, 2]), {}),
        ("partial_spearman", ([1, 2, 3], [1, 2, 3], [1, 2, 3]), {"method": "other"}),
        ("layer_bootstrap", (table, "nothing"), {}),
        ("top_head_percentile", (table,), {"k": 0}),
        ("attenuation", (table, ("nothing",)), {}),
        ("model_permutation_test", ([1.0], [2.0]), {"alternative": "other"}),
        ("head_history", ([],), {}),
        ("head_history", (["tiny-rope", "tiny-rope"],), {}),
        ("read_table", ("/nowhere.parquet",), {}),
        ("write_table", (3, "/nowhere/x.parquet"), {}),
    ]
    for index, (function, given, settings) in enumerate(alone):
        settings = {"function": function, "make": _made(given, settings)}
        yield Item(f"alone-{index:02}-{function}", "statistic", settings)


def refused_model_items() -> Iterator[Item]:
    """Architectures that are not supported."""
    for name in zoo.REFUSED:
        yield Item(name, "refused_model", {"name": name})
