"""`tls.tasks.needle`: prompts, pairs, named positions and answers by plain reading; what is refused."""

import pytest
import torch
import zoo
from zoo import shared

import tlspectral as tls
from tlspectral.tasks import needle_prompts as module
from tlspectral.tasks.needle_prompts import needle


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose tokenizer reads words; all words of the tests are one token."""
    return tls.load_model(zoo.save_folder("llama", tmp_path_factory.mktemp("model"), tokenizer=True))


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """Words of the tiny tokenizer in place of the packaged ones: a fact is `w5 NAME w6`, a question `w7 NAME w6`."""
    packaged = {"names": [f"w{at}" for at in range(60, 80)], "nouns": [f"w{at}" for at in range(80, 95)]}
    monkeypatch.setattr(module, "packaged_words", lambda kind: [*packaged[kind]])
    monkeypatch.setattr(module, "packaged_text", lambda: " ".join(f"w{10 + at % 40}" for at in range(300)))
    monkeypatch.setattr(module, "_FACT", " w5 {name} w6")
    monkeypatch.setattr(module, "_QUESTION", " w7 {name} w6")
    monkeypatch.setattr(module, "_SENTENCE_ENDS", ("w20", "w40"))


def test_a_prompt_is_filler_with_one_fact_and_a_question(model):
    task = needle(model, n_prompts=6, length=30, seed=3)
    text = lambda row: model.tokenizer.convert_ids_to_tokens(row.tolist())  # noqa: E731
    assert task.prompts.shape == (6, 30)
    used = []
    for row, (prompt, pair) in enumerate(zip(task.prompts, task.counterfactual, strict=True)):
        label, tokens = task.labels.iloc[row], text(prompt)
        at = {name: places if isinstance(places, int) else places[row] for name, places in task.positions.items()}
        assert tokens[at["needle"] : at["answer"] + 1] == ["w5", label["name"], "w6", label["answer"]]
        assert tokens[at["question"] :] == ["w7", label["name"], "w6"]
        assert (at["end"], task.attention[row]) == (-1, [29, at["answer"]])
        assert (prompt != pair).nonzero().flatten().tolist() == [at["answer"]]
        assert text(pair)[at["answer"]] == label["other"]
        assert (task.metric.correct[row], task.metric.wrong[row]) == (prompt[at["answer"]], pair[at["answer"]])
        filler = (
            tokens[1 : at["needle"]] + tokens[at["answer"] + 2 : at["question"]]
        )  # the full stop is an unknown word
        book = module.packaged_text()
        assert " ".join(filler) in book + " " + book
        assert at["needle"] == 1 or tokens[at["needle"] - 1] in ("w20", "w40")
        assert label["depth"] == pytest.approx((at["needle"] - 1) / len(filler))
        used += [label["answer"], label["other"], label["name"]]
    assert len(set(used)) == len(used)
    value = tls.evaluate(model, task)
    logits = model(task.prompts)[:, -1]
    rows = torch.arange(6)
    expected = logits[rows, task.metric.correct] - logits[rows, task.metric.wrong]
    assert value.per_sequence == pytest.approx(expected.tolist(), abs=1e-5)  # float32


def test_a_seed_gives_the_same_task_and_halves_share_nothing(model):
    first, again = (needle(model, n_prompts=6, length=30, seed=3) for _ in range(2))
    assert torch.equal(first.prompts, again.prompts)
    assert not torch.equal(first.prompts, needle(model, n_prompts=6, length=30, seed=4).prompts)
    choosing, held = first.split(0.5)
    assert {*choosing.labels["answer"], *choosing.labels["other"]}.isdisjoint([*held.labels["answer"]])
    by_name = tls.qk_attribution(model, held, "L1H1", "end", "answer", top=2)
    assert by_name.attrs["key"] == held.positions["answer"]
    assert by_name.equals(tls.qk_attribution(model, held, "L1H1", top=2))


def test_what_cannot_be_written_is_refused(model, monkeypatch):
    with pytest.raises(ValueError, match="no tokenizer"):
        needle(shared("bridge", "llama"))
    with pytest.raises(ValueError, match="leaves 0 tokens for filler: give a length of"):
        needle(model, length=8)
    with pytest.raises(ValueError, match="exceeds the model's context"):
        needle(model, length=100_000)
    with pytest.raises(ValueError, match="n_prompts"):
        needle(model, n_prompts=1)
    monkeypatch.setattr(module, "packaged_words", lambda kind: ["w60"] if kind == "names" else ["no", "such"])
    with pytest.raises(ValueError, match="nouns are one token here"):
        needle(model)
