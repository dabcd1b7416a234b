"""The cells as the controller sees them: the phase each is in, its role switches, and their steps."""
