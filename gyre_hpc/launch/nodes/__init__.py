"""The nodes of an allocation: who gets which cells, which are bad or lost, what is left on them."""
