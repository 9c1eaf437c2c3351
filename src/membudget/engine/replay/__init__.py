"""The replay engine: record the operators of a region, and run again what is needed.

The user's code runs once. What autograd saves is a *value*; what a policy does not keep
is dropped, and made again by running the operators that lead to it from what is held.

Rule 1. Nothing of the user's runs twice: no Python, no hook, no draw from Python's or
    NumPy's streams, no update of a statistic.
Rule 2. A replay runs exactly the operators between what is held and what living handles
    ask for, each at most once in a backward, and frees each value at its last use.
Rule 3. An operator sees what it saw: its arguments, its generator's state, grad mode,
    default dtype, dispatch modes, the settings that choose kernels; autocast has become
    operators.
Rule 4. A write is a new value. What was saved or read before it keeps what it held, and
    a replay never writes into memory that anything else needs.
Rule 5. What comes from outside is held by reference, with its version and its storage:
    a parameter, an input, a closed-over tensor that was written or exchanged since
    raises, with its name. In calls number 1, 2, 4, 8, ... of a signature its content is
    compared, too, because some writers raise no version: whole where originals are
    held for verification, by a sample of 256 elements elsewhere.
Rule 6. Running statistics, memory from outside that the region itself writes, are held
    as copies, because the next call writes them again.
Rule 7. What nobody was seen to make is held: memory that is read though no operator
    wrote it, outputs of opaque or higher-order operators, tensors from nowhere. So is
    what decides (`decides`): it must not be decided again.
Rule 8. The first step along each new path is verified, beside its originals (`verify`)
    or by fingerprints (`fingerprinted`); what does not come back is pinned, and said
    so. A verifying replay writes into nothing that anything else needs: an operator
    that is not torch's own runs on copies first (`foreign`).
Rule 9. Sources go through the saved-tensor hooks around the region, as a region's
    inputs do: engines and offloaders nest in any order.
Rule 10. The recording hangs on the handles alone, and has no cycles.
"""
