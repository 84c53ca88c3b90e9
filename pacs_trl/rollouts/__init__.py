"""Base trainers on top of TRL's GRPOTrainer: generation, rewards, vLLM, checkpoints, input checks, and step timing."""
