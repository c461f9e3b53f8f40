"""`sufficient_heads`: a smallest set of heads that keeps an answer, found by learned gates."""
