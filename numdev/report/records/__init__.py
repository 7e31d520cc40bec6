"""What a report holds, as plain records: rows, summaries, and the reports of an audit and a sweep.

JSON has no NaN: a number that means nothing is null, and its row's `nulls` says why.
"""
