"""Strategies of storing tables and fetching their rows while training, one file each."""
