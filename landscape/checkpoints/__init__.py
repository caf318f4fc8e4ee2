"""Checkpoint files, read and written without running code from them: from bytes to a state dict."""
