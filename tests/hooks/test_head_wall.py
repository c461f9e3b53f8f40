"""The wall of heads: its patterns, probabilities and effects are those of plain runs, and it is stored as it is."""

import base64
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks import wall
from tlspectral.hooks.head_wall import first_sentences, removal_seconds
from tlspectral.hooks.measured_wall import LEVELS, wall_of_table
from tlspectral.models.running.text import texts_in_a_row
from tlspectral.tables import read_table, write_table
from tlspectral.tables.progress import without_bars

IDS = torch.tensor([1, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9])
# Grouped keys; learned positions; a softcap and windows; ALiBi, whose layers delegate; a query/key norm.
MODELS = [
    ("bridge", "llama"),
    ("bridge", "gpt2"),
    *(pytest.param("bridge", name, marks=pytest.mark.slow) for name in ("gemma2", "bloom", "qwen3")),
    pytest.param("hooked", "mistral", marks=zoo.needs_hooked),
]
# float32 runs of other batch sizes differ by 1e-6 here; the effect of a wrong head is .01 and more.
CLOSE = 2e-5


def probabilities(model, ids):
    with torch.no_grad():
        return model(ids[None])[0, -1].double().softmax(-1).cpu().numpy()


def names(model):
    return [f"L{layer}H{head}" for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]


@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_patterns_and_probabilities_are_those_of_plain_runs(backend, name):
    model = zoo.shared(backend, name)
    found = wall(model, IDS, control="random")
    removal = found.removal
    assert list(found.heads["name"]) == names(model)
    assert found.why_not == ""
    _, cache = model.run_with_cache(IDS[None])
    patterns = np.concatenate(
        [cache[f"blocks.{layer}.attn.hook_pattern"][0].float().cpu().numpy() for layer in range(model.cfg.n_layers)]
    )
    # A level is 1/255: rounding is half of that.
    np.testing.assert_allclose(found.attention, patterns, atol=0.5 / LEVELS + 1e-6)
    intact = probabilities(model, IDS)
    watched = np.argsort(-intact)[:5]
    np.testing.assert_allclose(removal.intact, intact[watched], atol=CLOSE)
    for index, head in enumerate(names(model)):
        with tls.ablate(model, head, tls.parts.Output("zero")):
            without = probabilities(model, IDS)
        np.testing.assert_allclose(removal.without[index], without[watched], atol=CLOSE, err_msg=head)
        assert removal.top[index][1] == pytest.approx(without.max(), abs=CLOSE)
        assert removal.deltas[index] == pytest.approx(without[watched[0]] - intact[watched[0]], abs=CLOSE)
    assert removal.value == pytest.approx(intact.max(), abs=CLOSE)
    assert removal.effects["delta_se"].isna().all()  # one sentence has no standard error
    assert np.isnan(removal.value_se)


def test_heads_that_share_keys_and_the_control_beside_the_other_heads_of_the_layer():
    model = zoo.shared("bridge", "llama")
    found = wall(model, IDS, control="random")
    assert list(found.heads["kv_head"]) == [0, 0, 1, 1] * 2
    effects = found.removal.effects
    for first in (0, 4):
        deltas = effects["delta"].to_numpy()[first : first + 4]
        for index in range(4):
            others = np.delete(deltas, index)
            row = effects.iloc[first + index]
            assert row["control_delta"] == pytest.approx(others.mean(), abs=1e-12)
            assert row["control_p"] == (1 + (np.abs(others) >= abs(deltas[index])).sum()) / 4
            assert row["control_p_floor"] == 0.25


def test_the_largest_effects_alone_are_compared_unless_all_are_asked_for(monkeypatch):
    monkeypatch.setattr("tlspectral.hooks.head_wall.BESIDE_OTHERS", 3)
    effects = wall(zoo.shared("bridge", "llama"), IDS).removal.effects
    compared = effects["control_p"].notna()
    assert compared.sum() == 3
    assert set(effects.index[compared]) == set(effects["delta"].abs().nlargest(3).index)


def task_of(n, model="llama"):
    lengths = [8 + row % 3 for row in range(n)]
    prompts = [[1, *torch.randint(3, 60, (length,), generator=zoo.generator(row)).tolist()]
               for row, length in enumerate(lengths)]  # fmt: skip
    return tls.logit_difference(prompts, [60 + row for row in range(n)], [20 + row for row in range(n)])


@pytest.mark.parametrize("n", [3, 8])
def test_a_task_of_unequal_prompts_is_measured_as_a_sweep_does(n):
    model, task = zoo.shared("bridge", "llama"), task_of(n)
    found = wall(model, task=task)
    removal, first = found.removal, torch.as_tensor(task.prompts[0])
    sweep = tls.ablation_sweep(model, tls.parts.Output("zero"), task=task)
    np.testing.assert_allclose(removal.deltas, sweep["delta"], atol=CLOSE)
    assert removal.value == pytest.approx(sweep.attrs["intact_value"], abs=CLOSE)
    if n < 8:
        assert removal.effects["delta_se"].isna().all()
    else:
        np.testing.assert_allclose(removal.effects["delta_se"], sweep["delta_se"], atol=CLOSE)
        assert removal.value_se == pytest.approx(sweep.attrs["intact_value_se"], abs=CLOSE)
    # Patterns and probabilities are of the first prompt, which is shorter than others: its filling is not read.
    assert len(found.tokens) == len(first) < max(map(len, task.prompts))
    assert (removal.correct, removal.wrong) == (1, 1)
    whole = probabilities(model, first)
    np.testing.assert_allclose(removal.intact[:2], whole[[60, 20]], atol=CLOSE)
    assert [texts.strip() for texts in removal.watched[:2]] == ["60", "20"]


def test_equal_prompts_of_a_task_are_one_for_standard_errors():
    task = tls.logit_difference([IDS.tolist()] * 8, 60, 20)
    with pytest.warns(UserWarning, match="of 8 prompts 1 are distinct"):
        found = wall(zoo.shared("bridge", "llama"), task=task)
    assert found.removal.effects["delta_se"].isna().all()


def test_a_batch_is_cut_without_a_change(monkeypatch):
    model, task = zoo.shared("bridge", "llama"), task_of(3)
    before = wall(model, task=task).removal
    for rows in (1, 2, 4):
        monkeypatch.setattr("tlspectral.tasks.task_sequences.rows_at_once", lambda _, rows=rows: rows)
        cut = wall(model, task=task).removal
        np.testing.assert_allclose(cut.without, before.without, atol=CLOSE)
        np.testing.assert_allclose(cut.deltas, before.deltas, atol=CLOSE)


@pytest.mark.parametrize("removal", [True, False])
def test_a_table_keeps_the_wall(removal, tmp_path):
    found = wall(zoo.shared("bridge", "llama"), IDS, removal=removal)
    write_table(found.table(), tmp_path / "wall.parquet")
    back = wall_of_table(read_table(tmp_path / "wall.parquet"))
    assert (back.tokens, back.special, back.causal, back.why_not) == (
        found.tokens, found.special, found.causal, found.why_not)  # fmt: skip
    np.testing.assert_array_equal(back.levels, found.levels)
    pd.testing.assert_frame_equal(back.heads, found.heads, check_dtype=False)
    assert back.origin == found.origin
    if removal:
        pd.testing.assert_frame_equal(back.removal.effects, found.removal.effects)
        np.testing.assert_array_equal(back.removal.without, found.removal.without)
        assert (back.removal.top, back.removal.watched) == (found.removal.top, found.removal.watched)
        assert (back.removal.measure, back.removal.value) == (found.removal.measure, found.removal.value)
    else:
        assert back.removal is None
        assert "was left out" in back.why_not
    kept = base64.b64decode(found.pattern_text(5))
    assert len(kept) == len(IDS) * (len(IDS) + 1) // 2
    assert kept[-1] == found.levels[5, -1, -1]


def test_an_encoder_has_patterns_of_both_sides_and_no_next_token(tmp_path):
    found = wall(zoo.shared("bridge", "bert"), IDS)
    assert not found.causal
    assert found.removal is None
    assert "an encoder predicts no next token" in found.why_not
    np.testing.assert_allclose(found.attention.sum(-1), 1.0, atol=len(IDS) * 0.5 / LEVELS)
    assert np.triu(found.attention[0], 1).max() > 0.1
    write_table(found.table(), tmp_path / "wall.parquet")
    np.testing.assert_array_equal(wall_of_table(read_table(tmp_path / "wall.parquet")).levels, found.levels)
    with pytest.raises(UnsupportedArchitecture, match="predicts no next token"):
        wall(zoo.shared("bridge", "bert"), task=tls.logit_difference([IDS.tolist()], 60, 20))


def test_a_second_sink_is_the_key_that_all_later_queries_share(monkeypatch):
    """Known answer: attention of a made-up layer, 12 heads, whose key 3 takes .4 of every later query."""
    import tlspectral.hooks.head_wall as module

    n = 16
    even = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    drawn = even.copy()
    drawn[4:] *= 0.6
    drawn[4:, 3] += 0.4
    levels = np.rint(np.stack([even, even, drawn, drawn]) * LEVELS).astype(np.uint8)
    found = module._second_sinks(levels, [0, 0, 1, 1], causal=True)
    assert found[0][0] == -1
    assert found[1][0] == 3
    assert found[1][1] == pytest.approx(drawn[4:, 3].mean(), abs=1 / LEVELS)
    assert module._second_sinks(levels[:, :2, :2], [0, 0, 1, 1], causal=True)[1][0] == -1


def test_the_model_is_the_same_afterwards_and_hooks_of_the_user_stay_in_force():
    model = zoo.bridge("llama")
    before = probabilities(model, IDS)

    def double(z, hook):
        return 2 * z

    model.add_hook("blocks.0.attn.hook_z", double)
    with pytest.warns(UserWarning, match="hook"):
        hooked = wall(model, IDS)
    np.testing.assert_allclose(hooked.removal.intact.max(), probabilities(model, IDS).max(), atol=CLOSE)
    model.reset_hooks()
    np.testing.assert_array_equal(probabilities(model, IDS), before)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": IDS, "task": task_of(2)}, "both given: give one"),
        ({"prompt": torch.stack([IDS, IDS])}, "a wall shows one sentence"),
        ({"prompt": IDS[:1]}, "has 1 token: give a sentence of 2 to 128 tokens"),
        ({"prompt": torch.ones(200, dtype=torch.long)}, "200"),
        ({"task": tls.Task([IDS.tolist()], lambda logits, tokens, mask: logits[:, 0, 0], predict=0)}, "predict=-1"),
        ({"task": tls.Task([IDS.tolist()], lambda logits, tokens, mask: logits[:, 0, 0])}, "reads 13 positions"),
        ({"prompt": IDS, "control": "all"}, "control must be None or 'random'"),
        ({"prompt": "text"}, "no tokenizer"),
    ],
)
def test_what_is_no_sentence_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        wall(zoo.shared("bridge", "llama"), **given)


def test_without_a_sentence_a_model_gets_what_it_can_read(tmp_path):
    model = zoo.shared("bridge", "llama")
    (ids,) = first_sentences(model)
    assert ids[1:9].tolist() == ids[9:].tolist()
    assert wall(model, removal=False).sentence == " ".join(map(str, ids.tolist()))
    words = tls.load_model(zoo.save_folder("llama", tmp_path, tokenizer=True))
    assert len(first_sentences(words)) == 1
    with without_bars():
        found = wall(words, "w3 w4 w5 w3 w4")
    assert found.special[0]
    assert found.sentence == "w3 w4 w5 w3 w4"


def test_the_cost_is_counted_from_one_measured_layer(monkeypatch):
    """A clock that ticks once a call: the first layer of two costs 1 tick, the second half of it."""
    ticks = iter(range(100))
    monkeypatch.setattr("tlspectral.hooks.head_wall.time.process_time", lambda: float(next(ticks)))
    assert removal_seconds(zoo.shared("bridge", "llama"), IDS) == 1.5


def test_letters_that_are_split_over_tokens_are_boxes_until_they_are_whole():
    raw = Tokenizer(models.BPE({letter: at for at, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    text = 'a "\N{SLIGHTLY SMILING FACE}"\n<b>\N{HEBREW LETTER ALEF}'
    ids = tokenizer(text)["input_ids"]
    found = texts_in_a_row(SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer)), ids)
    assert len(found) == len(ids)
    box = "\N{WHITE RECTANGLE}"
    assert "".join(found).replace(box, "") == text
    assert found[3:7] == [box, box, box, "\N{SLIGHTLY SMILING FACE}"]
