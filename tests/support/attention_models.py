"""Models of the zoo as the tests of the attention view use them, fresh to be changed."""

import torch
import zoo

BRIDGES = zoo.ARCHITECTURES + zoo.LENGTH_DEPENDENT
LAYER_NORM = ("gpt2", "neox", "phi", "gptj", "opt", "gptneo", "bloom", "cohere")


def fresh(backend, name, **options):
    return getattr(zoo, backend)(name, **options)


def poke(parameter, value):
    with torch.no_grad():
        parameter.view(-1)[0] = value


def make_deaf(model, name):
    """Make a hook point run its hooks and discard what they return, as bridges that delegate attention do."""
    point = model.hook_dict[name]

    class Deaf(type(point)):
        def __call__(self, activation):
            super().__call__(activation)
            return activation

    point.__class__ = Deaf
