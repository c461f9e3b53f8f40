"""The dictionary has an entry for every column of every table that is made here, and for no other."""

from dataclasses import replace

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import zoo
from typer.testing import CliRunner
from zoo_words import reader

import tlspectral as tls
import tlspectral.cli.positional as positional_command
from tlspectral import positional, stats
from tlspectral.cli import app
from tlspectral.detectors import repeated_sequences
from tlspectral.heads import statistic_noise, weight_noise_draws
from tlspectral.heads.model_statistics import another_model
from tlspectral.heads.placebos import permuted_pairing, pseudo_rope
from tlspectral.models.attention import attention_view
from tlspectral.positional import BlockPrompt
from tlspectral.studies.bifocal import code_adaptation
from tlspectral.studies.bifocal.experiments import LANGUAGE_EXPERIMENTS, QUICK_FREQUENCY, run_experiment
from tlspectral.studies.bifocal.formal_languages import Dyck3
from tlspectral.studies.bifocal.language_runs import LanguageRun, train_on_language
from tlspectral.studies.bifocal.schedule import LanguagePlan, LanguageSchedule
from tlspectral.studies.common import RandomMapTask, TrainingSettings, TransformerConfig, train
from tlspectral.studies.common.checkpoints import training_checkpoints
from tlspectral.studies.common.run_folder import open_run_folder
from tlspectral.studies.fingerprint import replication
from tlspectral.studies.fingerprint.constrained import Preset, constrained_grid, symmetric_penalty
from tlspectral.studies.fingerprint.history_questions import eventual_head_rank
from tlspectral.studies.fingerprint.replication import exact_heads, matched_null
from tlspectral.studies.fingerprint.replication import table as replication_table
from tlspectral.studies.positional_symbolic.canonical import (
    CanonicalRun,
    CanonicalSchedule,
    accuracy_by_position,
    canonical_sweep,
    query_key_trajectories,
    train_canonical,
)
from tlspectral.studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral.tables import COLUMNS, TABLES, describe_columns, describe_table, published, read_table, write_table
from tlspectral.tables.columns.ablation import ABLATION_TABLES
from tlspectral.tables.columns.binding import BINDING_TABLES
from tlspectral.tables.columns.canonical import CANONICAL_TABLES
from tlspectral.tables.columns.code import CODE_TABLES
from tlspectral.tables.columns.constrained import CONSTRAINED_TABLES
from tlspectral.tables.columns.headline import HEADLINE_TABLES
from tlspectral.tables.columns.history import HISTORY_TABLES
from tlspectral.tables.columns.model import MODEL_TABLES
from tlspectral.tables.columns.replication import REPLICATION_TABLES
from tlspectral.tables.columns.spectral import SPECTRAL_TABLES
from tlspectral.tables.columns.statistics import STATISTICS_TABLES

FIRST = ("analyze_heads", "frequency_table", "positional_symbolic")
QUIET = {"show_progress": False}
SHORT = CanonicalSchedule(steps=2, batch_size=8, warmup_steps=1, validation_samples=64, log_every=1)
TINY = TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16)
STEPS = TrainingSettings(steps=4, batch_size=4, warmup_steps=2, evaluate_every=2, evaluation_sequences=8)


def assert_documented(found: dict[str, list[pd.DataFrame]], names: list[str]) -> None:
    """The tables of a family have the columns of their entries, in that order, and no entry is of a column of none."""
    assert sorted(found) == sorted(names)
    for name, tables in found.items():
        documented = [column.name for column in TABLES[name].columns]
        assert {column for table in tables for column in table} == set(documented), name
        flags = [column.name for column in TABLES[name].columns if column.unit == "flag"]
        for table in tables:
            if not name.startswith("published"):  # released in the order of whoever wrote them
                assert list(table) == [column for column in documented if column in table], name
            for column in flags:
                assert column not in table or table[column].dtype in ("bool", "boolean"), (name, column)


def names(tables):
    return [table.name for table in tables]


@pytest.fixture(scope="module")
def model():
    return tls.load_model("tiny-rope")


@pytest.fixture(scope="module")
def heads(model):
    return tls.analyze_heads(model, null_draws=2, extras=("score_asym",), **QUIET)


@pytest.fixture(scope="module")
def command_folder(tmp_path_factory):
    """What `tlspectral positional` writes, without its figures."""
    folder = tmp_path_factory.mktemp("positional")
    table = tls.analyze_heads(reader(), null_draws=2, detectors=False, **QUIET)
    write_table(table.assign(prev=table.index / len(table)), folder / "heads.parquet")
    options = ["--pairs", "5", "--blocks", "4", "--queries", "2", "--mode", "key", "--bands", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls, "load_model", lambda name: reader(), raising=False)
        patch.setattr(positional_command, "_write_figures", lambda *_: None)
        done = CliRunner().invoke(
            app,
            ["positional", "any", *options, "--table", str(folder / "heads.parquet"), "-o", str(folder / "out")],
        )
    assert done.exit_code == 0, done.output
    return folder / "out"


def block_prompt():
    tokens = zoo.prompt(batch=1, length=zoo.PROMPT_LENGTH)[0]
    prefix, *blocks, suffix = tokens.split([2, 4, 3, 5, 4, 3, 3])
    return BlockPrompt(prefix, blocks, suffix)


# --- the dictionary itself ---


def test_every_table_belongs_to_a_family_that_is_made_below():
    families = (
        MODEL_TABLES, ABLATION_TABLES, BINDING_TABLES, STATISTICS_TABLES, REPLICATION_TABLES, HISTORY_TABLES,
        CANONICAL_TABLES, CONSTRAINED_TABLES, HEADLINE_TABLES, SPECTRAL_TABLES, CODE_TABLES,
    )  # fmt: skip
    assert list(TABLES) == [*FIRST, *(table.name for family in families for table in family)]  # none twice either


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_says_what_it_is_and_what_it_does_not_establish(name):
    described = describe_table(name)
    assert described["name"].is_unique
    assert list(described) == list(describe_columns())
    assert TABLES[name].made_by.count("`") >= 2
    for column in TABLES[name].columns:
        for field in ("meaning", "unit", "range", "source", "does_not_establish"):
            text = getattr(column, field)
            assert text, (column.name, field)
            assert text == text.strip()
            assert "  " not in text, f"{column.name}.{field}: a seam between two strings"
            assert ".." not in text.replace(" .. ", "").replace("...", ""), (column.name, field)
        assert column.meaning.endswith("."), column.name
        assert column.does_not_establish.endswith("."), column.name


def test_a_name_has_the_meaning_of_its_table():
    def meaning(table, column):
        return describe_table(table).set_index("name").loc[column, "meaning"]

    assert meaning("analyze_heads", "rank") == COLUMNS["rank"].meaning
    assert "singular values" in meaning("analyze_heads", "rank")
    assert "among all heads of all earlier layers" in meaning("k_composition", "rank")
    assert "among all tokens" in meaning("positional_symbolic_profile.answers", "rank")
    assert "before the softmax" in meaning("relative_position_kernel", "score")
    assert meaning("band_effects", "delta") != meaning("ablation_sweep", "delta")


def test_a_file_carries_the_meanings_of_its_own_table(tmp_path):
    """`rank` is a place among heads in one table and a matrix's rank in another."""
    ranked = pd.DataFrame({"layer": [0], "head": [1], "score": [0.5], "chance": [0.1], "rank": [1]})
    joined = ranked.rename(columns={"rank": "place"}).assign(rank=4, D_head=0.5, dir_frac=0.7, own=1.0)
    for table, name in ((ranked, "k_composition"), (joined, "analyze_heads")):
        write_table(table, tmp_path / "table.parquet")
        (entry,) = (column for column in TABLES[name].columns if column.name == "rank")
        stored = pq.read_schema(tmp_path / "table.parquet").field("rank").metadata
        assert stored[b"meaning"].decode() == entry.meaning
    assert not pq.read_schema(tmp_path / "table.parquet").field("own").metadata


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match="there is no table 'heads'; there are analyze_heads, frequency_table, "):
        describe_table("heads")


# --- tables of one model ---


def test_the_first_tables(model, heads):
    with_position = tls.analyze_heads(
        tls.load_model("tiny-ape"), null_draws=2, detectors=False, extras=("position_share",), **QUIET
    )
    scores = [
        tls.positional_symbolic(zoo.bridge("llama"), block_prompt(), per_frequency=each, **QUIET)
        for each in (False, True)
    ]
    found = {
        "analyze_heads": [heads, with_position],
        "frequency_table": [tls.frequency_table(model)],
        "positional_symbolic": scores,
    }
    assert_documented(found, list(FIRST))


def test_tables_of_a_model(model, heads):
    noise = tls.weight_noise_band(model, draws=2)
    draws = weight_noise_draws(model, draws=2)
    found = {
        "detect_heads": [tls.detect_heads(model, n_sequences=2)],
        "copying_scores": [tls.copying_scores(model)],
        "relative_position_kernel": [tls.relative_position_kernel(zoo.bridge("llama"), [(1, 0)])],
        "k_composition": [tls.k_composition(model, (1, 0))],
        "weight_noise_band": [noise],
        "weight_noise_draws": [draws],
        "statistic_noise": [statistic_noise(heads, draws, {"largest": lambda table: table["D_head"].max()})],
        "compare_heads": [tls.compare_heads(heads, heads), tls.compare_heads(heads, heads, noise_b=noise)],
        "permuted_pairing": [
            permuted_pairing(model, draws=2),
            pseudo_rope(tls.load_model("tiny-ape")),
        ],
    }
    assert_documented(found, names(MODEL_TABLES))


def test_tables_of_ablations(model, heads, command_folder):
    tokens = repeated_sequences(attention_view(model), 2, 5)
    sweep = tls.ablation_sweep(model, "rope_phase", tokens=tokens, control="random", **QUIET)
    screened = tls.ablation_sweep(model, "rope_phase", tokens=tokens, screen="gradient", **QUIET)
    found = {
        "ablation_sweep": [sweep, screened],
        "summarize_sweep": [tls.summarize_sweep(sweep, heads)],
        "band_effects": [
            tls.band_effects(model, [(1, 0)], tokens=tokens, draws=1, **QUIET),
            read_table(command_folder / "bands.parquet"),
        ],
    }
    assert_documented(found, names(ABLATION_TABLES))


def test_tables_around_positional_scores(command_folder):
    profile = ("heads", "queries", "frequencies", "answers", "median_tests", "correlation")
    found = {
        f"positional_symbolic_profile.{name}": [read_table(command_folder / f"{name}_key.parquet")] for name in profile
    }
    found["score_agreement"] = [read_table(command_folder / "agreement_key.parquet")]
    found["frequency_agreement"] = [read_table(command_folder / "frequency_agreement_key.parquet")]
    llama, prompt = zoo.bridge("llama"), block_prompt()
    found["attention_traces"] = [
        positional.attention_traces(llama, prompt, [(0, 1)], swaps=[(1, 3)], frequencies=[0], mode="key")
    ]
    found["frequency_norms"] = [positional.frequency_norms(llama, prompt, [(0, 1)])]
    assert_documented(found, names(BINDING_TABLES))


# --- tables of head tables ---


def test_tables_of_statistics():
    tables = {name: published.published_heads(name) for name in ("gpt2", "opt-1.3b", "pythia-410m", "pythia-1.4b")}
    groups = {name: name.startswith("pythia") for name in tables}
    found = {
        "spearman_table": [stats.spearman_table(tables["gpt2"], ["D_head"], ["prev"])],
        "triage": [stats.triage(tables["pythia-410m"])],
        "leave_one_model_out": [
            stats.leave_one_model_out(dict(zip(tables, (1.0, 2.0, 3.0, 4.0), strict=True)), groups)
        ],
        "top_k_sensitivity": [stats.top_k_sensitivity(tables, groups, ks=(1,))],
    }
    assert_documented(found, names(STATISTICS_TABLES))


def test_tables_around_published_numbers(monkeypatch):
    tables = {name: published.published_heads(name) for name in published.PUBLISHED_HEADS}
    contrast = replication.scheme_contrast({name: tables[name] for name in ("gpt2", "pythia-410m")})
    monkeypatch.setattr(
        replication_table, "RECOMPUTED", (matched_null.numbers_of_heads, exact_heads.printed_constructions)
    )
    grid = pd.DataFrame({"arm": ["ape_free"], "seed": [0], "formed_loss": [100.0], "formed_both": [125.0]})
    constrained = published.published_constrained()
    found = {
        "another_model": [another_model(tables["pythia-410m"], bootstrap_draws=5)],
        "replicate": [replication.replicate()],
        "scheme_contrast.models": [contrast.models],
        "scheme_contrast.heads": [contrast.heads],
        "ioi_classes": [replication.ioi_classes()],
        "side_by_side": [replication.side_by_side(grid)],
        "published_heads": list(tables.values()),
        "published_checkpoints": [published.published_checkpoints(name) for name in published.PUBLISHED_CHECKPOINTS],
        "published_kernels": [published.published_kernels()],
        "published_constrained.evaluations": [constrained.evaluations],
        "published_constrained.heads": [constrained.heads],
        "published_constrained.kernels": [constrained.kernels],
    }
    assert_documented(found, names(REPLICATION_TABLES))


# --- tables of training ---


def test_tables_of_histories():
    task = RandomMapTask(vocabulary=8, length=16)
    run = train(TINY, task, STEPS, keep_steps=(0, 4))
    history = tls.head_history(training_checkpoints(run), pairs=[((0, 1), (1, 0))], null_draws=2, **QUIET)
    found = {f"head_history.{name}": [getattr(history, name)] for name in ("heads", "summary", "composition")}
    found["eventual_head_rank"] = [eventual_head_rank(history.track(), percentiles=("prev_pct",))]
    assert_documented(found, names(HISTORY_TABLES))


def test_tables_of_small_models():
    task = CanonicalTask("index", length=6, n_symbols=3, n_integers=4)
    sweep = canonical_sweep(("partial_induction",), preset=SHORT, angles=(0.0, 1.0), seeds=1, **QUIET)
    trained = train_canonical(task, [CanonicalRun((0.1,))], SHORT)
    random_map = train(
        TINY, RandomMapTask(vocabulary=8, length=16), STEPS, penalty=symmetric_penalty, penalty_weight=1.0
    )
    found = {
        "canonical_sweep.accuracy": [sweep.accuracy],
        "canonical_sweep.by_position": [sweep.by_position],
        "query_key_trajectories": [query_key_trajectories((1.0,), preset=SHORT, **QUIET)],
        "train_canonical.history": [trained.history],
        "train_canonical.frequencies": [trained.frequencies],
        "accuracy_by_position": [accuracy_by_position(trained.model, validation_prompts(task, SHORT))],
        "train.history": [random_map.history],
    }
    assert_documented(found, names(CANONICAL_TABLES))


def test_tables_of_constrained_training(tmp_path):
    preset = Preset("tiny", TINY, RandomMapTask(vocabulary=8, length=16), STEPS, stop_after=None)
    tables = constrained_grid(tmp_path, preset, arms=("ape_free", "rope_free"), seeds=2, **QUIET)
    assert_documented(
        {f"constrained_grid.{name}": [table] for name, table in tables.items()}, names(CONSTRAINED_TABLES)
    )


def written_by(paths):
    return {f"experiments.{path.stem}": [read_table(path)] for path in paths}


def test_tables_of_the_headline_experiment(tmp_path):
    paths = run_experiment("learned-frequency", tmp_path, heads=replace(QUICK_FREQUENCY, steps=2, validation_samples=8))
    assert_documented(written_by(paths), names(HEADLINE_TABLES))


def test_tables_of_the_formal_languages(tmp_path):
    language = Dyck3((3, 4))
    plan = LanguagePlan(language, 2, 2, tuple(Dyck3((depth, depth)) for depth in (3, 5)), 2, 2)
    schedule = LanguageSchedule((plan,), steps=2, rates=(1e-3,), seeds=(0,), warmup_steps=1, log_every=2)
    run = train_on_language(LanguageRun("dyck3", "omega", 1e-3, 0), schedule)
    found = {"evolve.losses": [run["losses"]], "evolve.trajectory": [run["trajectory"]]}
    for experiment in LANGUAGE_EXPERIMENTS:
        found |= written_by(run_experiment(experiment, tmp_path, languages=schedule))
    assert_documented(found, names(SPECTRAL_TABLES))


class Letters:
    """A tokenizer of 32 tokens."""

    bos_token_id = 1

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": [ord(letter) % 32 for letter in text]})()


def test_tables_of_the_experiment_on_code(model, tmp_path, monkeypatch):
    package = tmp_path / "toy_code_package"
    package.mkdir()
    for number in range(40):
        package.joinpath(f"module{number}.py").write_text(f"value{number} = {number}\n" * 5)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(model, "tokenizer", Letters(), raising=False)
    schedule = replace(code_adaptation.QUICK_CODE, package=package.name)
    folder = open_run_folder(tmp_path / "runs", schedule.settings(), command="")
    with torch.random.fork_rng():
        tables = code_adaptation.code_experiment(folder, schedule, load=lambda _: model)
    assert_documented({f"experiments.{name}": [table] for name, table in tables.items()}, names(CODE_TABLES))
