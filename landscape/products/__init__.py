"""Products of Hessian, Gauss-Newton and Fisher matrix with vectors: how they are made, checked and kept in memory."""
