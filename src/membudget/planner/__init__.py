"""From a step's numbers to a plan: pure functions, without torch.

`simulate` says what a plan costs and is the definition of it. `pieces` cuts the step,
`keep` finds what a piece may keep, `windows` what that does to the timeline, `flat`
chooses for all pieces, `choose` takes the best that fits, `plan` is what comes out.
"""
