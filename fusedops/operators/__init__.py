"""WHAT each operator is, a file each: schema, check, shape rule, gradient, reference, samples, cost."""
