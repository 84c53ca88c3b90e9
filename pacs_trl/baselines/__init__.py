"""Baselines of the paper that TRL does not ship: PPO. (GRPO is TRL's own `GRPOTrainer`.)"""
