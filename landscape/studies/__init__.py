"""Studies: questions about several networks, from what is measured of them to the table and the verdict."""
