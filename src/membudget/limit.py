"""What a step may allocate, and the errors of what takes more."""

from __future__ import annotations

from dataclasses import dataclass

from membudget.errors import BudgetError


@dataclass(frozen=True)
class Limit:
    """What a step may allocate.

    Attributes:
        budget_bytes: The most that it may allocate.
        before_bytes: What is there before it: parameters, buffers, optimizer, batch.
    """

    budget_bytes: int
    before_bytes: int

    def __str__(self) -> str:
        """Return it as a part of a sentence.

        Example:
            >>> print(Limit(2000, 500))
            2,000 bytes above the 500 that are there before the step (2,500 in all)
        """
        in_all = self.budget_bytes + self.before_bytes
        return (
            f"{self.budget_bytes:,} bytes above the {self.before_bytes:,} that are "
            f"there before the step ({in_all:,} in all)"
        )

    def refused(self, found: str, least_bytes: int, what: str = "one") -> BudgetError:
        """Return the error that says what was found, and what would be enough.

        Args:
            found: What was found, as a sentence.
            least_bytes: The least that some plan is known to fit into.
            what: The plan that does, in words.

        Example:
            >>> print(Limit(2000, 500).refused("no plan fits", 3000))
            no plan fits; the least that one fits into is 3,000 (3,500 in all)
        """
        in_all = least_bytes + self.before_bytes
        return BudgetError(
            f"{found}; the least that {what} fits into is {least_bytes:,} "
            f"({in_all:,} in all)",
            asked_bytes=self.budget_bytes,
            least_bytes=least_bytes,
        )
