"""Functions from arrays to arrays: rotary phase, spectra of M = W_Q W_K^T, the matched random null."""
