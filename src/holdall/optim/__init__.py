"""Optimizers of table rows and of dense parameters, and the schedule of their learning rates."""
