"""Faults of machines and users: functions of a folder with a checkpoint, which return what is not as it should be."""
