"""A schedule of seconds for the tests of canonical training."""

from tlspectral_studies.positional_symbolic.canonical import CanonicalSchedule

SHORT = CanonicalSchedule(steps=12, batch_size=32, warmup_steps=3, validation_samples=500, log_every=5)
