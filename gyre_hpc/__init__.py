"""Elastic online RL for hours-long agents, as one Slurm job (docs/design.md is the map)."""
