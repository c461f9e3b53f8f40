"""All that a call could leave behind in a model."""

import torch
import zoo


def warm(model):
    """Run once: bridges and transformers put hooks of their own on modules at the first forward."""
    with torch.no_grad():
        model(zoo.prompt())
    return model


def state_of(model):
    """Tensors, modules, flags, gradients, hooks in their order and contexts, of the model and of what it wraps."""
    tensors, modules = {}, {}
    for label, root in (("model", model), ("wrapped", getattr(model, "original_model", None))):
        if root is None:
            continue
        tensors |= {(label, key): value for key, value in root.state_dict().items() if isinstance(value, torch.Tensor)}
        tensors |= {(label, "buffer", key): value for key, value in root.named_buffers()}
        for name, module in root.named_modules():
            hooks = [list(getattr(module, f"_{kind}_hooks").items()) for kind in ("forward", "forward_pre", "backward")]
            points = [len(getattr(module, f"{kind}_hooks", ())) for kind in ("fwd", "bwd")]
            own = [(id(value), value.requires_grad, value.grad) for value in module.parameters(recurse=False)]
            modules[label, name] = (id(module), module.training, hooks, points, own)
    copies = {key: (value.data_ptr(), value.detach().clone()) for key, value in tensors.items()}
    points = {name: dict(point.ctx) for name, point in model.hook_dict.items()}
    return copies, modules, points, sorted(vars(model)), getattr(model, "context_level", None), repr(model.cfg)


def bits(tensor):
    # HookedTransformer leaves BLOOM's W_pos uninitialised: it may hold NaN, which equals nothing.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_unchanged(model, before):
    tensors, *rest = state_of(model)
    assert rest == list(before[1:])
    assert tensors.keys() == before[0].keys()
    for key, (pointer, value) in tensors.items():
        assert pointer == before[0][key][0], key
        assert value.dtype == before[0][key][1].dtype, key
        assert bits(value) == bits(before[0][key][1]), key
