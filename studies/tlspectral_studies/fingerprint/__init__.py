"""The study of "Fingerprint, Not Blueprint" (FP): its numbers, constrained training, questions to histories.

`statistics` has what the paper computes, for a head table of one's own: Table 1, class tests, overlaps, top-k
sensitivity, placebos, shares of key groups. `constrained` trains, `replication` recomputes the published numbers.
"""
