"""Why a row is large."""
