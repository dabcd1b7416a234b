"""What a person sees of a run: metrics lines, the terminal, idle time, where each cell stands."""
