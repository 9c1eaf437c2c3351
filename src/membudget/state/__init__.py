"""What a training step reads and writes, taken and put back bit for bit.

`walk` finds what modules and objects hold, by name; `restore` takes all of it and puts
it back; `rng`, `streams` and `marks` are the sources of random numbers; `bits` and
`copies` tell whether two tensors are the same.
"""
