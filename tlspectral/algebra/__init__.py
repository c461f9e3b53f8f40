"""Arrays in, arrays out: rotary phase, spectra, the matched random null. Knows no model and no table."""
