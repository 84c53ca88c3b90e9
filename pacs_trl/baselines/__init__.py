"""Baselines on the same rollouts: GRPO (TRL's loss) and PPO."""
