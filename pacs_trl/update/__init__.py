"""Policy update: computes the gradient of one optimizer step from completions and labels."""
