"""Rollouts: the trainers on TRL's GRPOTrainer, vLLM, checkpoints, checks, and the time of each part of a step."""
