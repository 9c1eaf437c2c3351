"""Training loops drawn at random, run plainly and under a budget."""
