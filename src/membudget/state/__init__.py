"""What a training step reads and writes, captured and restored bit for bit.

`walk` finds what modules and objects hold, by name; `snapshot` captures and restores
it; `rng` and `rng_memory` cover the random generators; `bits` and `identity` tell
whether a tensor is still the same.
"""
