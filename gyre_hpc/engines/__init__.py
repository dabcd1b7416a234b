"""Rollout engines behind one client: `torch` (embedded reference engine) and any server that speaks SGLang's HTTP API."""
