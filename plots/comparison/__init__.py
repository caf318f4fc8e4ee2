"""Headline numbers of stored results side by side: networks, groups over seeds, differences and verdicts."""
