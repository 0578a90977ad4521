"""Recommender: click-through models on embeddings of categorical features."""
