"""How the shipped starting policy is made: tokenizer, noisy demonstrations, supervised training (`gyre warmstart`)."""
