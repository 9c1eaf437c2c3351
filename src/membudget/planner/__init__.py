"""From a step's numbers to a plan: pure functions, without torch.

Choice (of a block)  →  Schedule (of a step, simulated)  →  Plan (the file)

`planner` asks three solvers (`knapsack`, `nested`, `prices`) for schedules, improves
them (`search`) and has the last word from the simulation (`simulate`). What each file
is for stands in the map of CONTRIBUTING.md.
"""
