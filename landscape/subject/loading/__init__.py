"""From a checkpoint, or from objects of the caller, to a `Subject` that was checked."""
