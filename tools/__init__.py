"""Tools for those who work on membudget; none of it ships."""
