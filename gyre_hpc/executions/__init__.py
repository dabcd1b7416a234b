"""Executions: tasks, sandboxes, harness launching, time limits, evaluation. Entry: `runner` (process), `attempts` (what it does)."""
