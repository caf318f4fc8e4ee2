"""Statistics of estimates: their intervals and the tests of their differences, from numbers alone."""
