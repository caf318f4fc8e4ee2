"""Read and write checkpoint files without running code from them: from bytes to a state dict."""
