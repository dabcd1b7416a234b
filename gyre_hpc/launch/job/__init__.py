"""A Slurm job of a run: what it asks for, how it is submitted and staged, how long it lives, and who comes after it."""
