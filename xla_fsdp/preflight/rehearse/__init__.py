"""A compiled program run with numbers, on virtual chips."""
