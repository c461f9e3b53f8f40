"""Public functions, at the top and in rooms, and those that take a model."""

import inspect

import tlspectral as tls

FIRST = {"model", "checkpoints", "name"}


IN_ROOMS = (
    tls.hooks.bake,
    tls.hooks.band_effects,
    tls.hooks.check_hook,
    tls.heads.copying_scores,
    tls.heads.qk_penalty,
    tls.tasks.induction_loss,
    tls.tasks.language_loss,
)


FUNCTIONS = {name: getattr(tls, name) for name in tls.__all__} | {public.__name__: public for public in IN_ROOMS}


TAKE_A_MODEL = [
    name for name, public in FUNCTIONS.items() if next(iter(inspect.signature(public).parameters), None) in FIRST
]
