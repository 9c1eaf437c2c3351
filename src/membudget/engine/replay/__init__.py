"""The replay engine: record a region's operators, re-run those a backward needs.

The user's code runs once. While it runs, every operator is recorded on a tape of
*values* and *operations*. What autograd saves is a value; unless the policy keeps it,
its tensor is dropped, and the backward pass recomputes it from the tape.

    forward   Recorder ── observes ──> ForwardRecord ── builds ──> tape
    pack      autograd gets a ReplayHandle for a value ── its tensor is dropped
    unpack    Replayer plans which operations to run ── Executor runs them

Rule 1. User code runs once: no Python, no hook, no draw from Python's or NumPy's random
    streams and no update of running statistics happens in a replay.
Rule 2. A replay runs exactly the operators between the tensors in memory and the live
    handles, each at most once per backward pass, and frees each value after its last
    use.
Rule 3. A replayed operator runs under the conditions of the forward: arguments,
    generator state, grad mode, default dtype, dispatch modes and settings that choose
    kernels. Casts by autocast were recorded as operators.
Rule 4. A write creates a new value. Values that were saved or read before the write
    keep their content, and a replay never writes memory that anything else still reads.
Rule 5. Tensors from outside the region are held by reference, with their version and
    storage. If a parameter, an input or a closed-over tensor was written or its storage
    exchanged since the forward, the backward raises and names it. Some writers do not
    bump the version counter, so calls number 1, 2, 4, 8, ... of a signature also
    compare contents: all elements where originals are held for verification, a sample
    of 256 elsewhere.
Rule 6. Running statistics, i.e. memory from outside that the region itself writes, are
    held as copies, because the next call overwrites them.
Rule 7. Whatever no recorded operator produced is held: memory that is read although no
    operator wrote it, outputs of opaque or higher-order operators, tensors that appear
    from nowhere. Decisions (`membudget.ops.decides`) are held too: recomputing them
    could make another choice.
Rule 8. The first step along each new path is verified, against the original tensors
    (`verify`) or against fingerprints (`fingerprinted`). An output that does not
    reproduce bit for bit is kept from then on, with a warning. The first replay of an
    operator that is not torch's own runs on copies of its arguments (`execute`).
Rule 9. Sources pass through the saved-tensor hooks around the region, as a region's
    inputs do, so engines and offloaders nest in any order.
Rule 10. Only the handles own the tape, and the tape has no reference cycles: when the
    graph dies, the tape dies.
"""
