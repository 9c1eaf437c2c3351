"""All text for people: reports, tables and advice."""
