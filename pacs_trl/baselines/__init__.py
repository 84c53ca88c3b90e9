"""Baselines on the same rollouts: GRPO (TRL's loss), PPO, and GenAC, whose critic reasons in words."""
