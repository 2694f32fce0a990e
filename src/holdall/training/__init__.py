"""The training loop, its settings, logs and checkpoints, and the strategies of table storage."""
