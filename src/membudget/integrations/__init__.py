"""Budgets for the trainers of other libraries; each file needs its library."""
