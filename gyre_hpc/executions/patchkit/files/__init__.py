"""Programs copied into workspaces and hidden folders; never imported by gyre_hpc."""
