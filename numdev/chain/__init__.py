"""The chain of biased rounding in one attention call, link by link."""
