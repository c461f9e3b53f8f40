"""`"L0KV1"`, the query heads of a key/value group: the same as the list of its heads in every public function."""

import functools
import inspect
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from zoo import HAS_HOOKED, also_slow, needs_hooked, save_folder, shared

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.heads_of_model import heads_by_layer, one_head
from tlspectral.selection.heads_as_written import head_pair, head_pairs, pair_in_table, pairs_in_table

IDS = [[5, 6, 7, 8, 5, 6, 9, 8], [9, 3, 4, 7, 9, 3, 5, 7]]
TASK = tls.Task(IDS, lambda logits, tokens, mask: logits[:, -1, 5] - logits[:, -1, 6], predict=-1)
BLOCKS = tls.positional.BlockPrompt(prefix=[3, 4], blocks=([5, 6], [7, 8], [9, 10]), suffix=[11, 5])
SWEPT, PLACED = (pd.DataFrame({"layer": np.repeat([0, 1], 4), "head": [*range(4)] * 2}) for _ in range(2))
for table in (SWEPT, PLACED):
    table.insert(2, "name", [f"L{layer}H{head}" for layer, head in table.to_numpy()])
    table.attrs["heads_per_group"] = 2
SWEPT = SWEPT.assign(part="output", delta=np.arange(8.0), delta_se=0.1)
PLACED = PLACED.assign(s_pos=np.linspace(0.1, 0.9, 8), s_sym=np.linspace(0.9, 0.1, 8))


def under(model, heads):
    """Logits in a block of `ablate`."""
    with tls.ablate(model, heads, "output"):
        return model(torch.tensor(IDS))


def learning(model, heads):
    """Which heads learn frequencies, layer by layer."""
    return {name: value for name, value in tls.to_spectral(model, heads=heads).named_buffers() if "mask" in name}


def learning_from_scratch(model, heads):
    from transformer_lens import HookedTransformerConfig

    sizes = {
        "n_layers": 2,
        "d_model": 32,
        "n_ctx": 16,
        "d_head": 8,
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_vocab": 12,
    }
    cfg = HookedTransformerConfig(**sizes, act_fn="relu", positional_embedding_type="rotary", rotary_dim=8, seed=0)
    made = tls.SpectralHookedTransformer(cfg, heads=heads)
    return {name: value for name, value in made.named_buffers() if "query_mask" in name}


CALLS = {
    "ablate": under,
    "ablation_hooks": lambda m, heads: m.run_with_hooks(
        torch.tensor(IDS), fwd_hooks=tls.ablation_hooks(m, heads, "M_A")
    ),
    "ablation_sweep": lambda m, heads: tls.ablation_sweep(m, "output", heads=heads, task=TASK),
    "ablation_sweep, sets": lambda m, heads: tls.ablation_sweep(
        m, "output", heads={"a": heads}, task=TASK, control="random"
    ),
    "analyze_heads": lambda m, heads: tls.analyze_heads(m, heads=heads, detectors=False, null_draws=2),
    "edge_effects": lambda m, heads: tls.edge_effects(m, "L1H0.q", senders=heads, task=TASK),
    "edge_effects, queries": lambda m, heads: tls.edge_effects(m, {"q": moved(heads)}, senders="L0H1", task=TASK),
    "ov_attribution": lambda m, heads: tls.ov_attribution(m, IDS[:1], heads, -1, direction=torch.ones(m.cfg.d_model)),
    "positional_symbolic": lambda m, heads: tls.positional_symbolic(m, BLOCKS, heads=heads),
    "relative_position_kernel": lambda m, heads: tls.relative_position_kernel(m, heads, prompts=IDS),
    "to_spectral": learning,
    "top_pairs": lambda m, heads: tls.top_pairs(m, heads, prompts=IDS),
    "hooks.bake": lambda m, heads: tls.hooks.bake(m, heads)(torch.tensor(IDS)).logits,
    "hooks.band_effects": lambda m, heads: tls.hooks.band_effects(m, heads, task=TASK, draws=1),
    "hooks.receivers": lambda m, heads: tls.edge_effects(
        m, tls.hooks.receivers(moved(heads), "v"), senders="L0H1", task=TASK
    ),
    "heads.kernel_prediction": lambda m, heads: tls.heads.kernel_prediction(m, heads, prompts=IDS),
    "heads.qk_penalty": lambda m, heads: tls.heads.qk_penalty(m, "symmetric", heads),
    "positional.logit_shares": lambda m, heads: tls.positional.logit_shares(m, BLOCKS, heads),
    "plots.ablation_effects": lambda m, heads: tls.plots.ablation_effects(SWEPT, heads),
    "plots.eigenvalues": lambda m, heads: tls.plots.eigenvalues(m, heads),
    "plots.patterns": lambda m, heads: tls.plots.patterns(m, IDS[:1], heads),
    "plots.positional_symbolic_plane": lambda m, heads: tls.plots.positional_symbolic_plane(PLACED, highlight=heads),
} | ({"SpectralHookedTransformer": learning_from_scratch} if HAS_HOOKED else {})
"""Calls of the public functions that take heads; what stands behind a comma is another argument."""

ONE_HEAD = {
    "head_directions": lambda m, head: tls.head_directions(m, head, "qk"),
    "k_composition": lambda m, head: tls.k_composition(m, head),
    "qk_attribution": lambda m, head: tls.qk_attribution(m, IDS[:1], head, -1, 0),
    "scores": lambda m, head: tls.scores(m, IDS[:1], head),
    "plots.rotary_plane": lambda m, head: tls.plots.rotary_plane(m, head, 0, IDS[:1]),
    "hooks.check_hook": lambda m, head: tls.hooks.check_hook(m, [], head).found,
    "qk_operators": lambda m, head: tls.qk_operators(m)[head].w_q,
    "report.head_card": lambda m, head: tls.report.head_card(table_of(m), head).html,
}
"""Calls of the public functions that take one head."""


@functools.cache
def tables():
    return {}


def table_of(model):
    """The head table of a model, made once."""
    if id(model) not in tables():
        tables()[id(model)] = tls.analyze_heads(model, detectors=False, null_draws=2)
    return tables()[id(model)]


def moved(heads):
    """The heads or group with the same numbers one layer later."""
    return [f"L1{name[2:]}" for name in ([heads] if isinstance(heads, str) else heads)]


def assert_equal(found, expected):
    """Two results of a public function are the same, to the bit."""
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
        assert found.attrs.keys() == expected.attrs.keys()
    elif isinstance(expected, Figure):
        told = [[text.get_text() for text in figure.findobj(Text)] for figure in (found, expected)]
        assert told[0] == told[1]
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    else:
        assert torch.equal(found, expected) if torch.is_tensor(expected) else found == expected


FAST = ("ablate", "ablation_sweep, sets", "edge_effects", "hooks.receivers", "plots.ablation_effects",
    "plots.positional_symbolic_plane")  # fmt: skip


@pytest.mark.parametrize("name", [*FAST, *also_slow(*(name for name in CALLS if name not in FAST))])
def test_a_group_is_the_list_of_its_heads(name):
    model = shared("bridge", "llama")
    assert_equal(CALLS[name](model, "L0KV1"), CALLS[name](model, ["L0H2", "L0H3"]))


@pytest.mark.slow
@needs_hooked
@pytest.mark.parametrize("name", ["ablate", "ablation_hooks", "ablation_sweep, sets", "analyze_heads", "edge_effects"])
def test_a_group_of_a_hooked_transformer_is_the_list_of_its_heads(name):
    model = shared("hooked", "llama")
    assert_equal(CALLS[name](model, "L0KV1"), CALLS[name](model, ["L0H2", "L0H3"]))


def test_every_public_function_that_takes_heads_is_among_them():
    rooms = {"": tls} | {
        f"{name}.": getattr(tls, name)
        for name in ("heads", "hooks", "plots", "positional", "report", "tables", "tasks", "history", "spectral_rope")
    }
    take = {
        f"{room}{name}"
        for room, module in rooms.items()
        for name in module.__all__
        if callable(getattr(module, name))
        and {"heads", "head", "highlight", "senders", "receiver"}
        & {*inspect.signature(getattr(module, name)).parameters}
    }
    top = {getattr(tls, name) for name in tls.__all__}
    take = {name for name in take if "." not in name or functools.reduce(getattr, name.split("."), tls) not in top}
    take -= {"history.HeadHistory", "hooks.Wall"}  # results, whose `heads` is a table
    take -= {"spectral_rope.SpectralRoPE"}  # a module of one layer, whose heads are numbers
    if not HAS_HOOKED:
        take -= {"SpectralHookedTransformer"}
    tried = {name.partition(",")[0] for name in CALLS} | ONE_HEAD.keys()
    assert take - tried == set()


@pytest.mark.parametrize(
    "name", ["scores", "k_composition", *also_slow(*sorted(ONE_HEAD.keys() - {"scores", "k_composition"}))]
)
def test_where_one_head_is_needed_a_group_of_one_head_is_that_head(name):
    with pytest.raises(BadHead, match=r"L1KV0 is a key/value group of 2 heads, and here one head .* one of L1H0, L1H1"):
        ONE_HEAD[name](shared("bridge", "llama"), "L1KV0")
    model = shared("bridge", "gptj" if name == "plots.rotary_plane" else "gpt2")
    assert_equal(ONE_HEAD[name](model, "L1KV1"), ONE_HEAD[name](model, "L1H1"))


@pytest.mark.parametrize(
    "given",
    [
        "L0KV1", "0KV1", "l0kv1", " L0KV1 ", "L-2KV-1", np.str_("L0KV1"), ["L0KV1"], ("L0KV1", "L0H2"),
        pd.Series(["L0H3", "L0KV1"], index=[7, 3]), np.array(["L0KV1"]), pl.Series(["L0KV1"]),
        pd.DataFrame({"head": [-1], "layer": [-1], "name": ["L0KV1"]}), {"layer": -1, "head": -1, "name": "L0KV1"},
        pl.DataFrame({"head": [-1, 2], "layer": [-1, 0], "name": ["L0KV1", "L0H2"]}),
        pd.Series({"layer": -1, "head": -1, "name": "L0KV1"}),
    ],
    ids=range(15),
)  # fmt: skip
def test_forms_of_a_group(given):
    assert heads_by_layer(attention_view(shared("bridge", "llama")), given) == {0: [2, 3]}


@pytest.mark.parametrize(
    ("backend", "name", "expected"),
    [
        ("bridge", "gpt2", {1: [1]}),  # no keys are shared
        ("bridge", "falcon", "layer 1 has key/value groups 0 to 0, with 4 query heads each"),  # one group
        ("bridge", "deepseek_v2", "layer 1 has key/value groups 0 to 0, with 4 query heads each"),  # one latent
        pytest.param("hooked", "llama", {1: [2, 3]}, marks=needs_hooked),
    ],
)
def test_the_groups_of_a_layer_are_its_key_receivers(backend, name, expected):
    view = attention_view(shared(backend, name))
    if isinstance(expected, str):
        with pytest.raises(BadHead, match=f"L1KV1 does not exist: {expected}"):
            heads_by_layer(view, "L1KV1")
        assert heads_by_layer(view, ["L1KV0"]) == {1: [0, 1, 2, 3]}
    else:
        assert heads_by_layer(view, "L1KV1") == expected
    if expected == {1: [1]}:
        assert one_head(view, "L1KV-3") == (1, 1)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("L0KV2", "L0KV2 does not exist: layer 0 has key/value groups 0 to 1, with 2 query heads each$"),
        ("L0KV-3", "layer 0 has key/value groups 0 to 1, or -2 to -1 from the end, with 2 query heads each$"),
        ("L2KV0", "L2KV0 does not exist: the model has layers 0 to 1$"),
        ("L0KV", "'L0KV' names no head"),
        ("L0KV1.k", "'L0KV1.k' is a receiver, not a head"),
    ],
)
def test_a_group_that_does_not_exist_is_refused_with_those_that_do(group, said):
    with pytest.raises(BadHead, match=said):
        tls.ablation_hooks(shared("bridge", "llama"), group, "output")


def test_a_group_of_a_checkpoint_that_is_read_layer_by_layer():
    files = SimpleNamespace(n_layers=2, n_heads=lambda layer: 4, heads_per_group=lambda layer: 2)
    assert heads_by_layer(files, ["L1KV1", "L0KV0"]) == {0: [0, 1], 1: [2, 3]}


@pytest.mark.slow
@pytest.mark.tl4
def test_a_group_is_analyzed_from_files(tmp_path):
    save_folder("llama", tmp_path)
    found, expected = (
        tls.analyze_heads(str(tmp_path), heads=heads, detectors=False, null_draws=2)
        for heads in ("L0KV1", ["L0H2", "L0H3"])
    )
    assert_equal(found, expected)
    assert found["name"].tolist() == ["L0H2", "L0H3"]
    for table in (found, tls.k_composition(str(tmp_path)), tls.head_likeness(str(tmp_path), draws=0)):
        assert table.attrs["heads_per_group"] == 2


# --- without a model ---


def test_without_a_model_a_group_is_refused_and_heads_are_asked_for():
    for read in (head_pair, head_pairs, lambda heads: tls.hooks.receivers(heads, "q")):
        with pytest.raises(BadHead, match="'L0KV1' is a key/value group, and here heads are named one by one"):
            read("L0KV1")
    assert tls.hooks.receivers(["L0KV1", (0, 1)], "k") == ["L0KV1.k", "L0H1.k"]


def test_a_table_says_which_heads_a_group_has():
    assert pairs_in_table(["L1H0", "L0KV1"], SWEPT, "the sweep") == [(1, 0), (0, 2), (0, 3)]
    assert pairs_in_table("L-1KV-1", SWEPT, "the sweep") == [(1, 2), (1, 3)]
    uneven = SWEPT.copy()
    uneven.attrs = {"heads_per_group": {"0": 4, "1": 1}}
    assert pairs_in_table(["L0KV0", "L1KV2"], uneven, "it") == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]
    assert pair_in_table("L1KV2", uneven, "it") == (1, 2)
    with pytest.raises(BadHead, match="L0KV0 is a key/value group of 4 heads, and here one head is needed"):
        pair_in_table("L0KV0", uneven, "it")
    older = SWEPT.copy()
    older.attrs = {}
    with pytest.raises(BadHead, match=r"L0KV1 .* attrs of the sweep do not say .*: name its heads, such as L0H0"):
        tls.plots.ablation_effects(older, "L0KV1")
    with pytest.raises(BadHead, match="L0H3 is not in the sweep"):
        tls.plots.ablation_effects(SWEPT[SWEPT["head"] < 3], "L0KV1")


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("gpt2", 1), ("falcon", 4)])
def test_tables_of_a_model_hold_the_size_of_a_group(name, size):
    assert attention_view(shared("bridge", name)).origin()["heads_per_group"] == size
