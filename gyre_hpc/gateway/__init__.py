"""The black-box boundary: unmodified harnesses on one side, token ids on the other, every call recorded between."""
