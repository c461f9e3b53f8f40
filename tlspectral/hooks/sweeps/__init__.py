"""Sweeps: ablate one head after the other, summarise the effects, and ablate bands of rotary frequencies."""
