"""Planning: pure functions, without torch, from a profiled step to a plan.

Choice (of a block)  →  Schedule (of a step, simulated)  →  Plan (the file)

`planner` collects schedules from three solvers (`knapsack`, `nested`, `prices`),
improves them by local search (`search`) and ranks the results by simulation
(`simulate`). CONTRIBUTING.md describes every file in one line.
"""
