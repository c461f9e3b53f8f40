"""Small Llamas with the arms of Spectral Evolution, and the language that they learn in tests."""

import torch
from tlspectral_studies.bifocal.evolution import spectral_modules
from tlspectral_studies.bifocal.formal_languages import Dyck3
from tlspectral_studies.bifocal.llama import ARMS, PHASE_NOISE_ARMS, LlamaConfig, SpectralLlama
from zoo import generator

LANGUAGE = Dyck3((2, 3))
SMALL = LlamaConfig(len(LANGUAGE.vocabulary), d_model=16, n_heads=4, d_mlp=24, n_ctx=64)
ALL_ARMS = {**ARMS, **PHASE_NOISE_ARMS}


def model(arm="full", seed=0, config=SMALL):
    return SpectralLlama(config, ALL_ARMS[arm], seed=seed)


def backbone(built):
    return {name: value for name, value in built.named_parameters() if ".spectral." not in name}


def jitter_spectral(built, seed=5):
    stream = generator(seed)
    with torch.no_grad():
        for module in spectral_modules(built).values():
            for parameter in module.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=stream)
    return built
