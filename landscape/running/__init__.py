"""Run a probe: its units in this process or in others, resumed and written as they finish."""
