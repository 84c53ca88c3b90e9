"""Learn: from rows and labels to the gradient of one optimizer step."""
