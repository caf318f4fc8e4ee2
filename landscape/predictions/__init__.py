"""What is computed from predicted probabilities: scores of samples, calibration, ensembles."""
