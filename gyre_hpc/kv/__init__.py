"""KV pages outside engines: the host store of a cell, and how pages move between cells."""
