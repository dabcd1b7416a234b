"""A real SGLang as a cell's rollout engine: started, fed with weights, its KV pages in a store of ours, confirmed by checksum.

The leader's side (process, arguments, weights_checksum, page_keys) runs in this project's environment; `server`, `hicache` and
`cpu` run inside the engine's processes, in the environment that holds SGLang, and import nothing but it, msgspec and xxhash.
"""
