"""Dialects: one module per vendor, pure functions between its wire format and the canonical conversation."""
