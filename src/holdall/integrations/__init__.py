"""Bridges to other libraries; each needs an extra of its own and is imported by name."""
