"""How one region drops what autograd would save, and gives it back in time."""
