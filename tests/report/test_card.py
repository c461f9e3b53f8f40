"""One card per head: its sections hold the numbers of the tables, absent where not measured; texts stay texts."""

import functools
import re

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from made_up_heads import INK, Structure, kernels
from made_up_heads import heads as made_up_heads

import tlspectral as tls
from tlspectral.errors import BadHead
from tlspectral.models.attention import prompt_patterns as room
from tlspectral.report.card import NULL_DRAWS
from tlspectral.report.card_sections import Evidence
from tlspectral.report.drawings import attention_drawing, eigenvalue_drawing, phase_drawing
from tlspectral.tables.printed import short_number


@functools.cache
def model():
    return tls.load_model("tiny-rope")


@functools.cache
def heads():
    return tls.analyze_heads(model(), null_draws=20)


@functools.cache
def composition():
    return tls.k_composition(model(), "L1H0")


@functools.cache
def edges():
    return tls.edge_effects(model(), "L1H0.k")


def sweep_of(**columns):
    return pd.DataFrame({"layer": 1, "head": 0, "part": ["output", "rope_phase"], "delta": [0.3, 0.9], **columns})


def section(card, title):
    (found,) = [one for one in card.sections if one.title == title]
    return found


def titles(card):
    return [one.title for one in card.sections]


def test_a_card_of_the_row_alone_shows_the_row_and_nothing_else():
    card = tls.report.head_card(heads(), "L1H0")
    assert titles(card) == ["Row"]
    row = heads().set_index("name").loc["L1H0"]
    metric = f"rotational share (D_head) {row['D_head']:.3f} {row['D_head_null_mean']:.3f} {row['D_head_null_std']:.3f}"
    assert metric in Structure(card.html).text()
    assert metric in " ".join(repr(card).split())
    bare = tls.report.head_card(made_up_heads()[["layer", "head", "dir_frac"]].assign(prev=np.nan), (0, 1))
    assert "prev" not in repr(bare)  # not measured: absent
    assert repr(bare).split()[:1] == ["L0H1"]


@pytest.mark.slow
def test_every_table_given_is_a_section_and_no_other():
    given = {
        "pairs": tls.top_pairs(model(), "L1", torch.randint(0, 32, (3, 20), generator=zoo.generator()), n=3),
        "kernels": tls.relative_position_kernel(model()),
        "prediction": tls.heads.kernel_prediction(model()),
        "sweep": [tls.ablation_sweep(model(), part) for part in ("rope_phase", "output")],
        "edges": edges(),
        "directions": tls.head_directions(model(), "L1H0", "qk", n_words=3),
    }
    card = tls.report.head_card(heads(), "L1H0", **given, composition=composition())
    assert titles(card) == ["Where on text", "By distance", "Prediction by distance", "Ablation", "Edges in",
                            "Directions in words", "K-composition", "Row"]  # fmt: skip
    for sweep in given["sweep"]:
        row = sweep.set_index(["layer", "head"]).loc[1, 0]
        assert re.search(rf"{row['part']}\s+induction\s+{short_number(row['delta'])}", section(card, "Ablation").text)
    assert re.search(r"delta_p\s+delta_p_floor", section(card, "Ablation").text)
    strongest = edges().loc[edges()["delta"].abs().idxmax()]
    assert section(card, "Edges in").text.splitlines()[1].split()[0] == strongest["sender"]
    assert section(card, "K-composition").text.splitlines()[1].split()[0] == "L0H3"
    of_all = tls.report.head_card(heads(), "L1H0", composition=tls.k_composition(model()))
    assert section(of_all, "K-composition").text == section(card, "K-composition").text
    assert "predicted" in section(card, "By distance").body
    assert (
        section(tls.report.head_card(heads(), "L0H3", edges=edges()), "Edges out")
        .text.splitlines()[1]
        .split()[0]
        .startswith("L1H0")
    )
    Structure(card.html)  # well formed
    words, found = given["directions"], section(card, "Directions in words")
    read = words[words["token"].notna()].groupby(["direction", "side"]).ngroups
    assert f"{read} of {words.groupby(['direction', 'side']).ngroups} sides" in found.note
    assert len(found.text.splitlines()) == read + 1  # a direction without words is counted and not listed
    unread = words[words["token"].isna()]
    none = section(tls.report.head_card(heads(), "L1H0", directions=unread), "Directions in words")
    assert (none.text, none.body) == ("no reading", "")
    evidence = Evidence(made_up_heads(), {"kernels": kernels((0, 1)), "sweep": None})
    assert [one.title for one in evidence.sections((0, 1))] == ["By distance"]
    assert evidence.sections((0, 0)) == []


def test_rows_of_sets_are_left_out_of_a_card():
    of_sets = sweep_of(layer=-1, head=-1)
    card = tls.report.head_card(made_up_heads(), (0, 1), sweep=[sweep_of(layer=0, head=1), of_sets])
    assert section(card, "Ablation").text.count("rope_phase") == 1
    assert titles(tls.report.head_card(made_up_heads(), (0, 1), sweep=of_sets)) == ["Row"]


def made_up_pairs():
    rows = [
        ("top", 0.96, 5, 2, " cat", "the", "start", "<s> of[the] big< cat> sat"),
        ("high", 0.31, 4, 4, "[x", "[x", "self", "a[<[x>] b"),
    ]
    names = ["interval", "attention", "query", "key", "query_token", "key_token", "kind", "context"]
    return pd.DataFrame(rows, columns=names).assign(layer=0, head=1)


def test_the_text_where_a_head_attends_stands_first_and_is_shaded():
    table = made_up_pairs()
    card = tls.report.head_card(made_up_heads(), (0, 1), pairs=table, sweep=sweep_of(layer=0, head=1))
    found = card.sections[0]
    assert found.title == "Where on text"
    assert '&lt;s&gt; of<mark class="shade9">the</mark> big<u> cat</u> sat' in found.body
    assert 'a<mark class="shade3"><u>[x</u></mark> b' in found.body
    assert [line.split()[:3] for line in found.text.splitlines()[1:]] == [
        ["top", "0.960", "start"],
        ["high", "0.310", "self"],
    ]
    assert "The first token of a prompt is left out." in found.note
    table.attrs["sink"] = True
    assert "left out" not in tls.report.head_card(made_up_heads(), (0, 1), pairs=table).sections[0].note
    del table.attrs["sink"]
    table.attrs["sinks"] = {"least": 0.15}
    note = tls.report.head_card(made_up_heads(), (0, 1), pairs=table).sections[0].note
    assert "Attention sinks of the layer are left out." in note
    assert "first token" not in note
    table.attrs |= {"n_sequences": 12, "n_distinct": 2}
    note = tls.report.head_card(made_up_heads(), (0, 1), pairs=table).sections[0].note
    assert "2 of 12 prompts are distinct; equal ones count once." in note
    page = tls.report.report(made_up_heads(), pairs=table)
    assert "Where on text" in page
    for shade in range(10):
        assert f".shade{shade} {{" in page
    with_model = tls.report.head_card(heads(), "L0H1", pairs=table, model=model())
    assert titles(with_model)[:2] == ["Where on text", "Eigenvalues"]


def test_the_model_adds_eigenvalues_over_their_null_phase_and_attention():
    prompt = torch.tensor([1, 5, 9, 5])
    card = tls.report.head_card(heads(), "L1H0", model=model(), prompt=prompt)
    assert titles(card) == ["Eigenvalues", "Phase by frequency", "Attention on the prompt", "Row"]
    body = section(card, "Eigenvalues").body
    values = tls.qk_operators(model())[1, 0].spectrum().eigenvalues
    assert body.count("<circle") == len(values) == 16
    cloud = re.search(r'class="cloud" d="([^"]*)"', body)
    assert cloud is not None
    assert cloud[1].count("M") == 16 * NULL_DRAWS
    ratio = float(values.imag.abs().sum() / values.abs().sum())
    text = section(card, "Eigenvalues").text
    assert f"rotational share (D_head) sum |Im λ| / sum |λ| {ratio:.3f}, of {NULL_DRAWS} null draws " in text
    of_draws = float(re.search(r"null draws ([.\d]+);", text)[1])
    # Means of 30 and of 20 draws of one null, whose sd is 0.08: each is within 0.03 of it. The head itself has less.
    assert of_draws == pytest.approx(heads().set_index("name").loc["L1H0", "D_head_null_mean"], abs=0.06)
    assert "%" not in text  # a share of eigenvalues beside D_head would be read as D_head
    assert section(card, "Phase by frequency").body.count('class="im"') == 8
    weights = model().run_with_cache(prompt[None])[1]["blocks.1.attn.hook_pattern"][0, 0]
    found = section(card, "Attention on the prompt")
    assert f"5 (1) looks at 1 (0): {weights[1, 0]:.3f}" in found.body
    assert len(found.text.splitlines()) == 4
    assert not any(point.fwd_hooks for point in model().hook_dict.values())
    few = heads()[lambda table: table["layer"] == 1].assign(D_head=np.nan)
    few.attrs = heads().attrs
    rounding = tls.report.head_card(few, "L1H0", model=model())  # a table of some layers is enough
    assert titles(rounding) == ["Eigenvalues", "Phase by frequency", "Row"]
    assert "D_head" not in section(rounding, "Eigenvalues").text


def test_drawings_stand_where_the_numbers_are():
    values = np.array([1 + 0j, 0.5 - 0.5j])
    places = np.array(
        re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', eigenvalue_drawing(values, -values, "x")), float
    )
    middle, step = 130, 130 / 1.05
    # One decimal of a pixel is written.
    np.testing.assert_allclose(places, [[middle + step, middle], [middle + step / 2, middle + step / 2]], atol=0.051)
    rows = [{"frequency": t, "wavelength": 6.0 * (t + 1), "re_norm": 1.0, "im_norm": float(t)} for t in range(4)]
    heights = [float(one) for one in re.findall(r'class="im".*?height="([\d.]+)"', phase_drawing(rows, "x"))]
    np.testing.assert_allclose(heights, [86 * t / 4 for t in range(4)], atol=0.051)
    drawn = attention_drawing(np.array([[1.0, 0.0], [0.25, 0.75]]), [" a", "\n"], "x")
    assert re.findall(r'fill-opacity="([\d.]+)"', drawn) == ["1.000", "0.250", "0.750"]
    assert "\N{OPEN BOX}a (0)" in drawn


def hostile():
    words = pd.DataFrame([{"layer": 0, "head": 1, "kind": INK, "direction": 1, "share": 0.5, "side": INK, "token": 3,
                           "qvalue": 0.01, "word": INK, "loading": 1.0}])  # fmt: skip
    sweep = pd.DataFrame([{"layer": 0, "head": 1, "part": INK, "delta": 1.0}])
    sweep.attrs["task"] = INK
    edge = pd.DataFrame([{"layer": 0, "head": 0, "sender": INK, "receiver": INK, "receiver_layer": 0,
                          "receiver_head": 1, "reached": "L0H0, L0H1, L9H0", "attention": np.nan,
                          "delta": 1.0}])  # fmt: skip
    pairs = made_up_pairs().assign(interval=INK, kind=INK, key_token=INK, query_token=INK, context=f"[{INK}]<{INK}>")
    return {"pairs": pairs, "sweep": sweep, "edges": edge, "directions": words}


def test_text_of_tables_and_tokens_stays_text():
    table = made_up_heads()
    table.attrs["model"] = INK
    card = tls.report.head_card(table, (0, 1), **hostile())
    for page in (card.html, tls.report.report(table, **hostile()), card._repr_html_()):
        assert INK not in page
        assert "<b onmouse" not in page
    found = Structure(card.html)
    assert found.text().count(INK) >= 6
    # The card asks for nothing and runs nothing.
    assert "script" not in [tag for tag, _ in found.tags]
    (policy,) = [one["content"] for tag, one in found.tags if tag == "meta" and "http-equiv" in one]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    names = [name for _, attributes in found.tags for name in attributes]
    assert not [name for name in names if name.startswith("on") or name in ("style", "src")]
    drawn = attention_drawing(np.eye(2), [INK, '"><b>'], "x")
    assert INK not in drawn
    assert '"><b>' not in drawn


def test_an_effect_on_a_task_is_on_the_card_of_every_head_that_the_edge_reaches():
    edge = hostile()["edges"]
    evidence = Evidence(made_up_heads(), {"edges": edge})
    assert {pair: len(rows) for pair, rows in evidence.rows("edges").items()} == {(0, 0): 1, (0, 1): 1}
    assert len(evidence.rows("edges_out")[0, 0]) == 1
    assert list(Evidence(made_up_heads(), {"edges": edge.assign(attention=0.5)}).rows("edges")) == [(0, 1)]


def of_other_weights():
    table = sweep_of()
    table.attrs = {**heads().attrs, "weights_by_layer": {"0": "f" * 64}}
    return table


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            lambda: {"sweep": sweep_of(layer=9)},
            ValueError,
            "the sweeps have rows for L9H0, which the table of heads lacks",
        ),
        (lambda: {"sweep": kernels((1, 0))}, ValueError, "no column part, delta: give .* ablation_sweep"),
        (lambda: {"sweep": of_other_weights()}, ValueError, "made from other weights than the sweeps"),
        (lambda: {"composition": tls.k_composition(model(), "L0H0")}, ValueError, "composition has no rows"),
        (lambda: {"composition": composition().assign(receiver="L1H1.k")}, ValueError, "composition has no rows"),
        (lambda: {"composition": composition().assign(layer=3)}, ValueError, "ends with layer 3, but L1H0 reads"),
        (lambda: {"prompt": "a"}, ValueError, "give model= too"),
        (lambda: {"model": model(), "prompt": torch.ones(2, 4, dtype=torch.long)}, ValueError, "found 2 prompts of 4"),
        (
            lambda: {"model": model(), "prompt": torch.ones(7, dtype=torch.long)},
            ValueError,
            "found 1 .* 7 tokens.*up to 6",
        ),
        (lambda: {"model": tls.load_model("tiny-ape")}, ValueError, "other weights|of model tiny-rope"),
        (lambda: {"kernel": kernels((0, 1))}, TypeError, "did you mean 'kernels'"),
        (lambda: {"edges_out": kernels((0, 1))}, TypeError, "did you mean 'edges'"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, given, error, words):
    monkeypatch.setattr(room, "MOST_TOKENS", 6)
    with pytest.raises(error, match=words):
        tls.report.head_card(heads(), "L1H0", **given())


def test_the_report_refuses_tables_as_the_card_does_and_a_head_is_of_the_table():
    with pytest.raises(ValueError, match="made from other weights than the sweeps"):
        tls.report.report(heads(), sweep=[of_other_weights()])
    with pytest.raises(TypeError, match="did you mean 'kernels'"):
        tls.report.report(heads(), kernel=kernels((0, 1)))
    with pytest.raises(BadHead, match="L7H0 is not among the 8 heads of the table"):
        tls.report.head_card(heads(), "L7H0")
