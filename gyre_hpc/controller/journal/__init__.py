"""What happened in a run, in order, on disk, and what a later controller makes of it."""
