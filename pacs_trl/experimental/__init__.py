"""Methods related to PACS, one module each; nothing outside this folder depends on them.

`method: NAME` in a recipe trains with the module `NAME` of this folder: with the one trainer that it defines, a
subclass of [`RolloutTrainer`] under any name, and the one configuration, a subclass of [`RolloutConfig`] (`recipe.py`
imports both). Most trainers derive from [`PACSTrainer`], [`GRPOTrainer`], or PPO's base class, and override one of
their extension points (docs/extending.md). Modules that begin with an underscore are shared parts.
"""
