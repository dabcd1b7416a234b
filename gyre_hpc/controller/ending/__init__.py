"""A run that ends before its last step: why, when, and what becomes of its job."""
