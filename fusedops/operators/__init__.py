"""One file an operator: WHAT it is (schema, checks, shape rule, gradient, reference, samples, cost); never how a GPU does it."""
