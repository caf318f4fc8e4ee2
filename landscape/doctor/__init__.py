"""Find what is wrong or suspicious with stored results, and what to do about it: rules on stored facts and statistics.

A rule is a function that reads one result, or several, and yields findings; torch is never needed. Thresholds come from
the statistics of the stored errors, and the docstring of every rule states the reason.
"""
