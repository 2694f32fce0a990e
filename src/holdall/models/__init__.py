"""Models: a config dataclass and an nn.Module each."""
