"""Rows of `conformance` on a device: the stand-in of every machine, or the one that `--device` names."""

import inspect

import pytest
import torch
import zoo
from conformance.devices import placed_cases
from stand_in_device import DEVICE, SECOND_DEVICE, StandInDevice, WrongDevice

import tlspectral as tls
from tlspectral.models.reading import attention_view

pytestmark = pytest.mark.long


def pytest_generate_tests(metafunc):
    if "holds" in metafunc.fixturenames:
        cases = placed_cases(metafunc.config.getoption("--device"))
        metafunc.parametrize(("placed", "holds", "case"), list(cases))


def test_on_the_device(placed, holds, case, tmp_path):
    given = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(holds).parameters else {}
    with placed.place.open():
        holds(placed, *case, **given)


def test_the_stand_in_refuses_what_a_device_refuses():
    with StandInDevice(float64=False):
        x = torch.arange(3.0, device=DEVICE)
        assert x.device == torch.device(DEVICE)
        assert (x + 1).cpu().tolist() == [1, 2, 3] == (x + torch.tensor(1)).tolist()
        assert x[torch.tensor([2])].tolist() == [2]
        for wrong in (
            lambda: x + torch.ones(3),
            lambda: x + torch.ones(3, device=SECOND_DEVICE),
            lambda: x.index_select(0, torch.tensor([0])),
            lambda: torch.rand(3, generator=torch.Generator(), device=DEVICE),
            x.double,
            x.numpy,
            lambda: x.to("cpu", torch.float64),
            lambda: torch.zeros(3, dtype=torch.float64).to(DEVICE),
        ):
            with pytest.raises(WrongDevice):
                wrong()
        assert torch.equal(x.cpu().double(), torch.arange(3).double())
    with StandInDevice():
        weight = torch.nn.Parameter(torch.ones(2, device=DEVICE))
        (weight.double() ** 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == torch.device(DEVICE)


@pytest.mark.slow
@zoo.needs_hooked
def test_the_spectral_hooked_transformer_learns_on_the_device(device):
    from spectral_zoo import config

    models = [tls.SpectralHookedTransformer(config()), tls.SpectralHookedTransformer(config()).to(device)]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(zoo.prompt().to(attention_view(model).device), return_type="loss").backward()
        optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        # Autograd may add terms in another order: measured 3e-7 of a gradient's size.
        assert float((one.grad - other.grad.cpu()).norm()) <= 1e-5 * float(one.grad.norm())
