"""From a finding to a script that shows it."""
