"""Errors, sizes, settings, atomic files, locks, worker threads, memory and console tables, for every package."""
