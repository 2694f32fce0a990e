"""Errors, sizes, settings, atomic files, locks, memory and console tables: what every package may use."""
