"""What test_faults.py and benchmarks/failing_calls.py do with commands in a folder."""
