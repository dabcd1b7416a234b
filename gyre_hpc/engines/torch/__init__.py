"""Embedded reference engine for CPU and tests: small dense Qwen3-architecture models, not a production engine."""
