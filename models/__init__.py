"""The model zoo: one package a model, each of the same shape (model.py, data.py, task.py)."""
