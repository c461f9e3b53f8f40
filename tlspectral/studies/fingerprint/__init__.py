"""The study of "Fingerprint, Not Blueprint" (FP): its published numbers, constrained training, questions to histories."""
