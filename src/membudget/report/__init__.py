"""Everything that is printed for a person to read: tables, reports, advice."""
