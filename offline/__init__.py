"""Offline reinforcement learning: data sets, algorithms, evaluation protocol, published numbers."""
