"""Effects of ablations: sweeps over all heads, their summary, bands of rotary frequencies."""
