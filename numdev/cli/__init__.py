"""The commands, one file each: options, one call, and what to show of it."""
