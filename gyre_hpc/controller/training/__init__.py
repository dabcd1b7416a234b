"""The open batch: who claims and who contributes; the core's weights before and after its step."""
