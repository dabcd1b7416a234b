"""WHEN things happen: a pure state machine over executions, batches, bursts and cells; no clock, no I/O, no torch.

`machine.decide` is the interface, `protocol` its language, `state` what its callers may read, `settings` what a run fixes.
`ledger`, `batches`, `burst` and `cells` hold the rules; `policies` what differs between gyre, colocate and async.
"""
