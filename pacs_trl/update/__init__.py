"""The update: from completions and labels to the gradient of one optimizer step."""
