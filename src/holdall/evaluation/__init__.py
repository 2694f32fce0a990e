"""Metrics, ranking, and the scores of a model on a split."""
