"""Which revision of a hub model holds which training step, by a pattern of their names."""

import re
from collections.abc import Sequence

from tlspectral.models.loading.hub import hub_revisions
from tlspectral.models.loading.source import Source

_FIELD = re.compile(r"\{(\w+)\}")
# A digit beside a field would belong to its number.
_STEP, _NUMBER = r"(?<!\d)(\d+)(?!\d)", r"(?<!\d)\d+(?:\.\d+)?(?!\d)"


def revisions_by_step(source: Source, pattern: str, steps: Sequence[int] | None = None) -> dict[int, str]:
    """Return the names of a hub model's revisions by training step, rising, or those of `steps` in their order.

    Args:
        source: the hub model.
        pattern: a revision's name with `{step}` in place of the training step and other names in braces in place of
            other numbers.
        steps: which of them; None for all.

    Raises:
        ValueError: no hub model, a pattern without `{step}`, one that fits no revision or two of one step, or steps
            that no revision holds.
    """
    name = source.record["model"]
    if source.kind != "hub":
        raise ValueError(
            f"{name} is no hub model and has no revisions: leave revisions= out, and give the folder of its steps or a "
            "list of (step, name) pairs"
        )
    pieces = _FIELD.split(pattern)
    if pieces[1::2].count("step") != 1:
        raise ValueError(
            f"revisions={pattern!r} does not say once where the training step stands: write {{step}} there, as in "
            "'step{step}' (Pythia) or 'step{step}-tokens{tokens}B' (OLMo)"
        )
    fits = re.compile(
        "".join(
            re.escape(piece) if index % 2 == 0 else _STEP if piece == "step" else _NUMBER
            for index, piece in enumerate(pieces)
        )
    )
    by_step: dict[int, str] = {}
    names = hub_revisions(source)
    for revision in names:
        match = fits.fullmatch(revision)
        if match is None:
            continue
        step = int(match[1])
        if step in by_step:
            raise ValueError(
                f"{name} has two revisions of step {step} that fit {pattern!r}, {by_step[step]} and {revision}: write "
                "out in the pattern what tells them apart"
            )
        by_step[step] = revision
    if not by_step:
        raise ValueError(f"no revision of {name} fits {pattern!r}; there are {_some(names)}")
    chosen = sorted(by_step) if steps is None else steps
    missing = [step for step in chosen if step not in by_step]
    if missing:
        raise ValueError(
            f"{name} has no revision of steps {missing} that fits {pattern!r}; it has steps "
            f"{_some(list(map(str, sorted(by_step))))}"
        )
    return {step: by_step[step] for step in chosen}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
