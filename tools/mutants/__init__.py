"""Mutation testing: plant one small fault at a time and see whether a test notices.

`find` lists the mutants of a file and draws some; `covering` knows which tests run
which lines; `trees` gives each worker a copy of the repository, so the checkout stays
as it is; `children` forks a process that has torch imported already; `verdict` runs the
covering tests on one mutant; `equivalent` holds the mutants that no test can tell
apart.
"""
