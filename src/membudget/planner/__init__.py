"""Planning: pure functions that turn a profiled step into a plan and do not need torch.

Choice (of a block)  →  Schedule (of a step, simulated)  →  Plan (the file)

`planner` collects schedules from three solvers (`knapsack`, `nested`, `prices`),
improves them by local search (`search`) and ranks the results by simulation
(`simulate`). CONTRIBUTING.md describes each file of the package in one line.
"""
