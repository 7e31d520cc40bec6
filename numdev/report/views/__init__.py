"""What each kind of report shows."""
