"""What a report holds, as plain records: rows, what is summarised from them, and the
reports."""
