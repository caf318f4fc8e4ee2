"""Hessian-vector products, and the spectra, densities and traces that are computed from them."""
