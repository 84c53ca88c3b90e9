"""Methods related to PACS, one module each; nothing outside this folder depends on them.

`method: NAME` in a recipe trains with the module `NAME` of this folder: with its class `NAMETrainer`, configured by
`NAMEConfig` (without underscores, in any case). Each trainer is a subclass of [`PACSTrainer`] that overrides one
of its extension points (docs/extending.md), or, GenAC, of PPO's base class. Modules that begin with an underscore are
shared parts.
"""
