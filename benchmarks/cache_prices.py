"""Prices of a short cache: what the loss of later tokens costs if key/value groups keep a window and the first tokens.

    python benchmarks/cache_prices.py measure smollm2-135m FOLDER    # resumes from FOLDER
    python benchmarks/cache_prices.py measure gemma3-270m FOLDER
    python benchmarks/cache_prices.py page                           # the tables of docs/results/cache_prices.md

Schedule, fixed before the first run (29 November 2026). `tls.cache_prices` on rows of the packaged book, one behind the
other, each with a start token; 4 first tokens stay visible. Rows 0 to 7 are priced, rows 8 to 15 choose groups and price
nothing.

* Each group alone: window 128, 8 rows of 512 tokens. 1,024 tokens would take twice to three times the CPU budget.
* A set together: the half of all groups with the least attention to keys outside window and first tokens, on rows 8 to
  15; windows 64, 128 and 256; 39 random sets with as many groups of each layer beside each. 8,192 x 2 tokens would take
  more than the CPU budget, and two rows give no error.
* Gemma 3 270M has one group in each layer, so no random set of the same layers exists. Its sets are compared with 39
  random sets of as many layers, drawn with seed 0 from all layers.

The number is the paired difference: the set's change of the loss less that of a random set on the same rows, mean over
the 39 sets, with the standard error over the 8 rows, and p = (1 + random sets that cost no more) / 40. The p of all sets
of both models are corrected together by Benjamini-Hochberg. Chosen groups are said to beat random ones where q < .05.
"""
