"""Exports of a bundle: its model in formats that other programs run."""
