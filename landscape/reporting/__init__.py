"""What a run says while it works: progress, forecasts and events."""
