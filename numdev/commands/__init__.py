"""The commands, one file each: options, one call of a study, and what to show of it.

Everything heavy is imported inside the command, so that `--help` and shell completion answer at
once. `numdev.cli` registers them, and alone catches their errors.
"""
