"""From a step's numbers to a plan: pure functions, without torch.

Choice (of a block)  →  Schedule (of a step, simulated)  →  Plan (the file)

plan         the file: JSON, versions, checks
planner      the fastest schedule that fits, over all solvers
schedule     schedules, the simulator that remembers them, what a solver is
by_block     solver: a choice for each module, by the knapsack
nested       solver: nested recomputation of the largest module
prices       solver: keep-sets under prices of a byte at each operator
search       local search on the schedules of all solvers: fill, anneal
knapsack     dynamic programme: one choice a block
chain        dynamic programme: nested recomputation along a chain
block_costs  what each choice of a block costs beside the rest of the step
frontier     the Pareto front of a block, bytes against time
mincut       the minimum cut that finds it
blocks       where to cut the forward
simulate     the definition of peak and time
backward     the backward pass of one block
recompute    the recompute slice of dropped tensors
choice       blocks, choices, and the storages that they concern
timeline     live bytes and their peak
costs        operator times and the engine's overhead
bound        a lower bound for any schedule
"""
