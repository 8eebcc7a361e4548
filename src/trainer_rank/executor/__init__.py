"""Where tensors meet a plan: forward, heads, the autograd boundary, dry runs, out-of-memory mapping."""
