"""The program of a step, traced as one rank of a slice."""
