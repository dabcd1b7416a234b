"""Executions from launch to outcome, those of an earlier controller among them."""
