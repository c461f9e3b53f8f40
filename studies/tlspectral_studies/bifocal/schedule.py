"""Schedule of the experiments on formal languages, fixed before any run: sizes, seeds, rates; and a smoke preset.

BA gives 400 steps and no more. Batch sizes are such that the whole takes about an hour of one core. All arms have
the same grid of rates and the same number of tuning runs.
"""

from dataclasses import dataclass

from tlspectral.tables.schema import Column, Schema, columns
from tlspectral_studies.bifocal.formal_languages import BioRotation, Dyck3, FormalLanguage, Modulo7
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS

BIFOCAL = (
    *columns("""
        language        | label                | Nested brackets (dyck3), a motif behind noise (bio_rotation), modulo7.
        arm             | label                | What of the rotary positions is learned: nothing (standard),
                        |                      | frequencies (omega), frequencies, gain and phase (full), the same to
                        |                      | the letter of BA (literal) or in half of the heads (bifocal), gain and
                        |                      | phase alone (placebo); full_noise and full_noise_shared start with BA's
                        |                      | phase noise.
        learning_rate   | per step             | AdamW's rate of the weights; that of the frequencies is a tenth of it.
        loss            | nat per scored token | Mean cross-entropy over the scored tokens of fresh sequences.
        accuracy        | share                | Share of the same tokens that have the largest logit.
        frequency       | index                | Index of the rotary pair.
        omega           | rad/token            | Frequency of the pair as it is applied.
        gain            | ratio                | Factor on the pair's queries, as it is applied.
        phase           | rad                  | Angle added to the pair's queries, or to queries and keys alike.
        mean_abs        | rad                  | Mean absolute phase: BA's mean shift.
        start_abs       | rad                  | Mean absolute phase before training.
        drift           | rad                  | Mean distance of phases from where they started.
        zigzag          | share                | Share of neighbouring increments of the phase over frequency with
                        |                      | opposite signs; independent noise has 2/3. NaN where phases are equal.
        difference_mean | of the mean          | Mean over seeds of the same less that of the reference arm on the same
                        |                      | seed. NaN for that arm itself.
        difference_low  | of the mean          | Lower end of its 95 % t interval.
        difference_high | of the mean          | Upper end of that interval.
    """),
    *RUN_COLUMNS,
)
"""What tables on learnable rotary positions share, for `columns(text, shared)`."""


def describe_tables(experiment: str, tables: dict[str, str], shared: tuple[Column, ...] = ()) -> None:
    """Make the schemas of what an experiment writes, named `experiments.NAME`, from their columns as text."""
    for name, described in tables.items():
        command = f"`tlspectral study learn {experiment} -o FOLDER`"
        Schema(f"experiments.{name}", columns(described, (*shared, *BIFOCAL)), f"{command} writes it as {name}.parquet")


@dataclass(frozen=True)
class LanguagePlan:
    """Numbers of sequences drawn from one language.

    Attributes:
        language: what is trained and held out.
        batch_size: sequences per step.
        held_out: fresh sequences that the trained model is tested on.
        by_size: the same language at one depth or noise length each, seen in training and beyond (the structure gap).
        per_size: fresh sequences of each of those.
        memorised: sequences that the memorisation control sees in every step, in place of fresh ones.
    """

    language: FormalLanguage
    batch_size: int
    held_out: int
    by_size: tuple[FormalLanguage, ...]
    per_size: int
    memorised: int


@dataclass(frozen=True)
class LanguageSchedule:
    """Schedule of all experiments on languages.

    Attributes:
        plans: one per language.
        steps: of every run.
        rates: learning rates that each arm is tuned over.
        tuning_seed: of the tuning runs: weights, training and held-out data of their own.
        seeds: of the runs that are reported.
        warmup_steps: of every run.
        log_every: steps between records of the spectral parameters.
    """

    plans: tuple[LanguagePlan, ...]
    steps: int = 400
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    tuning_seed: int = 100
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    warmup_steps: int = 20
    log_every: int = 10

    def plan(self, language: str) -> LanguagePlan:
        """The plan of a language by its name."""
        return next(plan for plan in self.plans if plan.language.name == language)


FULL = LanguageSchedule(
    plans=(
        LanguagePlan(Dyck3((4, 8)), 16, 512, tuple(Dyck3((depth, depth)) for depth in range(4, 25)), 64, 16),
        LanguagePlan(
            BioRotation((100, 200)),
            8,
            128,
            tuple(BioRotation((n, n)) for n in (100, 125, 150, 175, 200, 201, 225, 250, 275, 300, 350, 400)),
            32,
            8,
        ),
        LanguagePlan(Modulo7(), 64, 2048, (), 0, 64),
    )
)

QUICK = LanguageSchedule(
    plans=(
        LanguagePlan(Dyck3((4, 5)), 4, 8, tuple(Dyck3((depth, depth)) for depth in (4, 8)), 4, 4),
        LanguagePlan(BioRotation((6, 9)), 2, 4, tuple(BioRotation((n, n)) for n in (6, 12)), 2, 2),
        LanguagePlan(Modulo7(), 4, 8, (), 0, 4),
    ),
    steps=3,
    rates=(1e-3, 3e-3),
    seeds=(0, 1),
    warmup_steps=1,
    log_every=2,
)


@dataclass(frozen=True)
class EquivalenceSchedule:
    """Schedule of the experiment that can show a tie: one language, several tuning seeds, a margin fixed beforehand.

    Attributes:
        plan: the language.
        arms: what is compared, `standard` among them.
        steps, warmup_steps: of every run.
        rates: one grid for all arms.
        tuning_seeds: all arms are trained at all rates on each of them; means over them choose the rates.
        seeds: of the runs that are reported.
        margin: difference of loss, nats per scored token, below which two arms count as equal.
    """

    plan: LanguagePlan
    arms: tuple[str, ...] = ("standard", "omega", "full", "literal", "bifocal", "placebo")
    steps: int = 400
    warmup_steps: int = 20
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    tuning_seeds: tuple[int, ...] = (100, 101, 102)
    seeds: tuple[int, ...] = tuple(range(20))
    margin: float = 0.09

    def runs(self) -> LanguageSchedule:
        """The schedule of its single runs; spectral parameters are recorded at start and end alone."""
        return LanguageSchedule(
            (self.plan,),
            steps=self.steps,
            rates=self.rates,
            seeds=self.seeds,
            warmup_steps=self.warmup_steps,
            log_every=self.steps,
        )


# The margin is a tenth of what there is to learn beyond BA's baseline: chance has a loss of 1.35, that baseline 0.43.
# It is a fifth of the gain that BA reports. The rates bracket 3e-4, the best of 3e-4, 1e-3 and 3e-3 before.
DYCK = EquivalenceSchedule(
    LanguagePlan(Dyck3((4, 8)), 16, 512, tuple(Dyck3((depth, depth)) for depth in (12, 16, 24)), 64, 16)
)
QUICK_DYCK = EquivalenceSchedule(
    LanguagePlan(Dyck3((4, 5)), 4, 8, (Dyck3((8, 8)),), 4, 4),
    arms=("standard", "literal"),
    steps=2,
    warmup_steps=1,
    rates=(1e-3, 3e-3),
    tuning_seeds=(100,),
    seeds=(0, 1, 2),
)
