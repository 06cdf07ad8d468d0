"""Ways to build a step, of which the fastest that fits is looked for."""
