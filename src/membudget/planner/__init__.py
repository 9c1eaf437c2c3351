"""From a step's numbers to a plan: pure functions, without torch."""
