"""What a site can do: the checks of `gyre doctor`, what slurm/accept.sbatch tries, and `site.json` that keeps it."""
