"""The replay engine records a region's operators and recomputes dropped tensors.

The user's code runs once, in the forward, where every operator is recorded on a tape of
*values* and *operations*. A tensor that autograd saves is dropped unless the policy
keeps it, and the backward pass recomputes the tensor from the tape.

    forward   Recorder ── observes ──> ForwardRecord ── builds ──> tape
    pack      autograd gets a ReplayHandle for a value ── its tensor is dropped
    unpack    Replayer plans which operations to run ── Executor runs them

Rule 1. User code runs once: a replay executes no user code and no hooks, draws nothing
    from Python's or NumPy's generators, and updates no running statistics.
Rule 2. A replay runs only the operators between tensors in memory and saved tensors
    that autograd still needs, each at most once per backward pass, and frees each value
    after its last use.
Rule 3. A replayed operator runs under the same conditions as in the forward: arguments,
    generator state, grad mode, default dtype, dispatch modes, and settings that select
    kernels. Autocast is off in a replay, because its casts were recorded as operators.
Rule 4. An in-place write creates a new value on the tape. Values that were saved or
    read before the write keep their content, and a replay never overwrites memory that
    is still to be read.
Rule 5. Tensors from outside the region are referenced, not copied; their version and
storage are recorded. If a parameter, an input or a closed-over tensor is written to, or
its storage replaced, after the forward, the backward pass raises an error that names
the tensor. Some writes do not bump the version counter, so the 1st, 2nd, 4th, 8th, ...
call with a given signature also compares tensor contents: all elements if verification
retains the originals, otherwise 256 elements of each tensor.
Rule 6. Running statistics, i.e. outside tensors that the region itself updates, are
    copied, because the region's next call overwrites them.
Rule 7. Tensors that no recorded operator can recompute stay in memory: tensors filled
    by unobserved code, outputs of opaque or higher-order operators, and tensors of
    unknown origin. Integers computed from floats, such as top-k indices, also stay in
    memory, because a recompute could select differently (`membudget.ops.decides`).
Rule 8. A region's first call with each new operator sequence is verified, against the
    original tensors (`verify`) or against fingerprints (`fingerprinted`). An output
    that a replay does not reproduce bit for bit triggers a warning and is kept from
    then on. A custom operator's first replay runs on copies of its arguments.
Rule 9. Tensors that a replay reads, except parameters, are packed by any saved-tensor
    hooks around the region, so engines and offloaders can be nested in any order. What
    a policy offloads is held in host memory instead, from the operator on that made it;
    a later write in the region waits for its copy.
Rule 10. Only the handles in the autograd graph own the tape, which has no reference
    cycles: when the graph is freed, so is the tape.
Rule 11. Calls whose operators read what they read in an earlier call, from tensors that
    share memory as they did there, and save what they saved, write no tape: the *route*
    of that call is theirs, too. Numbers among the arguments, such as sizes, may be
    others. They hold no tensor that no replay needs. Where a call parts from its route,
    it goes on along another that is the same up to there, and holds what that needs. If
    there is none, or if what it needs is gone, the call is recorded as if from its
    start: what it has overwritten since is gone, so the values made of that are kept
    instead. A route takes the extension in C++, one stream, and no saved-tensor hooks
    around the region.
"""
