"""The study of "Fingerprint, Not Blueprint" (FP): its numbers, constrained training, questions to histories."""
