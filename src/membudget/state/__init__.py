"""Capture and restore, bit for bit, the state that a training step may change.

`walk` finds tensors, generators and Python values by name; `snapshot` captures and
restores them; `rng` and `rng_memory` handle random generators; `bits` and `identity`
detect changes of tensors.
"""
