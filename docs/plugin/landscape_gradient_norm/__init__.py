"""A probe of `landscape` in a package of its own: the norm of the gradient of every weight tensor."""
