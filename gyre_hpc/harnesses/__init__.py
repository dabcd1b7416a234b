"""Harnesses from their own packages: installed into a private prefix, and checked with a scripted task."""
