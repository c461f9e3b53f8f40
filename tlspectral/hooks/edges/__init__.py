"""Cut and measure edges: a sender (head, MLP, mixer, embedding) feeds a receiver (q, k, v, MLP, logits)."""
