"""Surfaces of other tools, read and written: tomgoldstein/loss-landscape, the published CSV, ParaView."""
